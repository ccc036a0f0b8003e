"""The Marchenko-Pastur law fitted to the bulk of a spectrum, and the eigenvalues that stand out from it.

A random M x N matrix (M <= N, Q = N / M) of independent entries has, scaled so that the mean of its M eigenvalues is 1,
the density

    rho(x) = Q / (2 pi sigma² x) sqrt((b - x)(x - a)),   a, b = sigma² (1 -+ 1/sqrt(Q))²

with sigma = 1 (Marchenko and Pastur 1967). In a trained matrix, spikes carry a part of the mean, and sigma is less.

The procedure is WeightWatcher's (0.7.7, ``RMT_Util.fit_density_with_range``), so that its sigma comes out. The density
of the spectrum is estimated on 1,000 points by a linear kernel of bandwidth 0.1; sigma minimises the sum of squared
differences, first over 195 steps, then by the simplex method of Nelder and Mead. WeightWatcher estimates the density
anew for each sigma, though it doesn't depend on it. Here it is estimated once, by prefix sums over the sorted
eigenvalues.

For square matrices (Q = 1) the density of the singular values s is compared with the quarter circle
sqrt(4 - s²) / (pi sigma²), again as WeightWatcher does it: sigma scales the height of the circle and not its radius.

Knows sorted numbers and the shape of the matrix only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from gpuherd.esd.schema import DetXTail, MarchenkoPasturFit

Float64 = npt.NDArray[np.float64]

BANDWIDTH = 0.1
POINTS = 1000
# Where the estimated density is below this, the two densities are not compared.
LEAST_DENSITY = 0.01
# sigma goes in steps of 0.01 from 0.05 to 2, in units of the sigma that would put the bulk's edge at the largest λ.
FIRST, LAST, STEP = 0.05, 2.0, 0.01
# What stands for each squared difference where the bulk's edges lie on the wrong side of the spectrum's peak.
PENALTY = 1000.0**2


def fit_marchenko_pastur(evals: Float64, rows: int, columns: int) -> MarchenkoPasturFit:
    """Fits the law to a spectrum.

    Args:
        evals: all λ of the matrix, ascending, not negative, with a positive and finite sum; shape (n,). Of a
            convolution those of all slices.
        rows: of the matrix, or of one slice.
        columns: likewise.
    """
    small, large = min(rows, columns), max(rows, columns)
    # The largest is taken out first, so that neither a sum nor its inverse leaves the range of float64.
    relative = evals / evals[-1]
    mean = float(relative.mean())
    scaled = relative / mean
    scale = 1.0 / (math.sqrt(evals[-1]) * math.sqrt(mean))
    square = small == large
    x, y = estimated_density(np.sqrt(scaled) if square else scaled)
    if x.size == 0:
        return MarchenkoPasturFit(
            None, scale, mp_status=f"the density of the spectrum is nowhere above {LEAST_DENSITY:g}"
        )
    misfit = partial(_misfit_of_circle, x, y) if square else partial(_misfit_of_bulk, x, y, large / small)
    unit = math.sqrt(scaled[-1]) / (1.0 + math.sqrt(small / large))
    sigma = _best_sigma(misfit, math.inf if square else PENALTY * len(x), unit)
    if sigma is None:
        return MarchenkoPasturFit(
            None, scale, mp_status="no bulk has its edges on both sides of the peak of the spectrum"
        )
    return _result(sigma, scaled, scale, small, large)


def _result(sigma: float, scaled: Float64, scale: float, small: int, large: int) -> MarchenkoPasturFit:
    ratio = math.sqrt(small / large)  # 1 / sqrt(Q)
    low, high = (sigma * (1.0 - ratio)) ** 2, (sigma * (1.0 + ratio)) ** 2
    edge = high + math.sqrt(ratio * high ** (2 / 3) * small ** (-2 / 3))
    return MarchenkoPasturFit(
        sigma_mp=sigma,
        W_scale=scale,
        bulk_min=low / scale / scale,
        bulk_max=high / scale / scale,
        tw_edge=edge / scale / scale,
        num_spikes=len(scaled) - int(np.searchsorted(scaled, edge, side="right")),
        mp_softrank=high / float(scaled[-1]),
        mp_status="ok",
    )


def estimated_density(values: Float64) -> tuple[Float64, Float64]:
    """Points, ascending, and the density there of ``values`` (ascending) by the kernel (1 - |d| / h) / h: POINTS points
    from 0 to their largest and 0.5 more, but for those where it is small.

    A point's density needs, on either side, how many values lie within the bandwidth and what they add up to: both are
    differences of prefix sums.
    """
    n, h = len(values), BANDWIDTH
    x = np.linspace(0.0, values[-1] + 0.5, POINTS)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    low, middle, high = (np.searchsorted(values, edges) for edges in (x - h, x, x + h))
    below = (middle - low) * (h - x) + (sums[middle] - sums[low])
    above = (high - middle) * (h + x) - (sums[high] - sums[middle])
    y = (below + above) / (n * h * h)
    kept = y > LEAST_DENSITY
    return x[kept], y[kept]


def _misfit_of_bulk(x: Float64, y: Float64, q: float, sigma: Float64) -> Float64:
    """Sum of squared differences of the Marchenko-Pastur law with a given Q from the density ``y`` at ``x``, for each
    sigma; shape of ``sigma``, one axis."""
    peak, last = x[y.argmax()], x[-1]
    low, high = (sigma * (1.0 - math.sqrt(1.0 / q))) ** 2, (sigma * (1.0 + math.sqrt(1.0 / q))) ** 2
    possible = (high >= peak) & (high <= last) & (low <= peak)
    result = np.full(len(sigma), PENALTY * len(x))
    if possible.any():
        s, a, b = sigma[possible, None], low[possible, None], high[possible, None]
        inside = np.maximum((b - x) * (x - a), 0.0)
        with np.errstate(invalid="ignore"):  # x = 0 is outside the bulk: 0 / 0
            fitted = np.where(inside > 0.0, np.sqrt(inside) * q / (2.0 * math.pi * s * s * x), 0.0)
        result[possible] = ((fitted - y) ** 2).sum(axis=1)
    return result


def _misfit_of_circle(x: Float64, y: Float64, sigma: Float64) -> Float64:
    """The same of the quarter circle, (c / sigma² - y)²."""
    circle = np.sqrt(np.maximum(4.0 - x**2, 0.0)) / math.pi
    misfit: Float64 = ((circle / (sigma * sigma)[:, None] - y) ** 2).sum(axis=1)
    return misfit


def _best_sigma(misfit: Callable[[Float64], Float64], penalised: float, unit: float) -> float | None:
    """The sigma of least misfit: the best of the steps, then Nelder and Mead from there. None if all are penalised."""
    from scipy.optimize import fmin  # 0.1 s to import, for the few analyses that ask for this fit

    def of_one(sigma: Float64) -> float:
        return float(misfit(sigma)[0])

    steps = np.mgrid[FIRST * unit : LAST * unit : STEP * unit]
    misfits = misfit(steps)
    start = int(misfits.argmin())
    if misfits[start] >= penalised:
        return None
    return float(fmin(of_one, steps[start : start + 1], disp=False)[0])


# --- det X = 1 --------------------------------------------------------------------------------------------------------
#
# Where the tail of a spectrum has determinant 1: the ERG (exact renormalisation group) condition, det X = 1.
#
# The eigenvalues are scaled so that their mean is 1. From the largest one down, the product first rises and then falls,
# since it gains factors above 1 as long as λ is above the mean; the tail ends with the eigenvalue that brings it below
# 1. WeightWatcher takes a layer as ideal where the power law's tail and this one end together: ERG_gap = 0.
#
# Knows sorted numbers only. Products are sums of logarithms, so that nothing over- or underflows at any n. (The
# product itself does: WeightWatcher 0.7.7, which multiplies, found 5,482 where it is 6,063, at n = 8192.)

EPS = float(np.finfo(np.float64).eps)


def detx_tail(evals: Float64, num_pl_spikes: int | None = None) -> DetXTail:
    """The tail of determinant 1, in O(n).

    Args:
        evals: ascending, not negative, finite, at least one above 0; shape (n,). A zero ends the tail at the latest.
        num_pl_spikes: of the power law's tail, where there is one.
    """
    n = len(evals)
    if n < 2 or evals[0] >= evals[-1] * (1.0 - n * EPS):
        return DetXTail()
    # The largest is taken out first: no sum overflows, and the mean is between 1/n and 1.
    relative = evals[::-1] / evals[-1]
    with np.errstate(divide="ignore"):  # λ = 0: its logarithm is -inf, and the product 0
        log_product = np.cumsum(np.log(relative) - np.log(relative.mean()))
    # By the inequality of the means the product of all is below 1; rounding can hide that for nearly equal values.
    below = log_product < 0.0
    number = int(below.argmax()) + 1 if bool(below.any()) else n
    return DetXTail(number, float(evals[n - number]), None if num_pl_spikes is None else number - num_pl_spikes)
