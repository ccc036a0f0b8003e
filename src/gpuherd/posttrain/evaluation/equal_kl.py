"""Policies at equal distance from the reference: what each earns where its KL divergence is the same. Pure; numpy.

A method that moves farther from the reference usually earns more, so two methods at their own settings say little of
each other. A method's sweep over eta (or beta) is a curve of metric against KL; it is read off, by straight lines
between neighbours in KL, at given values of KL. The reference itself, at KL 0, is a point of every curve. Where a curve
does not reach there is no figure: nothing is extrapolated. The straight line can be had: who chooses between two
policies by a coin before each completion earns what lies between theirs and is, by the convexity of the KL divergence,
no farther from the reference than what lies between theirs.

Intervals resample the problems (and the seeds, ``over_seeds``), both coordinates of all points together; differences
of two methods are of the same resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuherd.posttrain.evaluation.metrics import Ratio
from gpuherd.posttrain.evaluation.over_seeds import drawn_means, summary
from gpuherd.qa.bootstrap import Floats, Plan
from gpuherd.qa.intervals import Figure, holm


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A policy at one setting: its KL and its metric, a run a seed."""

    kl: Sequence[Ratio]
    metric: Sequence[Ratio]
    same_problems: bool = True


@dataclass(frozen=True, slots=True)
class AtEqualKL:
    """Of one method, its metric where its KL is ``kl``; the figure's value is None where its sweep does not reach."""

    method: str
    kl: float
    metric: Figure


@dataclass(frozen=True, slots=True)
class DifferenceAtKL:
    """The metric of ``one`` less that of ``other`` where both have this KL.

    Attributes:
        p: two-sided, by the bootstrap: twice the smaller share of resamples on one side of 0, at least 1 / resamples.
        p_holm: corrected for the number of differences that were asked for together (Holm 1979).
    """

    one: str
    other: str
    kl: float
    difference: Figure
    p: float | None
    p_holm: float | None


def at_equal_kl(
    sweeps: Mapping[str, Sequence[SweepPoint]], kls: Sequence[float], plan: Plan
) -> tuple[list[AtEqualKL], list[DifferenceAtKL]]:
    """Each method at each KL, and the differences of every two methods there.

    Args:
        sweeps: by method; a point with KL 0 is the reference.
        kls: where the curves are read.
    """
    whole = {name: _values(points) for name, points in sweeps.items()}
    drawn = {name: _drawn(points, plan) for name, points in sweeps.items()}
    read = {name: {kl: _read(*whole[name], kl) for kl in kls} for name in sweeps}
    spreads = {name: {kl: _read_rows(*drawn[name], kl) for kl in kls} for name in sweeps}
    figures = [
        AtEqualKL(name, kl, _figure(read[name][kl], spreads[name][kl], plan.confidence))
        for name in sweeps
        for kl in kls
    ]
    names = list(sweeps)
    differences = []
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            for kl in kls:
                apart, spread = read[one][kl] - read[other][kl], spreads[one][kl] - spreads[other][kl]
                figure = _figure(apart, spread, plan.confidence)
                differences.append(
                    DifferenceAtKL(one, other, kl, figure, _p(spread) if figure.interval else None, None)
                )
    corrected = holm([each.p for each in differences])
    return figures, [
        DifferenceAtKL(each.one, each.other, each.kl, each.difference, each.p, p)
        for each, p in zip(differences, corrected, strict=True)
    ]


def common_kls(sweeps: Mapping[str, Sequence[SweepPoint]], count: int = 4) -> tuple[float, ...]:
    """So many values of KL, evenly spaced, that all sweeps reach; their largest is where the shortest sweep ends. Two
    digits each, rounded down; none where there is no common stretch."""
    ends = [_values(points)[0] for points in sweeps.values()]
    if not ends:
        return ()
    low, high = max(float(each.min()) for each in ends), min(float(each.max()) for each in ends)
    found = [_two_digits(low + (high - low) * (place + 1) / count) for place in range(count)] if high > low else []
    return tuple(dict.fromkeys(kl for kl in found if low <= kl <= high and kl > 0))


def _values(points: Sequence[SweepPoint]) -> tuple[Floats, Floats]:
    kl = np.array([np.mean([run.value for run in each.kl]) for each in points])
    return kl, np.array([np.mean([run.value for run in each.metric]) for each in points])


def _drawn(points: Sequence[SweepPoint], plan: Plan) -> tuple[Floats, Floats]:
    """KL and metric of all points under each resample, both (resamples, points)."""
    kl = [drawn_means(each.kl, each.same_problems, plan) for each in points]
    metric = [drawn_means(each.metric, each.same_problems, plan) for each in points]
    return np.stack(kl, axis=1), np.stack(metric, axis=1)


def _read(kl: Floats, metric: Floats, at: float) -> float:
    """The curve's height, NaN beyond its ends."""
    order = np.argsort(kl, kind="stable")
    return float(np.interp(at, kl[order], metric[order], left=np.nan, right=np.nan))


def _read_rows(kl: Floats, metric: Floats, at: float) -> Floats:
    return np.array([_read(*row, at) for row in zip(kl, metric, strict=True)])


def _figure(value: float, spread: Floats, confidence: float) -> Figure:
    if np.isnan(value):
        return Figure(None, note="the sweep does not reach this KL")
    return summary(value, spread, confidence)


def _p(spread: Floats) -> float:
    usable = spread[~np.isnan(spread)]
    smaller = min(int(np.sum(usable <= 0)), int(np.sum(usable >= 0)))
    return min(1.0, 2 * max(smaller, 0.5) / usable.size)


def _two_digits(value: float) -> float:
    if value <= 0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(value)) - 1)
    return float(f"{np.floor(value / unit * (1 + 1e-12)) * unit:.2g}")
