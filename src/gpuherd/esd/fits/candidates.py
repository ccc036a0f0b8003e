"""Finds the tail of least distance among thousands without computing each distance: exact, by branch and bound.

The distance at any one point is a lower bound of D_i, the largest of them. A few sampled points give each candidate a
bound; one computed in full gives a limit, and whoever's bound is above it is out. The point at which a distance was
reached sharpens the bounds of all others (neighbours tend to have theirs at the same point), so that a handful of
distances is computed in full. O(n K) for K sampled points and O(n) for each distance in full; O(n) memory.

It knows bounds and limits. It doesn't know what a distance is.
"""

from __future__ import annotations

import math

import numpy as np

from gpuherd.esd.fits.ks import Float64, Indices, Tails

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
