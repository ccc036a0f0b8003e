"""Is one policy better than another? Differences on common problems, corrected for their number. Pure; numpy.

With one run each, a problem is the unit: the difference of its two values, tested by Student's t over problems. With
several seeds a run is the unit: another training might come out otherwise, and ten thousand problems of one run say
nothing of that; tested by Welch's t over the runs' means, or by the paired t where the runs share their seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuherd.posttrain.eval.metrics import Ratio
from gpuherd.posttrain.eval.over_seeds import drawn_means
from gpuherd.qa.bootstrap import BootstrapPlan, Floats, figure_of
from gpuherd.qa.intervals import Figure, holm


@dataclass(frozen=True, slots=True)
class Run:
    """One run's metric: which problems, by their ids, and its sums over them."""

    seed: int
    problems: tuple[str, ...]
    metric: Ratio


@dataclass(frozen=True, slots=True)
class Difference:
    """The metric of ``one`` less that of ``other``.

    Attributes:
        problems: that both were asked, in every run.
        difference: with its interval by resampling (problems; with several seeds runs too).
        p: two-sided; None where nothing differs or there is too little to test.
        p_holm: corrected for the number of differences that were asked for together (Holm 1979).
        unit: what the test takes as independent: "problems" or "seeds".
    """

    one: str
    other: str
    problems: int
    difference: Figure
    p: float | None
    p_holm: float | None
    unit: str


def differences(methods: Mapping[str, Sequence[Run]], plan: BootstrapPlan) -> list[Difference]:
    """Every two methods, in their order; those without a common problem are left out."""
    names = list(methods)
    found = [
        each
        for place, one in enumerate(names)
        for other in names[place + 1 :]
        if (each := _difference(one, methods[one], other, methods[other], plan)) is not None
    ]
    corrected = holm([each.p for each in found])
    return [replace(each, p_holm=p) for each, p in zip(found, corrected, strict=True)]


def _difference(
    one: str, mine: Sequence[Run], other: str, theirs: Sequence[Run], plan: BootstrapPlan
) -> Difference | None:
    sets = [set(run.problems) for run in (*mine, *theirs)]
    common = [problem for problem in mine[0].problems if all(problem in each for each in sets)]
    if not common:
        return None
    first, second = ([cut(run, common) for run in runs] for runs in (mine, theirs))
    seeds = [run.seed for run in mine], [run.seed for run in theirs]
    spread = drawn_means(first, True, plan, seeds[0]) - drawn_means(second, True, plan, seeds[1])
    means, others = (np.array([each.value for each in runs]) for runs in (first, second))
    value = float(means.mean() - others.mean())
    figure = figure_of(value, spread, None, plan) if len(common) > 1 else Figure(value, note="of one problem")
    single = len(first) == len(second) == 1
    p = paired_p(_contributions(first[0]) - _contributions(second[0])) if single else runs_p(means, others, *seeds)
    return Difference(one, other, len(common), figure, p, None, "problems" if single else "seeds")


def cut(run: Run, problems: Sequence[str]) -> Ratio:
    """A run's metric on some of its problems, in their order."""
    places = {problem: place for place, problem in enumerate(run.problems)}
    rows = [places[problem] for problem in problems]
    return replace(run.metric, top=run.metric.top[rows], bottom=run.metric.bottom[rows])


def _contributions(metric: Ratio) -> Floats:
    """A problem's part in the metric, linearised: their mean is the metric itself, and the variance of that mean is the
    ratio's by the delta method."""
    value, scale = metric.value, metric.bottom.mean()
    return np.asarray(value + (metric.top - value * metric.bottom) / scale)


def runs_p(mine: Floats, theirs: Floats, my_seeds: Sequence[int], their_seeds: Sequence[int]) -> float | None:
    """Two-sided p of equal means of two methods' runs, a value a run: by the paired t where the runs share their seeds
    in one order, else by Welch's. None where there is too little to test."""
    return paired_p(mine - theirs) if my_seeds == their_seeds else _welch_p(mine, theirs)


def paired_p(apart: Floats) -> float | None:
    """Two-sided p of differences whose mean is 0, by Student's t; of differences that are all the same, which no t
    knows, by the sign test. None where there is one alone, or nothing differs."""
    from scipy.special import stdtr

    if apart.size < 2 or not np.all(np.isfinite(apart)):
        return None
    if float(np.ptp(apart)) < 1e-12:
        return None if abs(float(apart[0])) < 1e-12 else 2 * 0.5**apart.size
    error = float(apart.std(ddof=1)) / apart.size**0.5
    return float(2 * stdtr(apart.size - 1, -abs(float(apart.mean())) / error))


def _welch_p(one: Floats, other: Floats) -> float | None:
    """Welch's test of equal means; None where a side has one run."""
    from scipy.special import stdtr

    if min(one.size, other.size) < 2 or not np.all(np.isfinite([*one, *other])):
        return None
    parts = [(float(each.var(ddof=1)) / each.size, each.size - 1) for each in (one, other)]
    variance = sum(part for part, _ in parts)
    if variance < 1e-24:
        return None
    freedom = variance**2 / sum(part**2 / of for part, of in parts)
    return float(2 * stdtr(freedom, -abs(float(one.mean() - other.mean())) / variance**0.5))
