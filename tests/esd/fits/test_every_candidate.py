"""The exact searches against plain ones over every candidate: index, alpha, D and interval, for all methods."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from tests.esd.fits.plain import FAMILIES, Float64, Plain, every_candidate, in_window, peak_of, spectrum

from gpuherd.esd import PowerLawFit, fit_power_law
from gpuherd.esd.config import KS, KS_KINDS, Method

# 7 families of so many spectra.
QUICK, SHORT, LONG = 40, 100, 1930
# Of the many, so many have up to 5000 values, the others up to 1000: searching all candidates plainly takes n² steps.
LARGE_ONE_IN = 5
# And so many go through the other methods as well, which choose from fewer candidates by the same search.
ALL_METHODS_ONE_IN = 10


def check_search(x: Float64, delta: float) -> Plain:
    """The search over all candidates, both distances, on one spectrum."""
    plain = every_candidate(x)
    assert np.isfinite(plain.one_sided).any()
    for ks in KS_KINDS:
        check(plain, x, "DKS", ks, delta, plain.best(ks), None)
    return plain


def check_all_methods(x: Float64, delta: float) -> None:
    """Every method and distance on one spectrum."""
    plain = check_search(x, delta)
    for ks in KS_KINDS:
        middle = min(len(x) // 2, len(x) - 2)
        if math.isfinite(plain.one_sided[middle]):
            check(plain, x, "xmin_mid", ks, delta, middle, None)
        peak = peak_of(x, 100)
        for method, low in (("xmin_peak", 0.95 * peak), ("xmin_peak_wide", math.log10(0.95 * peak))):
            allowed = in_window(x, low, 1.5 * peak) & np.isfinite(plain.one_sided)
            if allowed.any():
                check(plain, x, method, ks, delta, plain.best(ks, allowed), allowed)  # type: ignore[arg-type]
            else:
                assert fit_power_law(x, method, ks=ks).status.startswith("no candidate")  # type: ignore[arg-type]


def check(
    plain: Plain,
    x: Float64,
    method: Method,
    ks: KS,
    delta: float,
    expected: int,
    allowed: npt.NDArray[np.bool_] | None,
) -> None:
    fit = fit_power_law(x, method, ks=ks, delta=delta)
    assert fit.status == "ok"
    assert fit.num_tail == len(x) - expected, (method, ks)
    assert (fit.xmin, fit.xmax) == (x[expected], x[-1])
    assert fit.alpha == pytest.approx(plain.alphas[expected], rel=1e-9)
    assert pytest.approx(plain.distances(ks)[expected], abs=1e-11) == fit.D
    assert fit.sigma == pytest.approx((plain.alphas[expected] - 1) / math.sqrt(fit.num_tail), rel=1e-9)
    found = (fit.alpha_lo, fit.alpha_hi)
    assert found == pytest.approx(plain.interval(ks, expected, delta, allowed), rel=1e-9), (method, ks)
    assert_contains(fit)


def assert_contains(fit: PowerLawFit) -> None:
    assert fit.alpha is not None
    assert fit.alpha_lo is not None
    assert fit.alpha_hi is not None
    assert fit.alpha_lo <= fit.alpha <= fit.alpha_hi


def deltas(number: int) -> float:
    return (0.0, 1e-3, 1e-2, 0.3)[number % 4]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seeds", [range(QUICK), pytest.param(range(QUICK, SHORT), marks=pytest.mark.slow)], ids=str)
def test_made_up_spectra(family: str, seeds: range) -> None:
    for seed in seeds:
        check_all_methods(spectrum(family, seed, 400), deltas(seed))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", range(10))
def test_thirteen_thousand_five_hundred_made_up_spectra(family: str, part: int) -> None:
    for number, seed in enumerate(range(SHORT + part, SHORT + LONG, 10)):
        x = spectrum(family, seed, 5000 if number % LARGE_ONE_IN == 0 else 1000)
        (check_all_methods if number % ALL_METHODS_ONE_IN == 0 else check_search)(x, deltas(number + number // 10))
