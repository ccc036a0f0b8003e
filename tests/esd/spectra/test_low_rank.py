"""The spectrum of a product of thin factors against that of the dense product."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd.config import FitSettings
from gpuherd.esd.pipeline import with_figures
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.spectra.pooled import low_rank_eigenvalues, low_rank_spectrum


def dense(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    singular = np.linalg.svd(left.astype(np.float64) @ right.astype(np.float64), compute_uv=False)
    return np.sort(singular**2)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32 - 1), st.sampled_from("fd"))
def test_equal_to_the_dense_product(rows: int, columns: int, rank: int, seed: int, kind: str) -> None:
    """Also of a rank above both sides."""
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((rows, rank)).astype(kind), rng.standard_normal((rank, columns)).astype(kind)
    values = low_rank_eigenvalues(left, right)
    wanted = dense(left, right)
    assert values.dtype == np.float64 and values.shape == wanted.shape
    assert (np.diff(values) >= 0).all()
    assert np.abs(values - wanted).max() <= 1e-10 * wanted[-1]
    assert np.count_nonzero(values) <= rank


def test_a_lora_of_a_large_layer() -> None:
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((700, 16)), rng.standard_normal((16, 1100)) * 10.0 ** rng.uniform(-3, 0, (16, 1))
    values = low_rank_eigenvalues(left, right)
    assert len(values) == 700 and np.count_nonzero(values) == 16
    assert np.abs(values - dense(left, right)).max() <= 1e-12 * values[-1]


@pytest.mark.parametrize("exponent", [-140, 140])
def test_factors_of_any_size(exponent: int) -> None:
    """Entries of 1e±140 each: their product's squares would leave the range of float64, the values are told apart."""
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((9, 2)) * 10.0**exponent, rng.standard_normal((2, 9))
    plain = low_rank_eigenvalues(left * 10.0**-exponent, right)
    assert np.allclose(low_rank_eigenvalues(left, right), plain * 10.0 ** (2 * exponent), rtol=1e-12, atol=0)


def test_a_value_that_float64_cannot_hold_is_infinite_or_zero() -> None:
    ones = np.ones((4, 2))
    assert low_rank_eigenvalues(ones * 1e100, ones.T * 1e100)[-1] == np.inf
    assert low_rank_eigenvalues(ones * 1e-100, ones.T * 1e-100)[-1] == 0.0
    assert "too large" in (low_rank_spectrum([(ones * 1e100, ones.T * 1e100)]).problem or "")


def test_inputs_are_not_changed() -> None:
    left, right = np.asfortranarray(np.eye(5, 2)), np.eye(2, 4) * 3
    before = left.copy(), right.copy()
    low_rank_eigenvalues(left, right)
    assert np.array_equal(left, before[0]) and np.array_equal(right, before[1])


def test_a_convolution_is_pooled_and_halved() -> None:
    rng = np.random.default_rng(1)
    products = [(rng.standard_normal((8, 2)), rng.standard_normal((2, 6))) for _ in range(9)]
    spectrum = low_rank_spectrum(products, conv=True)
    wanted = np.sort(np.concatenate([dense(*product) for product in products])) / 2
    assert len(spectrum.evals) == 54
    assert np.abs(spectrum.evals - wanted).max() <= 1e-12 * wanted[-1]


def test_problems_are_said() -> None:
    ones = np.ones((4, 2))
    assert low_rank_spectrum([(np.zeros((4, 2)), np.ones((2, 4)))]).problem == "all weights are zero"
    spoilt = np.array([[1.0, np.nan]] * 4)
    assert "NaN or infinite" in (low_rank_spectrum([(spoilt, np.ones((2, 4)))]).problem or "")
    assert "NaN or infinite" in (low_rank_spectrum([(ones, np.full((2, 4), np.inf))]).problem or "")
    small = low_rank_spectrum([(np.ones((1, 2)), np.ones((2, 4)))])
    assert small.problem == "too small: 1x4 gives 1 eigenvalue, a fit needs 2"
    tiny = np.full((4, 2), 1e-200)
    assert "too small for float64" in (low_rank_spectrum([(tiny, tiny.T)]).problem or "")


def test_figures_are_those_of_the_dense_matrix_and_the_rank_is_right() -> None:
    rng = np.random.default_rng(5)
    left, right = rng.standard_normal((300, 12)) * 10.0 ** rng.uniform(-2, 0, 12), rng.standard_normal((12, 200))
    row = LayerRow(longname="x", M=300, N=200, params=60000)
    figures = with_figures(row, low_rank_spectrum([(left, right)]), FitSettings(fix_fingers="DKS"))
    values = dense(left, right)
    assert (figures.matrix_rank, figures.num_evals, figures.fit_status) == (12, 12, "ok")
    assert figures.norm == pytest.approx(values.sum(), rel=1e-12)
    assert figures.spectral_norm == pytest.approx(values[-1], rel=1e-12)
