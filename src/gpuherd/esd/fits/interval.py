"""How far alpha could be elsewhere at nearly the same distance: the least and the largest alpha of all near-best tails.

An alpha with a narrow interval is a property of the spectrum; one with a wide interval is a property of the search.
It knows candidates and a limit. It doesn't know how the limit was chosen.
"""

from __future__ import annotations

import numpy as np

from gpuherd.esd.fits.candidates import Candidates
from gpuherd.esd.fits.ks import Indices

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
