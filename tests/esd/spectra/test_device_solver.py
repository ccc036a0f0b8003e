"""Spectra by torch: each card in the arithmetic that it is good at, and what it can't resolve is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuherd.esd import eigenvalues
from gpuherd.esd.spectra.device import (
    GramArithmetic,
    arithmetic_of,
    did_not_converge,
    eigenvalues_of_grams,
    gram_on_device,
)

DEVICE = "cpu:0"
ARITHMETICS = (GramArithmetic("float64", "device"), GramArithmetic("split", "band"), GramArithmetic("split", "device"))


def pieces(W: np.ndarray, step: int = 130) -> list[torch.Tensor]:
    rows, columns = W.shape
    starts = range(0, max(W.shape), step)
    return [torch.from_numpy((W[s : s + step] if rows >= columns else W[:, s : s + step]).copy()) for s in starts]


@pytest.mark.parametrize("capability", [(6, 0), (7, 0), (8, 0), (9, 0), (10, 0), None])
def test_cards_with_many_float64_units_use_them(capability: tuple[int, int] | None) -> None:
    assert arithmetic_of(capability, "float64") == GramArithmetic("float64", "device")
    assert arithmetic_of(capability, "float32") == GramArithmetic("float32", "device")


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 5), (8, 6), (8, 9), (10, 3), (12, 0), (13, 0)])
def test_other_cards_multiply_in_float32_without_loss(capability: tuple[int, int]) -> None:
    assert arithmetic_of(capability, "float64") == GramArithmetic("split", "band")
    assert arithmetic_of(capability, "float32") == GramArithmetic("float32", "device")


@pytest.mark.parametrize("shape", [(60, 400), (400, 60), (90, 90), (1, 50)])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_the_eigenvalues_are_those_of_the_cpu(shape: tuple[int, int], arithmetic: GramArithmetic) -> None:
    W = np.random.default_rng(0).standard_t(3, shape).astype(np.float32)
    gram = gram_on_device(pieces(W), shape, DEVICE, arithmetic.gram)
    assert gram is not None
    (values,) = eigenvalues_of_grams([gram], arithmetic.solver)
    expected = eigenvalues(W)
    assert values is not None
    assert values.dtype == np.float64
    assert np.abs(values - expected).max() <= 1e-13 * len(expected) * expected[-1]


@pytest.mark.parametrize("solver", ["device", "band"])
def test_several_at_once_are_those_one_by_one(solver: str) -> None:
    random = np.random.default_rng(1)
    grams = [torch.from_numpy(W @ W.T) for W in random.standard_normal((5, 30, 40))]
    single = [eigenvalues_of_grams([gram.clone()], solver)[0] for gram in grams]  # type: ignore[arg-type]
    together = eigenvalues_of_grams(grams, solver)  # type: ignore[arg-type]
    assert grams == []
    for one, other in zip(single, together, strict=True):
        assert one is not None
        assert other is not None
        assert np.abs(one - other).max() <= 1e-14 * one[-1]


@pytest.mark.parametrize("solver", ["device", "band"])
def test_what_a_gram_matrix_cannot_resolve_is_said(solver: str) -> None:
    random = np.random.default_rng(2)
    low = random.standard_normal((40, 3)) @ random.standard_normal((3, 50))
    full = random.standard_normal((40, 50))
    grams = [gram_on_device(pieces(W), W.shape, DEVICE, "float64") for W in (low, full)]
    values = eigenvalues_of_grams([gram.clone() for gram in grams if gram is not None], solver)  # type: ignore[arg-type]
    assert values[0] is None
    assert values[1] is not None
    first, _ = eigenvalues_of_grams([gram for gram in grams if gram is not None], solver, resolve=False)  # type: ignore[arg-type]
    assert first is not None
    assert (first >= 0).all()
    assert first[-1] == pytest.approx(np.linalg.norm(low, 2) ** 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 1e200, 1e-200])
def test_no_gram_matrix_where_it_would_mean_nothing(value: float) -> None:
    W = np.full((20, 30), value)
    assert gram_on_device(pieces(W), W.shape, DEVICE, "float64") is None


def test_a_solver_that_gives_up_is_known() -> None:
    with pytest.raises(torch.linalg.LinAlgError) as caught:  # type: ignore[attr-defined]
        torch.linalg.cholesky(-torch.eye(2))
    assert did_not_converge(caught.value)
    assert did_not_converge(np.linalg.LinAlgError())
    assert not did_not_converge(RuntimeError())


@pytest.mark.parametrize(
    ("words", "given_up"),
    [
        ("cusolver error: CUSOLVER_STATUS_INVALID_VALUE, when calling `cusolverDnXsyevd_bufferSize(`", True),
        ("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `cusolverDnXsyevd(`", True),
        ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnXsyevd(`", False),
        ("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_a_matrix_that_cusolver_refuses_is_for_the_cpu(words: str, given_up: bool) -> None:
    assert did_not_converge(RuntimeError(words)) is given_up


@pytest.mark.parametrize(
    ("solver", "dtype"), [("device", torch.float64), ("device", torch.float32), ("band", torch.float64)]
)
def test_a_result_that_does_not_add_up_is_not_taken(
    solver: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """A matrix of which the solver sees one triangle only stands in for a solver that goes wrong."""
    W = torch.from_numpy(np.random.default_rng(3).standard_normal((90, 100))).to(dtype)
    right = W @ W.T
    wrong = right + 30.0 * torch.triu(torch.ones_like(right), 1)
    first, second = eigenvalues_of_grams([right, wrong], solver)  # type: ignore[arg-type]
    assert first is not None
    assert second is None
    assert "don't add up" in caplog.text


def test_of_float32_every_eigenvalue_above_zero_counts() -> None:
    values = torch.tensor([[1e-9, 1.0, 2.0], [-1e-9, 1.0, 2.0]])
    found = eigenvalues_of_grams([torch.diag(each) for each in values], "device")
    assert found[0] is not None
    assert found[0].dtype == np.float64
    assert found[1] is None
    assert gram_on_device([torch.full((3, 4), 1e20)], (3, 4), DEVICE, "float32") is None
