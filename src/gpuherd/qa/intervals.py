"""Figures with intervals: shares, agreement and AUROC in closed form; Holm's correction.

Standard library alone, so that light commands can use it (scipy.stats, which has some of these, takes 0.8 s to import).
Intervals by resampling are in ``bootstrap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
# With fewer answers of a class no figure that separates the classes supports a conclusion: with 10 of 400 the interval
# of an AUROC of 0.5 reaches 0.18 to each side.
FEWEST_OF_A_CLASS = 10


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``low`` to ``high``, both included."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its interval.

    Attributes:
        value: None if it is not defined.
        interval: None if there is none.
        note: why either is missing, or how else the interval was computed.
        dropped: resamples without the figure (they have one class only), which were not used.
    """

    value: float | None
    interval: Interval | None = None
    note: str | None = None
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """``count`` of ``of``, with Wilson's interval; no value and no interval if ``of`` is 0."""

    count: int
    of: int
    confidence: float = CONFIDENCE

    @property
    def value(self) -> float | None:
        """The share, 0 to 1."""
        return None if self.of == 0 else self.count / self.of

    @property
    def interval(self) -> Interval | None:
        """Wilson's interval of it."""
        return None if self.of == 0 else wilson(self.count, self.of, self.confidence)


@dataclass(frozen=True, slots=True)
class Kappa:
    """Cohen's kappa of two judges, or why there is none."""

    value: float | None
    interval: Interval | None = None
    reason: str | None = None


def z_of(confidence: float) -> float:
    """The normal quantile that a two-sided interval of this confidence takes: 1.96 for 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def wilson(count: int, of: int, confidence: float = CONFIDENCE) -> Interval:
    """The score interval of a share (Wilson 1927), which holds for shares of 0 and 1 too.

    >>> wilson(0, 10).low, round(wilson(0, 10).high, 4)
    (0.0, 0.2775)
    """
    z2 = z_of(confidence) ** 2
    share = count / of
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    reach = math.sqrt(z2) / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    # The limits are exactly 0 and 1 there; rounding would leave 1e-17.
    low = 0.0 if count == 0 else max(middle - reach, 0.0)
    high = 1.0 if count == of else min(middle + reach, 1.0)
    return Interval(low, high)


def cohen_kappa(
    both: int,
    only_first: int,
    only_second: int,
    neither: int,
    confidence: float = CONFIDENCE,
    names: tuple[str, str] = ("one", "the other"),
) -> Kappa:
    """Cohen's kappa (1960) of two judges with two classes, with the large-sample interval of Fleiss, Cohen and Everitt
    (1969, eq. 13), cut at -1 and 1.

    If they agree in everything or in nothing, that interval has hardly any width; its far end is then kappa at the far
    end of Wilson's interval of the agreement, with the same chance agreement. If a judge uses one class only, there is
    no kappa: the formula would give 0 whatever the other judge says.

    Args:
        both: items that both call correct; then those that the first alone does, the second alone, and neither.
        names: of the judges, for the reason why there is no kappa.
    """
    n = both + only_first + only_second + neither
    if n == 0:
        return Kappa(None, reason="no answer has a label of both")
    for name, correct in zip(names, (both + only_first, both + only_second), strict=True):
        if correct in (0, n):
            kind = "correct" if correct else "incorrect"
            return Kappa(None, reason=f"{name} calls all {n} {kind}")
    cells = ((both / n, only_first / n), (only_second / n, neither / n))
    rows = tuple(sum(row) for row in cells)
    columns = tuple(cells[0][at] + cells[1][at] for at in (0, 1))
    agreed = (both + neither) / n
    chance = sum(row * column for row, column in zip(rows, columns, strict=True))
    value = (agreed - chance) / (1 - chance)
    if both + neither in (0, n):
        agreement = wilson(both + neither, n, confidence)
        low, high = ((end - chance) / (1 - chance) for end in (agreement.low, agreement.high))
        return Kappa(value, Interval(low, high))
    same = sum(cells[i][i] * ((1 - chance) - (rows[i] + columns[i]) * (1 - agreed)) ** 2 for i in (0, 1))
    other = (1 - agreed) ** 2 * sum(cells[i][1 - i] * (columns[i] + rows[1 - i]) ** 2 for i in (0, 1))
    variance = (same + other - (agreed * chance - 2 * chance + agreed) ** 2) / (n * (1 - chance) ** 4)
    reach = z_of(confidence) * math.sqrt(max(variance, 0.0))
    return Kappa(value, Interval(max(value - reach, -1.0), min(value + reach, 1.0)))


def mcnemar_p(only_first: int, only_second: int) -> float | None:
    """Exact two-sided p of McNemar's test (1947): would two judges with equal rates of yes differ so unevenly? None if
    they never differ.

    The binomial distribution with one half of ``only_first + only_second``, twice the smaller tail, at most 1.
    """
    n = only_first + only_second
    if n == 0:
        return None
    log_all = math.lgamma(n + 1) - n * math.log(2)
    tail = math.fsum(
        math.exp(log_all - math.lgamma(k + 1) - math.lgamma(n - k + 1)) for k in range(min(only_first, only_second) + 1)
    )
    return min(2 * tail, 1.0)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p values corrected for their number (Holm 1979), at most 1; None stays None and is not counted.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min((len(known) - rank) * p, 1.0))
        corrected[place] = largest
    return corrected


def holm_divisors(p_values: Sequence[float | None], level: float) -> list[int | None]:
    """The number by which the level is divided for each p value in Holm's steps: the comparisons that are left at its
    step; after the first step that rejects nothing, those that were left there. None for None.

    An interval of confidence 1 - level / divisor then excludes what its p value rejects, and nothing else.

    >>> holm_divisors([0.01, 0.04, None, 0.03], 0.05)
    [3, 2, None, 2]
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    divisors: list[int | None] = [None] * len(p_values)
    left = len(known)
    for p, place in known:
        divisors[place] = left
        if left * p <= level:
            left -= 1
        else:
            level = -1.0  # nothing is rejected from here on
    return divisors


def hanley_mcneil(auroc: float, wrong: int, right: int) -> float:
    """Standard error of an AUROC by Hanley and McNeil (1982, eq. 1 with the exponential Q1 and Q2).

    Args:
        auroc: the area, 0 to 1.
        wrong, right: of each class, at least 1.

    >>> round(hanley_mcneil(0.53, 8, 392), 3)
    0.105
    """
    q1 = auroc / (2 - auroc)
    q2 = 2 * auroc**2 / (1 + auroc)
    variance = auroc * (1 - auroc) + (wrong - 1) * (q1 - auroc**2) + (right - 1) * (q2 - auroc**2)
    return math.sqrt(max(variance, 0.0) / (wrong * right))


def auroc_interval(auroc: float, wrong: int, right: int, confidence: float = CONFIDENCE) -> Interval:
    """The score interval of an AUROC (Newcombe 2006, Stat. Med. 25:559, method 5): all areas within z of their own
    standard errors of the observed one. It has a width at 0 and 1 too, where no resample differs.

    The standard error is Hanley and McNeil's with both classes as large as their mean.
    """
    z = z_of(confidence)
    size = (wrong + right) / 2 - 1

    def distance(area: float) -> float:
        spread = 1 + size * ((1 - area) / (2 - area) + area / (1 + area))
        return abs(auroc - area) - z * math.sqrt(max(area * (1 - area) * spread, 0.0) / (wrong * right))

    return Interval(_root(distance, 0.0, auroc), _root(distance, 1.0, auroc))


def _root(distance: Callable[[float], float], outer: float, inner: float) -> float:
    """The point where ``distance`` changes its sign between ``outer`` (above 0) and ``inner`` (below), by bisection."""
    if distance(outer) <= 0:
        return outer
    for _ in range(60):
        middle = (outer + inner) / 2
        outer, inner = (middle, inner) if distance(middle) > 0 else (outer, middle)
    return (outer + inner) / 2
