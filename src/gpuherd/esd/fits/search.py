"""The tails of one spectrum: their exponents, and how far each fitted law is from its values.

For a spectrum x_0 <= … <= x_{n-1} the tail i = 0 … n-2 has xmin = x_i and the n_i = n - i values from there on:

    alpha_i = 1 + n_i / S_i,   S_i = sum_{j>=i} ln(x_j / x_i)     maximum likelihood, no upper cut-off (Clauset, Shalizi
                                                                  and Newman 2009, eq. 3.1)
    F_j     = 1 - (x_j / x_i)^(1 - alpha_i),  E_j = (j - i) / n_i  the fitted and the empirical distribution at x_j
    D_i     = max_{j>=i} |F_j - E_j|                               one-sided: the left limits of E only
    D_i     = max_{j>=i} max(|F_j - E_j|, |E_j + 1 / n_i - F_j|)   two-sided: both limits, the textbook's distance

It knows sorted numbers. It doesn't know which tail to choose.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from gpuherd.esd.config import KS

Float64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

EPS = float(np.finfo(np.float64).eps)


class Tails:
    """All tails of one spectrum: their slopes alpha_i - 1, and their distances on demand.

    Attributes:
        n: number of values.
        stop: tails 0 … stop-1 have a finite alpha. From ``stop`` on, all values are equal within n eps of the largest,
            the error of an eigenvalue.
        slopes: alpha_i - 1, shape (n - 1,), float64; of use below ``stop`` only.
    """

    def __init__(self, logs: Float64, steps: Float64, stop: int, ks: KS) -> None:
        """From ln(x_j / x_{n-1}), ascending to 0, shape (n,), and ln(x_{j+1} / x_j), shape (n - 1,).

        The sums S_i follow from S_i = S_{i+1} + (n - 1 - i) ln(x_{i+1} / x_i), a sum of terms of one sign: no digit is
        lost, as it would be in the difference of a sum of logarithms and n_i ln x_i.
        """
        self.n = len(logs)
        self.stop = stop
        self._logs = logs
        self._ranks = np.arange(self.n, dtype=np.float64)
        self._right = 1.0 if ks == "two-sided" else 0.0
        sums = np.cumsum(self._ranks[1:] * steps[::-1])  # from the top down
        with np.errstate(divide="ignore"):  # equal top values: tails from ``stop`` on
            self.slopes: Float64 = ((self._ranks[1:] + 1.0) / sums)[::-1]

    @classmethod
    def of(cls, x: Float64, ks: KS) -> Tails:
        """The tails of ``x``: ascending, positive, finite."""
        stop = int(np.searchsorted(x, x[-1] * (1.0 - len(x) * EPS)))
        return cls(_log_ratio(x, x[-1:]), _log_ratio(x[1:], x[:-1]), stop, ks)

    def distance(self, i: int) -> tuple[float, int]:
        """D_i exactly, and a j at which it is reached."""
        size = self.n - i
        gaps = self._logs[i:] - self._logs[i]
        gaps *= -self.slopes[i]
        np.expm1(gaps, out=gaps)
        gaps += self._ranks[:size] / size
        above, below = int(gaps.argmax()), int(gaps.argmin())
        over, under = float(gaps[above]) + self._right / size, -float(gaps[below])
        return (over, i + above) if over >= under else (under, i + below)

    def sampled(self, i: Indices, j: Indices | np.intp) -> Float64:
        """The distance of the tails ``i`` at single points ``j`` >= i: a lower bound of D_i. The arrays broadcast."""
        size = self.n - i
        gaps: Float64 = self._logs[i] - self._logs[j]
        gaps *= self.slopes[i]
        np.expm1(gaps, out=gaps)
        gaps += (j - i) / size
        if self._right:
            return np.maximum(gaps + self._right / size, -gaps)
        return np.abs(gaps, out=gaps)


def _log_ratio(x: Float64, base: Float64) -> Float64:
    """ln(x / base) to full relative accuracy also where the ratio is near 1, and without over- or underflow."""
    out: Float64 = np.log(x)
    out -= np.log(base)
    near = np.flatnonzero((0.5 * x < base) & (x > 0.5 * base))
    close = np.broadcast_to(base, x.shape)[near]
    out[near] = np.log1p((x[near] - close) / close)
    return out


# --- The tail of least distance ---------------------------------------------------------------------------------------
#
# Finds the tail of least distance among thousands without computing each distance: exact, by branch and bound.
#
# The distance at any one point is a lower bound of D_i, the largest of them. A few sampled points give each candidate
# a bound; one computed in full gives a limit, and whoever's bound is above it is out. The point at which a distance
# was reached sharpens the bounds of all others (neighbours tend to have theirs at the same point), so that a handful
# of distances is computed in full. O(n K) for K sampled points and O(n) for each distance in full; O(n) memory.
#
# It knows bounds and limits. It doesn't know what a distance is.

# Distances so close are equal: a hundred times their rounding. Spectra with repeated values have exact ties, which
# rounding must not decide; of equal ones the first candidate, with the longest tail, counts.
TIE = 1e-12

# A sampled and a full distance of one pair can differ by rounding.
SLACK = 1e-13

# Where in its tail (0 = xmin, 1 = the largest value) a candidate is sampled: 16 Chebyshev points, so that the ends,
# where short tails differ most, are seen densely. Two of them are looked at for all candidates, the others, in this
# order, for those that are left. (Of several orders tried on Pareto, lognormal, uniform and random-matrix spectra,
# this one samples least.)
_CHEBYSHEV = tuple(0.5 - 0.5 * math.cos(math.pi * (k + 0.5) / 16) for k in range(16))
COARSE = (_CHEBYSHEV[5], _CHEBYSHEV[10])
FINE = tuple(_CHEBYSHEV[k] for k in (2, 13, 7, 8, 0, 15, 4, 11, 1, 3, 6, 9, 12, 14))

# So many distances are sampled in one call.
AT_ONCE = 1024


class Candidates:
    """The candidates first … stop-1 of one spectrum, and what is known of their distances so far.

    Attributes:
        tails: of the spectrum.
        first: the first candidate's index.
        bounds: lower bounds of the distances of all candidates, float64, shape (stop - first,); inf, so that they are
            out of every search, for those examined.
        distances: the distances computed in full, by index.
    """

    def __init__(self, tails: Tails, first: int, stop: int) -> None:
        self.tails = tails
        self.first = first
        self.bounds = np.zeros(stop - first)
        self.distances: dict[int, float] = {}
        self._sampled = False

    def least(self) -> tuple[int, float]:
        """The candidate of least distance and that distance; of those equal within TIE, the first. There must be one
        candidate at least."""
        if len(self.bounds) == 1:
            return self.first, self.examine(self.first)
        self._sample_all()
        alive = self._all()
        best = self._examine_most_promising(alive)
        alive = self.sharpened(alive, best + TIE)
        while alive.size:
            best = min(best, self._examine_most_promising(alive))
            alive = self.remaining(alive, best + TIE)
        chosen = min(i for i, distance in self.distances.items() if distance <= best + TIE)
        return chosen, self.distances[chosen]

    def any_within(self, limit: float) -> bool:
        """Whether any distance is at most ``limit``: answered sooner than which one is the least."""
        self._sample_all()
        alive = self.remaining(self._all(), limit)
        if alive.size and self._examine_most_promising(alive) <= limit:
            return True
        alive = self.sharpened(alive, limit)
        while alive.size:
            if self._examine_most_promising(alive) <= limit:
                return True
            alive = self.remaining(alive, limit)
        return False

    def sharpened(self, who: Indices, limit: float) -> Indices:
        """Those of ``who`` that can be within ``limit``, after a look at all sample points."""
        self._sample_all()
        who = self.remaining(who, limit)
        places = list(FINE)
        while places and who.size:
            # Of many candidates, a point rules out a good part before the next one; of few, the calls are what counts.
            now = places[: max(1, AT_ONCE // who.size)]
            del places[: len(now)]
            self._raise(who, self.tails.sampled(who[:, None], self._sample_points(who[:, None], now)).max(axis=1))
            who = self.remaining(who, limit)
        return who

    def examine(self, i: int, others: Indices | None = None) -> float:
        """Computes the distance of ``i`` in full, and sharpens the bounds of ``others`` by where it was reached."""
        distance, reached = self.tails.distance(i)
        self.distances[i] = distance
        self.bounds[i - self.first] = np.inf
        if others is not None:
            others = others[others <= reached]
            self._raise(others, self.tails.sampled(others, np.intp(reached)))
        return distance

    def remaining(self, who: Indices, limit: float) -> Indices:
        """Those of ``who`` whose distance is not known in full and can be within ``limit``."""
        return who[self.bounds[who - self.first] <= limit + SLACK]

    def _all(self) -> Indices:
        return np.arange(self.first, self.first + len(self.bounds))

    def _sample_all(self) -> None:
        """Bounds of all candidates from the coarse points; once."""
        if not self._sampled:
            who = self._all()
            for point in COARSE:
                np.maximum(self.bounds, self.tails.sampled(who, self._sample_points(who, point)), out=self.bounds)
            self._sampled = True

    def _sample_points(self, who: Indices, places: float | list[float]) -> Indices:
        points: Indices = who + ((self.tails.n - 1 - who) * np.array(places) + 0.5).astype(np.intp)
        return points

    def _examine_most_promising(self, who: Indices) -> float:
        return self.examine(int(who[self.bounds[who - self.first].argmin()]), who)

    def _raise(self, who: Indices, bounds: Float64) -> None:
        at = who - self.first
        self.bounds[at] = np.maximum(self.bounds[at], bounds)


# --- The interval of alpha --------------------------------------------------------------------------------------------
#
# How far alpha could be elsewhere at nearly the same distance: the least and the largest alpha of all near-best
# tails.
#
# An alpha with a narrow interval is a property of the spectrum; one with a wide interval is a property of the search.
# It knows candidates and a limit. It doesn't know how the limit was chosen.

# How many of the outermost candidates are sampled first; then twice as many, and so on.
FIRST_LOOK = 128


def alpha_interval(candidates: Candidates, limit: float) -> tuple[float, float]:
    """The least and the largest alpha of all candidates whose distance is at most ``limit``: exact.

    Only candidates whose alpha lies outside what is found already are looked at, the outermost first, so that the first
    one within the limit ends the search on its side.

    Args:
        candidates: with at least one distance within the limit known in full.
        limit: a distance.
    """
    slopes = candidates.tails.slopes
    known = [i for i, distance in candidates.distances.items() if distance <= limit]
    low, high = (int(known[pick]) for pick in (np.argmin(slopes[known]), np.argmax(slopes[known])))
    stop = candidates.first + len(candidates.bounds)
    own = slopes[candidates.first : stop]
    below = np.flatnonzero(own < slopes[low]) + candidates.first
    above = np.flatnonzero(own > slopes[high]) + candidates.first
    low = _outermost(candidates, below, limit, -1.0, low)
    high = _outermost(candidates, above, limit, 1.0, high)
    return 1.0 + float(slopes[low]), 1.0 + float(slopes[high])


def _outermost(candidates: Candidates, who: Indices, limit: float, side: float, found: int) -> int:
    """The one of ``who`` within the limit whose slope is farthest out on that side (+1: largest); else ``found``."""
    slopes = candidates.tails.slopes
    who = candidates.remaining(who, limit)
    order = who[np.argsort(-side * slopes[who])]
    start, size = 0, FIRST_LOOK
    while start < len(order):
        alive = candidates.sharpened(order[start : start + size], limit)
        while alive.size:
            if candidates.examine(int(alive[0]), alive) <= limit:
                return int(alive[0])
            alive = candidates.remaining(alive, limit)
        start, size = start + size, 2 * size
    return found
