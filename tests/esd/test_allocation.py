"""TempBalance and AlphaPruning from the alphas of a model: against their formulas written plainly."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.esd.allocation import BYS, MAPPINGS, By, factors, sparsities
from gpuherd.esd.results import StoredLayer


def layer(name: str, alpha: float | None, *, params: int = 100, evals: int = 768, status: str = "ok") -> StoredLayer:
    return StoredLayer(name, params, evals, alpha, status)


def model(alphas: list[float], params: list[int] | None = None, per_block: int = 2) -> list[StoredLayer]:
    sizes = params or [100] * len(alphas)
    return [
        layer(f"h.{index // per_block}.m{index % per_block}", alpha, params=size)
        for index, (alpha, size) in enumerate(zip(alphas, sizes, strict=True))
    ]


ALPHAS = [9.0, 3.0, 2.5, 4.0, 6.0, 3.5, 9.0]


def test_linear_factors_are_the_papers() -> None:
    found = factors(model(ALPHAS))
    inner = np.array(ALPHAS[1:-1])
    wanted = np.interp(inner, [inner.min(), inner.max()], [0.5, 1.5])
    assert [each.factor for each in found[1:-1]] == pytest.approx(wanted, abs=1e-15)
    assert [each.factor for each in found if each.excluded] == [1.0, 1.0]


def test_the_other_mappings_are_those_of_its_code() -> None:
    inner = np.array(ALPHAS[1:-1])
    n = len(inner)
    for mapping, wanted in (
        ("sqrt", np.sqrt(inner) / np.sum(np.sqrt(inner)) * n),
        ("log2", np.log2(inner) / np.sum(np.log2(inner)) * n),
        ("step", 0.5 + np.argsort(np.argsort(inner)) / n),
    ):
        found = factors(model(ALPHAS), mapping)  # type: ignore[arg-type]
        assert [each.factor for each in found[1:-1]] == pytest.approx(wanted, abs=1e-14), mapping


def test_layers_that_keep_their_rate() -> None:
    layers = [
        layer("h.0.a", 3.0),
        layer("h.0.b", None, status="not analysed: left out"),
        layer("h.1.a", 5.0, evals=49),
        layer("h.2.a", None, status="all weights are zero"),
        layer("h.3.a", 2.0),
        layer("h.4.a", 4.0),
        layer("h.5.a", 3.0),
    ]
    found = factors(layers)
    assert [each.longname for each in found] == ["h.0.a", "h.1.a", "h.2.a", "h.3.a", "h.4.a", "h.5.a"]
    assert [each.factor for each in found] == [1.0, 1.0, 1.0, 0.5, 1.5, 1.0]
    assert found[1].excluded == "49 eigenvalues, fewer than 50"
    assert found[2].excluded == "no valid fit: all weights are zero"


def test_the_ends_are_those_of_the_network_and_not_of_the_file() -> None:
    """A checkpoint has its names in the order of the alphabet."""
    inner = [layer(f"model.layers.{number}.up", 2.0 + number / 10) for number in (0, 1, 10, 11, 2, 3)]
    head = factors([layer("lm_head", 9.0), layer("model.embed_tokens", None, status="not analysed: x"), *inner])
    assert [(each.longname, each.factor) for each in head if each.excluded] == [("lm_head", 1.0)]
    assert [each.factor for each in head if each.longname in ("model.layers.0.up", "model.layers.11.up")] == [0.5, 1.5]
    tied = factors([layer("wte", None, status="not analysed: embedding"), *inner])
    assert not any(each.excluded for each in tied)
    assert {each.longname: each.excluded for each in factors(inner) if each.excluded} == {
        "model.layers.0.up": "first layer",
        "model.layers.11.up": "last layer",
    }
    assert factors([layer("h.0.a", None, status="not analysed: left out")]) == []


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_models_with_nothing_to_balance(mapping: str) -> None:
    assert factors([], mapping) == []  # type: ignore[arg-type]
    assert [each.factor for each in factors(model([2.0, 2.0]), mapping)] == [1.0, 1.0]  # type: ignore[arg-type]
    if mapping != "step":
        assert [each.factor for each in factors(model([2.0] * 5), mapping)] == [1.0] * 5  # type: ignore[arg-type]


def paper(scores: list[float], params: list[int], target: float, epsilon: float) -> list[float]:
    s, p = np.array(scores), np.array(params)
    r = (s - s.min()) / (s.max() - s.min()) * 2 * epsilon + 1 - epsilon
    return list(r * p.sum() * target / (p * r).sum())


def test_sparsities_are_the_papers_where_none_is_above_the_most() -> None:
    alphas, params = [2.0, 4.0, 3.0, 5.0, 6.0, 2.5], [10, 20, 30, 10, 50, 7]
    found = sparsities(model(alphas, params), 0.5)
    blocks = [3.0, 3.0, 4.0, 4.0, 4.25, 4.25]
    assert [each.score for each in found] == blocks
    assert [each.sparsity for each in found] == pytest.approx(paper(blocks, params, 0.5, 0.3), rel=1e-13)
    alone = sparsities(model(alphas, params), 0.4, by="layer", epsilon=0.2)
    assert [each.sparsity for each in alone] == pytest.approx(paper(alphas, params, 0.4, 0.2), rel=1e-13)


@given(
    st.lists(st.tuples(st.floats(1.01, 50), st.integers(1, 10**9)), min_size=1, max_size=40),
    st.floats(0, 0.999),
    st.floats(0, 0.999),
    st.sampled_from(BYS),
)
def test_the_mean_is_the_target_and_each_is_possible(
    layers: list[tuple[float, int]], target: float, epsilon: float, by: By
) -> None:
    alphas, params = [alpha for alpha, _ in layers], [size for _, size in layers]
    found = sparsities(model(alphas, params), target, by=by, epsilon=epsilon)
    assert all(0 <= each.sparsity < 1 for each in found)
    mean = math.fsum(each.sparsity * each.params for each in found) / sum(params)
    assert mean == pytest.approx(target, rel=1e-12, abs=1e-15)
    order = sorted(found, key=lambda each: each.score or 0.0)
    assert all(a.sparsity <= b.sparsity * (1 + 1e-12) for a, b in pairwise(order))


def test_heads_are_not_pruned_and_blocks_without_a_fit_are_pruned_like_the_middle() -> None:
    layers = [
        layer("embed", 3.0),
        layer("h.0.a", 2.0),
        layer("h.1.a", None, status="all weights are zero"),
        layer("h.2.a", 4.0),
        layer("h.3.a", None, status="not analysed: left out"),
        layer("lm_head", 3.0),
    ]
    found = sparsities(layers, 0.5)
    assert [each.longname for each in found] == ["h.0.a", "h.1.a", "h.2.a"]
    assert [each.sparsity for each in found] == pytest.approx([0.35, 0.5, 0.65])
    assert found[1].score is None


@pytest.mark.parametrize(("target", "epsilon"), [(1.0, 0.3), (-0.1, 0.3), (float("nan"), 0.3), (0.5, 1.0), (0.5, -1.0)])
def test_impossible_wishes(target: float, epsilon: float) -> None:
    with pytest.raises(UsageError, match="must be"):
        sparsities(model(ALPHAS), target, epsilon=epsilon)


def test_nothing_to_prune() -> None:
    for layers in ([], [layer("lm_head", 3.0)], [layer("h.0.a", None, status="all weights are zero")]):
        with pytest.raises(UsageError, match="no numbered layer"):
            sparsities(layers, 0.5)
