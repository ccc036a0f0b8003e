"""Is one measure better than another on the same answers? DeLong's test of two AUROCs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuherd.qa.bootstrap import Floats
from gpuherd.qa.intervals import Interval


@dataclass(frozen=True, slots=True)
class Compared:
    """The difference of two AUROCs of the same answers, by DeLong's variance.

    Attributes:
        difference: the first less the second.
        error: its standard error, above 0.
        freedom: degrees of freedom of that error.
    """

    difference: float
    error: float
    freedom: float

    @property
    def p(self) -> float:
        """Two-sided, of equal areas, by Student's t."""
        from scipy.special import stdtr

        return float(2 * stdtr(self.freedom, -abs(self.difference) / self.error))

    def interval(self, confidence: float) -> Interval:
        """The interval that goes with ``p``, cut at -1 and 1."""
        from scipy.special import stdtrit

        reach = float(stdtrit(self.freedom, (1 + confidence) / 2)) * self.error
        return Interval(max(self.difference - reach, -1.0), min(self.difference + reach, 1.0))


def placements(scores: ArrayLike, wrong: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Of each wrong answer the share of right ones below it, of each right one the share of wrong ones above it, equal
    ones half (DeLong et al. 1988, V10 and V01), in O(n log n) by ranks (Sun and Xu 2014)."""
    from scipy.stats import rankdata

    values = np.asarray(scores, dtype=np.float64)
    among_all = rankdata(values)
    n_wrong, n_right = int(wrong.sum()), int((~wrong).sum())
    of_wrong = (among_all[wrong] - rankdata(values[wrong])) / n_right
    of_right = 1 - (among_all[~wrong] - rankdata(values[~wrong])) / n_wrong
    return np.asarray(of_wrong), np.asarray(of_right)


def compared(one: ArrayLike, other: ArrayLike, wrong: ArrayLike) -> Compared | None:
    """Two scores of the same answers beside each other (DeLong et al. 1988), with the degrees of freedom of Welch and
    Satterthwaite: the variance is that of two means, and with 8 wrong answers a normal distribution calls one pair in
    ten different where one in twenty is meant.

    None where there is nothing to test: a class with fewer than two answers, or a difference without any variance (two
    scores that order the answers alike, or one that orders them perfectly and one that is always the same).
    """
    labels = np.asarray(wrong, dtype=bool)
    if min(labels.sum(), (~labels).sum()) < 2:
        return None
    first, second = placements(one, labels), placements(other, labels)
    apart = [mine - theirs for mine, theirs in zip(first, second, strict=True)]
    difference = float(apart[0].mean())
    parts = [(float(np.var(each, ddof=1)) / each.size, each.size - 1) for each in apart]
    variance = sum(part for part, _ in parts)
    if variance < 1e-24:
        return None
    return Compared(difference, variance**0.5, variance**2 / sum(part**2 / freedom for part, freedom in parts))
