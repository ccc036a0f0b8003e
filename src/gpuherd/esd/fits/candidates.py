"""Finds the tail of least distance among thousands without computing each distance: exact, by branch and bound.

The distance at any one point is a lower bound of D_i, the largest of them. A few sampled points give each candidate a
bound; one computed in full gives a limit, and whoever's bound is above it is out. The point at which a distance was
reached sharpens the bounds of all others (neighbours tend to have theirs at the same point), so that a handful of
distances is computed in full. O(n K) for K sampled points and O(n) for each distance in full; O(n) memory.

It knows bounds and limits. It doesn't know what a distance is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpuherd.esd.fits.ks import Indices, Tails

# Distances so close are equal: a hundred times their rounding. Spectra with repeated values have exact ties, which
# rounding must not decide; of equal ones the first candidate, with the longest tail, counts.
TIE = 1e-12

# A sampled and a full distance of one pair can differ by rounding.
SLACK = 1e-13

# Where in its tail (0 = xmin, 1 = the largest value) a candidate is sampled: Chebyshev points, so that the ends, where
# short tails differ most, are seen densely. Every fourth is looked at first, for all candidates.
_CHEBYSHEV = tuple(0.5 - 0.5 * math.cos(math.pi * (k + 0.5) / 16) for k in range(16))
COARSE = _CHEBYSHEV[2::4]
FINE = tuple(point for point in _CHEBYSHEV if point not in COARSE)


class Candidates:
    """The candidates first … stop-1 of one spectrum, and what is known of their distances so far.

    Attributes:
        tails: of the spectrum.
        first: the first candidate's index.
        bounds: lower bounds of the distances of all candidates, float64, shape (stop - first,).
        distances: the distances computed in full, by index.
    """

    def __init__(self, tails: Tails, first: int, stop: int) -> None:
        self.tails = tails
        self.first = first
        self.bounds = np.zeros(stop - first)
        self.distances: dict[int, float] = {}
        self._unknown = np.ones(stop - first, dtype=np.bool_)

    def least(self) -> tuple[int, float]:
        """The candidate of least distance and that distance; of those equal within TIE, the first. There must be one
        candidate at least."""
        if len(self.bounds) == 1:
            return self.first, self.examine(self.first)
        alive = self.sharpen(self._all(), COARSE, math.inf)
        best = self._examine_most_promising(alive)
        alive = self.sharpen(self.remaining(alive, best + TIE), FINE, best + TIE)
        while alive.size:
            best = min(best, self._examine_most_promising(alive))
            alive = self.remaining(alive, best + TIE)
        chosen = min(i for i, distance in self.distances.items() if distance <= best + TIE)
        return chosen, self.distances[chosen]

    def any_within(self, limit: float) -> bool:
        """Whether any distance is at most ``limit``: answered sooner than which one is the least."""
        alive = self.sharpen(self._all(), COARSE, limit)
        if alive.size and self._examine_most_promising(alive) <= limit:
            return True
        alive = self.sharpen(self.remaining(alive, limit), FINE, limit)
        while alive.size:
            if self._examine_most_promising(alive) <= limit:
                return True
            alive = self.remaining(alive, limit)
        return False

    def sharpen(self, who: Indices, points: Sequence[float], limit: float) -> Indices:
        """Samples ``who`` at ``points`` of their tails. Returns those that can still be within ``limit``."""
        for point in points:
            last = self.tails.n - 1
            self._raise(who, who + np.rint((last - who) * point).astype(np.intp))
            who = self.remaining(who, limit)
        return who

    def examine(self, i: int, others: Indices | None = None) -> float:
        """Computes the distance of ``i`` in full, and sharpens the bounds of ``others`` by where it was reached."""
        distance, reached = self.tails.distance(i)
        self.distances[i] = distance
        self._unknown[i - self.first] = False
        if others is not None:
            self._raise(others[others <= reached], np.intp(reached))
        return distance

    def remaining(self, who: Indices, limit: float) -> Indices:
        """Those of ``who`` whose distance is not known in full and can be within ``limit``."""
        at = who - self.first
        return who[(self.bounds[at] <= limit + SLACK) & self._unknown[at]]

    def _all(self) -> Indices:
        return np.arange(self.first, self.first + len(self.bounds))

    def _examine_most_promising(self, who: Indices) -> float:
        return self.examine(int(who[self.bounds[who - self.first].argmin()]), who)

    def _raise(self, who: Indices, points: Indices | np.intp) -> None:
        at = who - self.first
        self.bounds[at] = np.maximum(self.bounds[at], self.tails.sampled(who, points))
