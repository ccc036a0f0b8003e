"""How far alpha could be elsewhere at nearly the same distance: the least and the largest alpha of all near-best tails.

An alpha with a narrow interval is a property of the spectrum; one with a wide interval is a property of the search.
It knows candidates and a limit. It doesn't know how the limit was chosen.
"""

from __future__ import annotations

import numpy as np

from gpuherd.esd.fits.candidates import COARSE, FINE, Candidates
from gpuherd.esd.fits.ks import Indices


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
    who = candidates.sharpen(candidates.remaining(who, limit), COARSE + FINE, limit)
    while who.size:
        outer = int(who[(side * slopes[who]).argmax()])
        if candidates.examine(outer, who) <= limit:
            return outer
        who = candidates.remaining(who, limit)
    return found
