"""Power-law fits p(x) ~ x^(-alpha), x >= xmin, to the upper tail of a spectrum.

For a spectrum x_0 <= … <= x_{n-1} a candidate i = 0 … n-2 takes xmin = x_i and the n_i = n - i values from there on:

    alpha_i = 1 + n_i / S_i,   S_i = sum_{j>=i} ln(x_j / x_i)              maximum likelihood, no upper cut-off
    D_i     = max_{j>=i} | 1 - (x_j / x_i)^(1 - alpha_i) - (j - i) / n_i |  one-sided Kolmogorov-Smirnov distance

("one-sided": the empirical distribution by its left limits only, as WeightWatcher and TempBalance compute it.)

It knows sorted numbers; it doesn't know matrices. numpy only, O(n) memory but for a small table of sampled distances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.settings import METHODS, Method

Float64 = npt.NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)

# A lower bound and an exact distance of the same pair can differ by rounding; candidates this close are looked at.
SLACK = 1e-13

# Where in its tail (0 = xmin, 1 = the largest value) each candidate is sampled first: Chebyshev points, so that the
# ends, where short tails differ most, are seen densely.
SAMPLES: Float64 = 0.5 - 0.5 * np.cos(np.pi * (np.arange(16) + 0.5) / 16)


@dataclass(frozen=True, slots=True)
class PowerLawFit:
    """A fit, or the reason why there is none.

    Attributes:
        alpha: exponent of the density; None where there is no fit.
        D: one-sided Kolmogorov-Smirnov distance, 0 to 1.
        xmin: the value from which on the law is fitted (one of the spectrum's own).
        xmax: the largest value of the spectrum. It takes no part in the likelihood.
        sigma: standard error of alpha, (alpha - 1) / sqrt(num_tail).
        num_tail: how many values are >= xmin in the sorted order, n - i.
        status: ``"ok"``, or one sentence that says why the rest is None.
    """

    alpha: float | None
    D: float | None
    xmin: float | None
    xmax: float | None
    sigma: float | None
    num_tail: int | None
    status: str


def fit_power_law(
    evals: npt.NDArray[np.floating[Any]], method: Method, *, bins: int = 100, xmin_pos: float = 2
) -> PowerLawFit:
    """Fits a power law to a spectrum, with xmin chosen by ``method``.

    * ``DKS``: the candidate of smallest D_i, over all of them, exactly; the first one if several are equal.
    * ``xmin_mid``: the candidate i = int(n / xmin_pos), at most n - 2.
    * ``xmin_peak``: the candidate of smallest D_i among 0.95 p <= x_i <= 1.5 p, where p is the left edge of the first
      fullest of ``bins`` equal bins of log10 x over [min, max]. (This is the documented window; WeightWatcher and
      TempBalance compare with log10(0.95 p) on the left, so that their window has no lower end.)

    A candidate whose whole tail is equal within rounding (n eps of the largest value, the error of an eigenvalue) has
    no finite alpha and is passed over. alpha > 1 then holds for every other candidate.

    Args:
        evals: ascending, positive, finite; shape (n,). What is to be left out has been left out.
        method: one of ``METHODS``.
        bins: of the histogram for ``xmin_peak``.
        xmin_pos: the middle for ``xmin_mid``: 2 is the median.

    Raises:
        ValueError: an unknown method, bins < 1, xmin_pos < 1, or a spectrum that is not as above.
    """
    x = np.asarray(evals, dtype=np.float64)
    _check_arguments(x, method, bins, xmin_pos)
    n = len(x)
    if n < 2:
        return _no_fit(f"too few eigenvalues for a fit: {n}, at least 2 are needed")
    # Candidates 0 … stop-1 have tails wider than rounding: a prefix, since x ascends.
    stop = int(np.searchsorted(x, x[-1] * (1.0 - n * EPS)))
    if stop == 0:
        return _no_fit(f"all {n} eigenvalues are equal: alpha is infinite")
    tails = _Tails(x)
    if method == "DKS":
        return _result(tails, *_least_distance(tails, 0, stop))
    if method == "xmin_mid":
        middle = min(int(n / xmin_pos), n - 2)
        if middle >= stop:
            return _no_fit(f"the {n - middle} eigenvalues from the middle up are equal: alpha is infinite")
        return _result(tails, middle, tails.distance(middle)[0])
    low, high = _peak_window(x, bins)
    first = int(np.searchsorted(x, low, side="left"))
    last = min(int(np.searchsorted(x, high, side="right")), stop)
    if first >= last:
        return _no_fit(f"no candidate for xmin in the window around the peak, {low:.6g} to {high:.6g}")
    return _result(tails, *_least_distance(tails, first, last))


def _check_arguments(x: Float64, method: str, bins: int, xmin_pos: float) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r} to choose xmin; use {', '.join(METHODS)}")
    if bins < 1 or not xmin_pos >= 1:
        raise ValueError(f"bins ({bins}) and xmin_pos ({xmin_pos}) must be at least 1")
    if x.ndim != 1 or (x.size and not (x[0] > 0 and math.isfinite(x[-1]) and bool((x[1:] >= x[:-1]).all()))):
        raise ValueError("a spectrum to fit must be one ascending row of positive, finite numbers")


def _no_fit(status: str) -> PowerLawFit:
    return PowerLawFit(None, None, None, None, None, None, status)


class _Tails:
    """All tails of one spectrum: their alphas, and their distances on demand.

    ``logs`` are ln(x_j / x_{n-1}), taken as distances from the top with full relative accuracy, so that differences
    within a narrow tail lose no digits. The sums S_i follow from S_i = S_{i+1} + (n-1-i) ln(x_{i+1} / x_i), a sum of
    non-negative terms: nothing cancels.
    """

    def __init__(self, x: Float64) -> None:
        self.x = x
        self.n = len(x)
        self.logs = _log_ratio(x, x[-1])
        sums = np.cumsum((np.arange(self.n - 1, 0, -1) * _log_ratio(x[1:], x[:-1]))[::-1])[::-1]
        with np.errstate(divide="ignore"):  # equal top values: their candidates are never asked for
            self.slopes = np.arange(self.n, 1, -1) / sums  # alpha_i - 1, i = 0 … n-2

    def distance(self, i: int) -> tuple[float, int]:
        """D_i exactly, and the j at which it is reached."""
        gaps = self.logs[i:] - self.logs[i]
        gaps *= -self.slopes[i]
        np.expm1(gaps, out=gaps)
        gaps += np.arange(self.n - i) / (self.n - i)
        np.abs(gaps, out=gaps)
        j = int(gaps.argmax())
        return float(gaps[j]), i + j

    def sampled(self, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp] | np.intp) -> Float64:
        """The distance of candidates ``i`` at single points ``j`` >= i: lower bounds of D_i. The arrays broadcast."""
        fitted = np.expm1((self.logs[i] - self.logs[j]) * self.slopes[i])
        distances: Float64 = np.abs(fitted + (j - i) / (self.n - i))
        return distances


def _log_ratio(x: Float64, base: Float64 | np.float64) -> Float64:
    """ln(x / base) to full relative accuracy also where the ratio is near 1, and without over- or underflow."""
    near = (0.5 * x < base) & (x > 0.5 * base)
    excess = (np.where(near, x, base) - base) / base
    return np.where(near, np.log1p(excess), np.log(x) - np.log(base))


def _least_distance(tails: _Tails, first: int, stop: int) -> tuple[int, float]:
    """The first candidate in [first, stop) of smallest D_i, and that D_i: exact, by branch and bound.

    A distance at any one point is a lower bound of D_i. Each candidate gets a bound from a few sampled points; then the
    most promising one is computed in full, and the point where its distance was reached sharpens the bounds of all
    others (neighbours tend to have theirs at the same point). Whoever's bound is above the best distance so far is out.
    O(n K) for K samples plus O(n) for each of the c candidates computed in full; c is 1 to some hundreds.
    """
    alive = np.arange(first, stop)
    points = alive[:, None] + np.rint((tails.n - 1 - alive)[:, None] * SAMPLES).astype(np.intp)
    bounds = tails.sampled(alive[:, None], points).max(axis=1)
    best, best_distance = -1, math.inf
    while alive.size:
        candidate = int(alive[bounds.argmin()])
        distance, reached = tails.distance(candidate)
        if distance < best_distance or (distance == best_distance and candidate < best):
            best, best_distance = candidate, distance
        covered = alive <= reached
        bounds[covered] = np.maximum(bounds[covered], tails.sampled(alive[covered], np.intp(reached)))
        keep = (bounds <= best_distance + SLACK) & (alive != candidate)
        alive, bounds = alive[keep], bounds[keep]
    return best, best_distance


def _peak_window(x: Float64, bins: int) -> tuple[float, float]:
    """0.95 p and 1.5 p for the peak p of the histogram of log10 x."""
    counts, edges = np.histogram(np.log10(x), bins=bins)
    peak = 10.0 ** float(edges[int(counts.argmax())])
    return 0.95 * peak, 1.5 * peak


def _result(tails: _Tails, i: int, distance: float) -> PowerLawFit:
    slope = float(tails.slopes[i])
    tail = tails.n - i
    return PowerLawFit(
        alpha=1.0 + slope,
        D=distance,
        xmin=float(tails.x[i]),
        xmax=float(tails.x[-1]),
        sigma=slope / math.sqrt(tail),
        num_tail=tail,
        status="ok",
    )
