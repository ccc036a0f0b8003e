"""``Shares``: how many GPU-seconds each user has used of late, the more recent counting more.

For gpuherds that decide whose turn it is, several times a minute: each call reads only what was appended since the last
one, and the open files. A use counts by the half-life at each moment of its time, not by its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gpuherd.gpus.turns import HALF_LIFE_S
from gpuherd.ledger.fold import Fold
from gpuherd.ledger.reader import Ledger
from gpuherd.ledger.records import Use

# What is older has decayed to a thousandth.
_HALF_LIVES = 10
_LN2 = math.log(2)


class Shares:
    """The recent usage of all users by one ledger, as far as its records are believed: those of the users themselves,
    of root, and the reader's own.

    Args:
        ledger: None for the one that is in use here and now, also if it is made later.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._fold: Fold[int] | None = None
        self._half_life_s = 0.0
        self._since = self._now = 0.0

    def used_by_user(self, now: float, half_life_s: float = HALF_LIFE_S) -> Mapping[int, float]:
        """GPU-seconds held by each user (uid) until now, wall-clock seconds, decayed; users without any are missing."""
        self._ledger = self._ledger or Ledger.existing()
        if self._ledger is None:
            return {}
        # Also where the clock was set back or far ahead: weights are powers of two, and must stay finite.
        if self._fold is None or half_life_s != self._half_life_s or not 0 <= now - self._since <= 100 * half_life_s:
            self._fold = Fold(self._ledger, self._weigh)
            self._half_life_s, self._since = half_life_s, now
        self._now = now
        sums = self._fold.sums(now - _HALF_LIVES * half_life_s)
        faded = 2.0 ** (-(now - self._since) / half_life_s)
        return {uid: value * faded for uid, (value,) in sums.items() if value * faded > 1e-6}

    def _weigh(self, use: Use) -> tuple[int, tuple[float]]:
        """GPU-seconds of the use as they count at ``_since``, those after that more than once. What was written by a
        clock that was ahead counts as of now."""
        since, until = min(use.since, self._now) - self._since, min(use.until, self._now) - self._since
        return use.uid, (use.held_s * mean_weight(since, until, self._half_life_s),)


def mean_weight(since: float, until: float, half_life_s: float) -> float:
    """The mean over a time of 2^(t / half-life), t in seconds from the moment that counts one.

    >>> round(mean_weight(-100.0, 0.0, 100.0), 3)
    0.721
    """
    length = (until - since) * _LN2 / half_life_s
    first, last = (math.exp(max(-700.0, min(500.0, time * _LN2 / half_life_s))) for time in (since, until))
    return last if length < 1e-6 else (last - first) / length
