"""Is one policy better than another? On common problems at their own settings, and at equal distance from the
reference.

At their own settings: with one run each, a problem is the unit: the difference of its two values, tested by Student's t
over problems. With several seeds a run is the unit: another training might come out otherwise, and ten thousand
problems of one run say nothing of that; tested by Welch's t over the runs' means, or by the paired t where the runs
share their seeds.

At equal KL: a method that moves farther from the reference usually earns more, so two methods at their own settings say
little of each other. A method's sweep over eta (or beta) is a curve of metric against KL; it is read off, by straight
lines between neighbours in KL, at given values of KL. The reference itself, at KL 0, is a point of every curve. Where a
curve does not reach there is no figure: nothing is extrapolated. The straight line can be had: who chooses between two
policies by a coin before each completion earns what lies between theirs and is, by the convexity of the KL divergence,
no farther from the reference than what lies between theirs. Intervals resample the problems (and the seeds), both
coordinates of all points together; differences of two methods are of the same resamples. A difference of two single
runs is tested by these resamples; with several seeds each run's own curve is read, and the readings are tested by
Student's or Welch's t. (Resamples of three runs that happen to lie on one side all agree: they would call every fourth
pair of equal methods different.)

Pure; numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from gpuherd.posttrain.eval.metrics import Ratio, drawn_means
from gpuherd.qa.bootstrap import BootstrapPlan, Floats, figure_of
from gpuherd.qa.intervals import Figure, holm

# ---- at their own settings


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


# ---- at equal KL

Pair = tuple[str, str]  # of methods
LEAST_KL = 1e-3  # nats: nearer to the reference than this, no policy differs from it by more than 2 % (Pinsker)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A policy at one setting: its KL and its metric, a run a seed, all on the same problems."""

    kl: Sequence[Ratio]
    metric: Sequence[Ratio]
    seeds: tuple[int, ...] = (0,)


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
        p: two-sided. Of single runs by the bootstrap: twice the smaller share of resamples on one side of 0, at least
            1 / resamples. Of several by a t over the runs' own readings; None where a run's curve ends before, or there
            is too little to test.
        p_holm: corrected for the number of differences that were asked for together (Holm 1979).
        unit: what the test takes as independent: "problems" or "seeds".
    """

    one: str
    other: str
    kl: float
    difference: Figure
    p: float | None
    p_holm: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class _Reading:
    """A method's curve at one KL: of the mean of its runs, of each run (runs,), and of each resample (resamples,)."""

    value: float
    runs: Floats
    drawn: Floats
    seeds: tuple[int, ...]


def at_equal_kl(
    sweeps: Mapping[str, Sequence[SweepPoint]], kls: Mapping[Pair, Sequence[float]], plan: BootstrapPlan
) -> tuple[list[AtEqualKL], list[DifferenceAtKL]]:
    """Each method at the values of KL of its pairs, and the differences of each pair at its own.

    Args:
        sweeps: by method; the first point may be the reference, with KL 0 and seeds of its own.
        kls: where the curves of each pair are read (``shared_kls``).
    """
    wanted = {name: sorted({kl for pair, some in kls.items() if name in pair for kl in some}) for name in sweeps}
    curves = {name: (_values(points), _by_run(points), _drawn(points, plan)) for name, points in sweeps.items()}
    read = {
        (name, kl): _Reading(_read(*mean, kl), _read_rows(*runs, kl), _read_rows(*drawn, kl), sweeps[name][-1].seeds)
        for name, (mean, runs, drawn) in curves.items()
        for kl in wanted[name]
    }
    figures = [AtEqualKL(name, kl, _figure(each.value, each.drawn, plan)) for (name, kl), each in read.items()]
    differences = [
        _difference_at((one, other, kl), read[one, kl], read[other, kl], plan)
        for (one, other), some in kls.items()
        for kl in some
    ]
    corrected = holm([each.p for each in differences])
    return figures, [replace(each, p_holm=p) for each, p in zip(differences, corrected, strict=True)]


def shared_kls(
    sweeps: Mapping[str, Sequence[SweepPoint]], plan: BootstrapPlan, count: int = 4
) -> dict[Pair, tuple[float, ...]]:
    """For every two methods so many values of KL at most that both reach: every run's own, and all but 5 % of their
    resamples, since those that don't reach are no fair sample of the others.

    Each pair has its own range, so that a method that went no far way hides nothing of the others. Values are evenly
    spaced, of two digits, rounded down; a pair takes those of a pair with a shorter range where they come half as far
    as its own, so that tables stay narrow. None where both have less than ``LEAST_KL`` in common.
    """
    ends = {name: _ends(points, plan) for name, points in sweeps.items()}
    ranges = {
        (one, other): (max(ends[one][0], ends[other][0]), min(ends[one][1], ends[other][1]))
        for one, other in combinations(sweeps, 2)
    }
    found: dict[Pair, tuple[float, ...]] = {}
    known: set[float] = set()
    for pair, (low, high) in sorted(ranges.items(), key=lambda each: each[1][1]):
        found[pair] = ()
        if not low < high or high < LEAST_KL:
            continue
        within = [kl for kl in known if low <= kl <= high]
        if not any(kl >= high / 2 for kl in within):
            spaced = {_two_digits(low + (high - low) * (place + 1) / count) for place in range(count)}
            within = [kl for kl in spaced if low <= kl <= high and kl > 0]
            known |= set(within)
        found[pair] = tuple(sorted(within)[-count:])
    return {pair: found[pair] for pair in ranges}


def unmoved(sweeps: Mapping[str, Sequence[SweepPoint]], plan: BootstrapPlan) -> dict[str, float]:
    """The methods that stay within ``LEAST_KL`` of the reference, with the KL that they reach."""
    ends = {name: _ends(points, plan)[1] for name, points in sweeps.items()}
    return {name: max(0.0, end) for name, end in ends.items() if end < LEAST_KL}


def _ends(points: Sequence[SweepPoint], plan: BootstrapPlan) -> tuple[float, float]:
    """From which KL to which a sweep reaches."""
    drawn, runs = _drawn(points, plan)[0], _by_run(points)[0]
    lows, highs = drawn.min(axis=1), drawn.max(axis=1)
    usable = np.isfinite(lows)
    if not np.any(usable) or not np.all(np.isfinite(runs)):
        return np.inf, -np.inf
    low, high = float(np.quantile(lows[usable], 0.95)), float(np.quantile(highs[usable], 0.05))
    return max(low, float(runs.min(axis=1).max())), min(high, float(runs.max(axis=1).min()))


def _difference_at(what: tuple[str, str, float], one: _Reading, other: _Reading, plan: BootstrapPlan) -> DifferenceAtKL:
    spread = one.drawn - other.drawn
    figure = _figure(one.value - other.value, spread, plan)
    single = len(one.runs) == len(other.runs) == 1
    if figure.value is None or (figure.interval is None and abs(figure.value) < 1e-12):
        p = None
    else:
        p = _p(spread) if single else runs_p(one.runs, other.runs, one.seeds, other.seeds)
    return DifferenceAtKL(*what, figure, p, None, "problems" if single else "seeds")


def _by_run(points: Sequence[SweepPoint]) -> tuple[Floats, Floats]:
    """KL and metric of each run of a method by itself, both (runs, points). Its curve may begin at a reference with
    other seeds: where one is not there the mean stands for it, since the reference is one model."""

    def column(runs: Sequence[Ratio], seeds: tuple[int, ...]) -> list[float]:
        values = {seed: run.value for seed, run in zip(seeds, runs, strict=True)}
        mean = float(np.mean(list(values.values())))
        return [values.get(seed, mean) for seed in points[-1].seeds]

    kl = [column(each.kl, each.seeds) for each in points]
    metric = [column(each.metric, each.seeds) for each in points]
    return np.array(kl).T, np.array(metric).T


def _values(points: Sequence[SweepPoint]) -> tuple[Floats, Floats]:
    kl = np.array([np.mean([run.value for run in each.kl]) for each in points])
    return kl, np.array([np.mean([run.value for run in each.metric]) for each in points])


def _drawn(points: Sequence[SweepPoint], plan: BootstrapPlan) -> tuple[Floats, Floats]:
    """KL and metric of all points under each resample, both (resamples, points)."""
    kl = [drawn_means(each.kl, True, plan, each.seeds) for each in points]
    metric = [drawn_means(each.metric, True, plan, each.seeds) for each in points]
    return np.stack(kl, axis=1), np.stack(metric, axis=1)


def _read(kl: Floats, metric: Floats, at: float) -> float:
    """The curve's height, NaN beyond its ends."""
    order = np.argsort(kl, kind="stable")
    return float(np.interp(at, kl[order], metric[order], left=np.nan, right=np.nan))


def _read_rows(kl: Floats, metric: Floats, at: float) -> Floats:
    return np.array([_read(*row, at) for row in zip(kl, metric, strict=True)])


def _figure(value: float, spread: Floats, plan: BootstrapPlan) -> Figure:
    if np.isnan(value):
        return Figure(None, note="the sweep does not reach this KL")
    return figure_of(value, spread, None, plan)


def _p(spread: Floats) -> float | None:
    usable = spread[~np.isnan(spread)]
    if not usable.size:
        return None
    smaller = min(int(np.sum(usable <= 0)), int(np.sum(usable >= 0)))
    return min(1.0, 2 * max(smaller, 0.5) / usable.size)


def _two_digits(value: float) -> float:
    if value < 1e-12:  # rounding
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(value)) - 1)
    return float(f"{np.floor(value / unit * (1 + 1e-12)) * unit:.2g}")
