"""Many results become tables: a row a policy, over its seeds; curves over eta; comparisons at equal KL and paired.

Of a method that is compared the last round counts, at its own eta: nothing is chosen by its result. What is compared
with each other was asked the same problems with models of one family.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.posttrain.evaluation.files import BadResult, read_result, read_scores
from gpuherd.posttrain.evaluation.options import EvaluationOptions, Tie
from gpuherd.posttrain.evaluation.result import REFERENCE, RESULT, About, AtK, Evaluation, Metrics, Point
from gpuherd.posttrain.evaluation.scores import Scores
from gpuherd.qa.intervals import Figure

if TYPE_CHECKING:
    from gpuherd.posttrain.evaluation.equal_kl import AtEqualKL, DifferenceAtKL, SweepPoint
    from gpuherd.posttrain.evaluation.metrics import Ratio
    from gpuherd.posttrain.evaluation.paired import Difference, Run

RESAMPLES = 500  # of comparisons, which are many


@dataclass(frozen=True)
class Found:
    """A result and where it lies; its scores are read when they are needed."""

    folder: Path
    evaluation: Evaluation

    @cached_property
    def scores(self) -> Mapping[str, Scores]:
        """By the name of their file. Raises BadResult."""
        return {each.scores: read_scores(self.folder / each.scores) for each in self.evaluation.points}


@dataclass(frozen=True, slots=True)
class Row:
    """A policy at one eta, over the seeds there are.

    Attributes:
        about: ``seed`` is that of the first run.
        seeds: of the runs.
        eta, own: as in ``Point``.
        figures: by name; "reward", "pass@1", "first", "pass@k", "maj@k", "kl", "kl a token", "tokens", "finished".
        by_seed: the runs' own values, where there are several.
        problems, samples: of a run.
        estimator, tie: how the divergence was had; what a tie of a vote earned.
        tokens_per_second: of all runs together; None where it took no time.
        gpu_hours: of the evaluations, summed; None on a CPU.
    """

    about: About
    seeds: tuple[int, ...]
    eta: float | None
    own: bool
    figures: Mapping[str, Figure]
    by_seed: Mapping[str, tuple[float, ...]]
    problems: int
    samples: int
    estimator: str | None
    tie: str
    tokens_per_second: float | None
    gpu_hours: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The methods of one family on the same problems.

    Attributes:
        metric: what is compared: "pass@1", or "reward" where nothing is right or wrong.
        differences: every two methods at their own settings.
        at_equal_kl, differences_at_kl: where their curves of metric against KL can be read.
    """

    family: str
    dataset: str
    evaluated_on: str
    metric: str
    differences: tuple[Difference, ...]
    at_equal_kl: tuple[AtEqualKL, ...]
    differences_at_kl: tuple[DifferenceAtKL, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """All there is.

    Attributes:
        rows: every policy at every eta.
        comparisons: a family and set of problems each.
        damaged: results that can't be read, in a sentence each.
        confidence: of all intervals.
    """

    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    damaged: tuple[str, ...]
    confidence: float

    @property
    def summary(self) -> tuple[Row, ...]:
        """Every policy at its own eta."""
        return tuple(each for each in self.rows if each.own)


def find_results(root: Path) -> tuple[list[Found], list[str]]:
    """The results below a folder, in the order of their paths, and a sentence for each that can't be read."""
    found, damaged = [], []
    for path in sorted(root.rglob(RESULT)):
        try:
            found.append(Found(path.parent, read_result(path)))
        except BadResult as problem:
            damaged.append(str(problem))
    return found, damaged


def gather(root: Path) -> Gathered:
    """The tables of all results below a folder."""
    found, damaged = find_results(root)
    return gathered(found, damaged)


def gathered(found: Sequence[Found], damaged: Iterable[str] = ()) -> Gathered:
    """The tables of these results. Those whose scores can't be read are left out, and told; so are all but the last of
    one policy and seed (a run that was begun anew), which would pass for several seeds."""
    told = list(damaged)
    whole = []
    for each in found:
        try:
            _check(each)
            whole.append(each)
        except BadResult as problem:
            told.append(str(problem))
    once = {each.evaluation.about: each for each in whole}
    if len(once) < len(whole):
        told.append(f"{len(whole) - len(once)} results are of a policy and seed that a later one is of too: left out")
        whole = list(once.values())
    confidence = found[0].evaluation.confidence if found else EvaluationOptions().confidence
    rows = [row for runs in _by(whole, _policy_key).values() for row in _rows(runs, confidence)]
    rows.sort(key=_order)
    groups = _by(whole, lambda each: (each.evaluation.about.family, each.evaluation.about.evaluated_on))
    comparisons = [each for runs in groups.values() for each in _comparisons(runs, confidence)]
    return Gathered(tuple(rows), tuple(comparisons), tuple(told), confidence)


def _check(found: Found) -> None:
    """Raises BadResult where scores can't be read, or are not those of the figures."""
    for point in found.evaluation.points:
        scores, metrics = found.scores[point.scores], point.metrics
        ks = [each.k for each in (*metrics.pass_at, *metrics.majority)]
        same = (len(scores.problems), scores.samples) == (metrics.problems, metrics.samples)
        whole = (scores.correct is None) == (metrics.pass_at_1 is None) and (scores.kl is None) == (metrics.kl is None)
        if not same or not whole or any(not 1 <= k <= scores.samples for k in ks):
            raise BadResult(f"{found.folder / point.scores} is not of the figures in {found.folder / RESULT}")


def _by(found: Iterable[Found], key: Callable[[Found], Hashable]) -> dict[Hashable, list[Found]]:
    groups: dict[Hashable, list[Found]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups


def _policy_key(found: Found) -> About:
    """What results of several seeds have in common."""
    return replace(found.evaluation.about, seed=0)


def _order(row: Row) -> tuple[object, ...]:
    about = row.about
    last = about.round if about.round is not None else -1
    base = about.algorithm != REFERENCE
    return (about.family, about.evaluated_on, about.dataset, base, about.algorithm, last, -(row.eta or 0.0))


def _rows(runs: Sequence[Found], confidence: float) -> list[Row]:
    """A row for each eta that all the runs have; of one run its own figures as they were written."""
    found = []
    for point in runs[0].evaluation.points:
        same = [(run, each) for run in runs for each in run.evaluation.points if each.eta == point.eta]
        if len(same) == len(runs):
            found.append(_row(same, confidence))
    return found


def _row(runs: Sequence[tuple[Found, Point]], confidence: float) -> Row:
    (first, point), metrics = runs[0], [each.metrics for _, each in runs]
    costs = [each.cost for _, each in runs]
    seconds = sum(each.seconds for each in costs)
    hours = [each.gpu_hours for each in costs if each.gpu_hours is not None]
    return Row(
        about=first.evaluation.about,
        seeds=tuple(run.evaluation.about.seed for run, _ in runs),
        eta=point.eta,
        own=point.own,
        figures=figures_of(point.metrics) if len(runs) == 1 else _over_seeds(runs, confidence),
        by_seed={} if len(runs) == 1 else _by_seed(metrics),
        problems=point.metrics.problems,
        samples=point.metrics.samples,
        estimator=None if point.metrics.kl is None else point.metrics.kl.estimator.value,
        tie=point.metrics.tie.value,
        tokens_per_second=sum(each.tokens for each in costs) / seconds if seconds else None,
        gpu_hours=sum(hours) if hours else None,
    )


def figures_of(metrics: Metrics) -> dict[str, Figure]:
    """The figures of a result by the names of ``Row``."""
    found = {"reward": metrics.reward, "tokens": metrics.tokens, "finished": metrics.finished}
    for name, figure in (("pass@1", metrics.pass_at_1), ("first", metrics.first)):
        if figure is not None:
            found[name] = figure
    found |= {f"pass@{each.k}": each.figure for each in metrics.pass_at}
    found |= {f"maj@{each.k}": each.figure for each in metrics.majority}
    if metrics.kl is not None:
        found |= {"kl": metrics.kl.sequence, "kl a token": metrics.kl.token}
    return found


def _by_seed(metrics: Sequence[Metrics]) -> dict[str, tuple[float, ...]]:
    tables = [figures_of(each) for each in metrics]
    found = {}
    for name in tables[0]:
        values = [table[name].value for table in tables if name in table]
        known = [value for value in values if value is not None]
        if len(known) == len(tables):
            found[name] = tuple(known)
    return found


def _over_seeds(runs: Sequence[tuple[Found, Point]], confidence: float) -> dict[str, Figure]:
    from gpuherd.posttrain.evaluation.metrics import counted
    from gpuherd.posttrain.evaluation.over_seeds import over_seeds
    from gpuherd.qa.bootstrap import Plan

    plan = Plan(RESAMPLES, confidence, "percentile")
    tables = [_ratios(run, point) for run, point in runs]
    same = len({run.scores[point.scores].problems for run, point in runs}) == 1
    names = [name for name in tables[0] if all(name in table for table in tables)]
    found = {}
    for name in names:
        figure = over_seeds([table[name] for table in tables], same, plan)
        least = min(table[name].top.size for table in tables)
        found[name] = counted(figure, least, confidence) if tables[0][name].share else figure
    return found


def _ratios(run: Found, point: Point) -> dict[str, Ratio]:
    from gpuherd.posttrain.evaluation.metrics import ratios

    return ratios(run.scores[point.scores], asked_of(point.metrics))


def asked_of(metrics: Metrics) -> EvaluationOptions:
    """The options by which a result's figures were made of its scores."""
    return EvaluationOptions(
        samples=metrics.samples, pass_at=_ks(metrics.pass_at), majority_at=_ks(metrics.majority), tie=Tie(metrics.tie)
    )


def _ks(figures: Sequence[AtK]) -> tuple[int, ...]:
    return tuple(each.k for each in figures)


def _comparisons(group: Sequence[Found], confidence: float) -> list[Comparison]:
    """The methods of one family on one set of problems, by what they were trained on."""
    references = [each for each in group if each.evaluation.about.algorithm == REFERENCE]
    found = []
    for dataset in dict.fromkeys(each.evaluation.about.dataset for each in group if each not in references):
        methods: dict[str, list[Found]] = {REFERENCE: references} if references else {}
        for each in group:
            about = each.evaluation.about
            if about.dataset == dataset and about.algorithm != REFERENCE:
                methods.setdefault(about.algorithm, []).append(each)
        last = {name: _last_round(runs) for name, runs in methods.items()}
        if len(last) > 1:
            found.append(_comparison(dataset, last, confidence))
    return found


def _last_round(runs: Sequence[Found]) -> list[Found]:
    """The runs of the last round that there is, a seed once."""
    last = max(-1 if run.evaluation.about.round is None else run.evaluation.about.round for run in runs)
    chosen = [run for run in runs if (run.evaluation.about.round, last) in ((None, -1), (last, last))]
    return list({run.evaluation.about.seed: run for run in chosen}.values())


def _comparison(dataset: str, methods: Mapping[str, Sequence[Found]], confidence: float) -> Comparison:
    from gpuherd.posttrain.evaluation.equal_kl import at_equal_kl, common_kls
    from gpuherd.posttrain.evaluation.paired import differences
    from gpuherd.qa.bootstrap import Plan

    plan = Plan(RESAMPLES, confidence, "percentile")
    about = next(iter(methods.values()))[0].evaluation.about
    knows = all(run.evaluation.own.metrics.pass_at_1 is not None for runs in methods.values() for run in runs)
    metric = "pass@1" if knows else "reward"
    own = {name: [_run_of(run, run.evaluation.own, metric) for run in runs] for name, runs in methods.items()}
    sweeps = _sweeps(methods, metric)
    kls = common_kls(sweeps)
    figures, apart = at_equal_kl(sweeps, kls, plan) if kls and len(sweeps) > 1 else ([], [])
    return Comparison(
        about.family, dataset, about.evaluated_on, metric, tuple(differences(own, plan)), tuple(figures), tuple(apart)
    )


def _run_of(found: Found, point: Point, metric: str) -> Run:
    from gpuherd.posttrain.evaluation.paired import Run

    scores = found.scores[point.scores]
    return Run(found.evaluation.about.seed, scores.problems, _ratios(found, point)[metric])


def _sweeps(methods: Mapping[str, Sequence[Found]], metric: str) -> dict[str, list[SweepPoint]]:
    """Each method's curve over its etas, the reference its beginning: of the problems that all were asked, and of
    methods whose divergence was measured."""
    sets = [set(each.problems) for runs in methods.values() for run in runs for each in run.scores.values()]
    common = [
        problem for problem in next(iter(next(iter(methods.values()))[0].scores.values())).problems
        if all(problem in each for each in sets)
    ]  # fmt: skip
    if len(common) < 2:
        return {}
    tables = {name: _sweep(runs, metric, common) for name, runs in methods.items()}
    start = tables.pop(REFERENCE, [])
    return {name: [*start, *points] for name, points in tables.items() if points}


def _sweep(runs: Sequence[Found], metric: str, common: Sequence[str]) -> list[SweepPoint]:
    from gpuherd.posttrain.evaluation.equal_kl import SweepPoint
    from gpuherd.posttrain.evaluation.paired import cut

    found = []
    for point in runs[0].evaluation.points:
        same = [(run, each) for run in runs for each in run.evaluation.points if each.eta == point.eta]
        if len(same) == len(runs) and all(each.metrics.kl is not None for _, each in same):
            kl, height = ([cut(_run_of(*each, name), common) for each in same] for name in ("kl", metric))
            found.append(SweepPoint(kl, height))
    return found
