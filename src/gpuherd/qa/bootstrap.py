"""Intervals by resampling the questions: percentile and BCa (Efron 1987), for any figure of weighted answers.

A statistic takes weightings, (rows, n) integers, and returns a figure for each row, NaN if it has none. Resamples
depend only on the seed and the number of answers: two measures of the same answers have the same resamples, so that
their difference is a paired one. (scipy.stats.bootstrap resamples for each figure anew; docs/dependencies.md.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuherd.qa.intervals import Figure, Interval

Floats = NDArray[np.float64]
Weights = NDArray[np.int64]
# Named figures: one pass over the weightings gives all that a measure needs.
Statistics = Callable[[Weights], dict[str, Floats]]

_CELLS_AT_ONCE = 1_000_000  # weights in memory at a time: 8 MB, and a few times that inside a statistic
_MOST_LEFT_OUT = 1000  # groups of the jackknife; up to so many answers are left out one by one

NO_SPREAD = "every resample gives the same value"
TOO_FEW_RESAMPLES = "hardly any resample has this figure"


@dataclass(frozen=True, slots=True)
class BootstrapPlan:
    """How intervals are made: ``resamples`` of the questions, ``method`` ``bca`` or ``percentile``."""

    resamples: int = 1000
    confidence: float = 0.95
    method: str = "bca"
    seed: int = 0


def as_they_are(n: int) -> Weights:
    """The weighting in which each answer counts once, (1, n)."""
    return np.ones((1, n), dtype=np.int64)


def resamples(n: int, count: int, seed: int, cells: int = _CELLS_AT_ONCE) -> Iterator[Weights]:
    """``count`` resamples of n answers with replacement: how often each answer was drawn. In blocks of rows of at most
    ``cells`` numbers (a row at least); the size of the blocks changes no number."""
    draw = np.random.default_rng([seed, n])
    rows = max(cells // n, 1)
    for first in range(0, count, rows):
        block = min(rows, count - first)
        drawn = draw.integers(0, n, size=(block, n)) + n * np.arange(block)[:, None]
        yield np.bincount(drawn.ravel(), minlength=block * n).reshape(block, n)


def left_out(n: int) -> Iterator[Weights]:
    """The weightings of the jackknife, in blocks of rows: all answers but one; of more than 1000 answers, all but one
    of up to 1000 equal groups (a few answers at the end are then in no group)."""
    size = -(-n // _MOST_LEFT_OUT)
    groups = n // size
    rows = max(_CELLS_AT_ONCE // n, 1)
    for first in range(0, groups, rows):
        block = range(first, min(first + rows, groups))
        weights = np.ones((len(block), n), dtype=np.int64)
        for row, group in enumerate(block):
            weights[row, group * size : (group + 1) * size] = 0
        yield weights


def figures(statistics: Statistics, n: int, plan: BootstrapPlan) -> dict[str, Figure]:
    """Each figure of n answers (2 or more) with its interval."""
    whole = {name: float(values[0]) for name, values in statistics(as_they_are(n)).items()}
    spread = _gathered(statistics, resamples(n, plan.resamples, plan.seed))
    without = _gathered(statistics, left_out(n)) if plan.method == "bca" else {}
    return {name: figure_of(value, spread[name], without.get(name), plan) for name, value in whole.items()}


def _gathered(statistics: Statistics, blocks: Iterator[Weights]) -> dict[str, Floats]:
    parts = [statistics(weights) for weights in blocks]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def figure_of(value: float, spread: Floats, without: Floats | None, plan: BootstrapPlan) -> Figure:
    """A figure with its interval; resamples that are NaN are dropped, and counted.

    Args:
        value: of the answers as they are.
        spread: under each resample.
        without: under each weighting of the jackknife; None: the interval is the percentile one.
    """
    if np.isnan(value):
        return Figure(None, note="not defined for these answers")
    usable = spread[~np.isnan(spread)]
    dropped = spread.size - usable.size
    if usable.size < max(spread.size // 2, 2):
        return Figure(value, note=TOO_FEW_RESAMPLES, dropped=dropped)
    if np.ptp(usable) < 1e-12:
        return Figure(value, note=NO_SPREAD, dropped=dropped)
    tails = (1 - plan.confidence) / 2, (1 + plan.confidence) / 2
    note = None
    if without is not None:
        corrected = bca_tails(value, usable, without[~np.isnan(without)], tails)
        tails = tails if corrected is None else corrected
        note = "percentile interval: BCa is not defined here" if corrected is None else None
    low, high = (float(each) for each in np.quantile(usable, tails))
    return Figure(value, Interval(low, high), note, dropped)


def bca_tails(value: float, spread: Floats, without: Floats, tails: tuple[float, float]) -> tuple[float, float] | None:
    """The quantiles of the resampled figures that the bias-corrected and accelerated interval takes (Efron 1987; Efron
    and Tibshirani 1993, eq. 14.9 to 14.15); equal values count half in the bias. None where it is not defined: all
    resamples lie on one side, no answer makes a difference, or one makes so much that the quantiles would turn round.
    """
    from scipy.special import ndtr, ndtri

    below = (np.sum(spread < value) + np.sum(spread <= value)) / (2 * spread.size)
    apart = without.mean() - without if without.size else without
    scale = np.sum(apart**2) ** 1.5 if without.size else 0.0
    if below in (0, 1) or scale < 1e-30:
        return None
    bias, acceleration = ndtri(below), np.sum(apart**3) / (6 * scale)
    shifted = bias + ndtri(np.asarray(tails))
    stretched = 1 - acceleration * shifted
    if np.any(stretched <= 0):
        return None
    moved = ndtr(bias + shifted / stretched)
    return float(moved[0]), float(moved[1])
