"""xmin_mid and both peak windows against TempBalance's loop, written in float64 from its published definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.esd.fits.plain import FAMILIES, Float64, peak_of, spectrum

from gpuherd.esd import fit_power_law
from gpuherd.esd.config import Method
from gpuherd.esd.fits.power_law import PeakMethod, peak_window


def loop(x: Float64, method: Method, *, bins: int = 100, xmin_pos: float = 2) -> tuple[float, float]:
    """alpha and D as the loop of TempBalance and of the estimators made from it finds them: every candidate in turn,
    alpha from the sum of logarithms, the first of least D; 1 for a candidate without a fit."""
    n = len(x)
    logs = np.log(x)
    if method == "xmin_mid":
        i = int(n / xmin_pos)
        tail = n - i
        alpha = 1 + tail / (logs[i:].sum() - tail * logs[i])
        return float(alpha), float(np.abs(1 - (x[i:] / x[i]) ** (1 - alpha) - np.arange(tail) / tail).max())
    counts, edges = np.histogram(np.log10(x), bins=bins)
    peak = 10 ** edges[counts.argmax()]
    low = {"DKS": -math.inf, "xmin_peak": 0.95 * peak, "xmin_peak_wide": math.log10(0.95 * peak)}[method]
    high = math.inf if method == "DKS" else 1.5 * peak
    alphas, distances = np.zeros(n - 1), np.ones(n - 1)
    for i, xmin in enumerate(x[:-1]):
        if xmin < low:
            continue
        if xmin > high:
            break
        tail = n - i
        alpha = 1 + tail / (logs[i:].sum() - tail * logs[i])
        alphas[i] = alpha
        if alpha > 1:
            distances[i] = np.abs(1 - (x[i:] / xmin) ** (1 - alpha) - np.arange(tail) / tail).max()
    best = distances.argmin()
    return float(alphas[best]), float(distances[best])


def spectra() -> list[Float64]:
    """Without ties and constants, of which the loop makes infinite alphas and distances decided by rounding."""
    families = [family for family in FAMILIES if family not in ("duplicates and ties", "constants")]
    made = [spectrum(family, seed, 700) for family in families for seed in range(10)]
    weights = [np.random.default_rng(seed).standard_normal((48 + 16 * seed, 160)) for seed in range(4)]
    return [*made, *((np.linalg.svd(W, compute_uv=False)[::-1] ** 2).astype(np.float64) for W in weights)]


@pytest.mark.parametrize("method", ["DKS", "xmin_mid", "xmin_peak", "xmin_peak_wide"])
def test_the_loop_of_the_older_codes(method: Method) -> None:
    compared = 0
    for x in spectra():
        fit = fit_power_law(x, method)
        if fit.alpha is None:
            assert "equal" in fit.status or "no candidate" in fit.status
            continue
        compared += 1
        assert (fit.alpha, fit.D) == pytest.approx(loop(x, method), abs=1e-6)
    assert compared > 40


@pytest.mark.parametrize("bins", [1, 7, 100])
def test_the_two_windows_share_their_peak_and_upper_end(bins: int) -> None:
    x = spectrum("two laws", 3, 900)
    peak = peak_of(x, bins)
    assert peak_window(x, bins, "xmin_peak") == pytest.approx((0.95 * peak, 1.5 * peak))
    assert peak_window(x, bins, "xmin_peak_wide") == pytest.approx((math.log10(0.95 * peak), 1.5 * peak))


def test_the_wide_window_has_no_lower_end_where_the_peak_is_low_and_a_low_one_else() -> None:
    """The slip of the older codes: a peak of 100 has the lower end log10 95 = 1.98, one of 0.5 a negative end."""
    x = np.sort(np.concatenate([np.geomspace(0.01, 1, 300), np.full(200, 100.0) * np.linspace(1, 1.001, 200)]))
    low, high = peak_window(x, 100, "xmin_peak_wide")
    assert 1.9 < low < 2 < 90 < high
    narrow, wide = fit_power_law(x, "xmin_peak"), fit_power_law(x, "xmin_peak_wide")
    assert narrow.xmin is not None
    assert narrow.xmin > 90
    assert wide.xmin is not None
    assert wide.xmin >= low
    assert peak_window(x / 200, 100, "xmin_peak_wide")[0] < 0


def test_the_two_names_differ_where_it_matters() -> None:
    """Some spectra of a random family give the two methods different alphas; the documented one never looks below."""
    differ = 0
    for seed in range(30):
        x = spectrum("two laws", seed, 500)
        narrow, wide = fit_power_law(x, "xmin_peak"), fit_power_law(x, "xmin_peak_wide")
        if narrow.xmin is not None and wide.xmin is not None:
            assert narrow.xmin >= 0.95 * peak_of(x, 100)
            differ += narrow.alpha != wide.alpha
    assert differ >= 5


@pytest.mark.parametrize("method", ["xmin_peak", "xmin_peak_wide"])
@pytest.mark.parametrize(("x", "bins"), [([1e5, 1e5 + 2e-10], 100), ([2.0, 2.0 + 6e-15, 2.0 + 2e-14], 3000)])
def test_values_too_close_together_for_a_histogram(method: PeakMethod, x: list[float], bins: int) -> None:
    """numpy makes no histogram of them; all lie in the window whichever bin is the fullest."""
    values = np.array(x)
    assert peak_window(values, bins, method)[1] == pytest.approx(1.5 * x[0])
    fit, searched = fit_power_law(values, method, bins=bins), fit_power_law(values, "DKS")
    assert (fit.status, fit.alpha, fit.xmin) == ("ok", searched.alpha, searched.xmin)
