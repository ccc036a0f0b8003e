"""Many results become tables: a row a policy, over its seeds, and comparisons of methods.

What is taken together or compared was drawn by the same settings from models of one family. Methods on the same
problems are compared at their own settings, and at equal KL; of a method the last round counts, at its own eta: nothing
is chosen by its result. Light until something is gathered: numpy is imported then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gpuherd.posttrain.eval.answers import Scores
from gpuherd.posttrain.eval.results import (
    REFERENCE,
    RESULT,
    About,
    BadResult,
    Estimator,
    Evaluation,
    EvaluationOptions,
    Metrics,
    Point,
    read_result,
    read_values,
)
from gpuherd.qa.intervals import Figure

if TYPE_CHECKING:
    from gpuherd.posttrain.eval.compare import AtEqualKL, Difference, DifferenceAtKL, Run, SweepPoint
    from gpuherd.posttrain.eval.metrics import Ratio
    from gpuherd.qa.bootstrap import BootstrapPlan

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

RESAMPLES = 500  # of comparisons, which are many
_NO_MATTER = ("seed", "batch_size")  # settings of draws that results to compare may differ in

# ---- results on disk


@dataclass(frozen=True, slots=True)
class Table:
    """Of a point: the ids of its problems, and its metrics as sums over them, by name."""

    problems: tuple[str, ...]
    ratios: Mapping[str, Ratio]


@dataclass(frozen=True)
class Found:
    """A result and where it lies."""

    folder: Path
    evaluation: Evaluation

    @cached_property
    def tables(self) -> Mapping[str, Table]:
        """By the name of the file of scores; read when they are first asked for. Raises BadResult."""
        return {each.scores: self._table(each) for each in self.evaluation.points}

    def table(self, point: Point) -> Table:
        """Of one of the result's points. Raises BadResult."""
        return self.tables[point.scores]

    @property
    def settings(self) -> str:
        """How it was drawn and from what its distance is: only results in which this is equal can be compared. The seed
        of the draws is no part of it."""
        sampling = {name: value for name, value in self.evaluation.sampling.items() if name not in _NO_MATTER}
        settings = [self.evaluation.split, sampling, self.evaluation.reference]
        return json.dumps(settings, sort_keys=True)

    def _table(self, point: Point) -> Table:
        from gpuherd.posttrain.eval.metrics import ratios

        scores = read_values(self.folder / point.scores, Scores)
        if not _fits(scores, point.metrics):
            raise BadResult(f"{self.folder / point.scores} is not of the figures in {self.folder / RESULT}")
        return Table(scores.problems, ratios(scores, _options_of(point.metrics)))


def find_results(root: Path) -> tuple[list[Found], list[str]]:
    """The results below a folder, in the order of their paths, and a sentence for each that can't be read."""
    found, damaged = [], []
    for path in sorted(root.rglob(RESULT)):
        try:
            found.append(Found(path.parent, read_result(path)))
        except BadResult as problem:
            damaged.append(str(problem))
    return found, damaged


def _fits(scores: Scores, metrics: Metrics) -> bool:
    """Whether figures can be of these scores."""
    ks = [each.k for each in (*metrics.pass_at, *metrics.majority)]
    same = (len(scores.problems), scores.samples) == (metrics.problems, metrics.samples)
    whole = (scores.correct is None) == (metrics.pass_at_1 is None) and (scores.kl is None) == (metrics.kl is None)
    return same and whole and all(1 <= k <= scores.samples for k in ks)


def _options_of(metrics: Metrics) -> EvaluationOptions:
    """The options by which a result's figures were made of its scores."""
    pass_at, majority_at = (tuple(each.k for each in some) for some in (metrics.pass_at, metrics.majority))
    return EvaluationOptions(samples=metrics.samples, pass_at=pass_at, majority_at=majority_at, tie=metrics.tie)


# ---- comparisons

Methods = Mapping[str, Sequence[Found]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The methods of one family on the same problems.

    Attributes:
        metric: what is compared: "pass@1", or "reward" where nothing is right or wrong.
        differences: every two methods at their own settings.
        at_equal_kl, differences_at_kl: where their curves of metric against KL can be read.
        unmoved: methods that have hardly moved from the reference, with the KL that they reach: at equal KL they are
            compared with none.
        note: why they are not compared at equal KL though their divergence was measured; None where they are.
    """

    family: str
    dataset: str
    evaluated_on: str
    metric: str
    differences: tuple[Difference, ...]
    at_equal_kl: tuple[AtEqualKL, ...]
    differences_at_kl: tuple[DifferenceAtKL, ...]
    unmoved: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None


def comparisons_of(group: Sequence[Found], plan: BootstrapPlan) -> list[Comparison]:
    """One for each data set that two methods, or one and the reference, were trained on.

    Args:
        group: of one family, on one set of problems, drawn by the same settings.
    """
    references = [each for each in group if each.evaluation.about.algorithm == REFERENCE]
    trained = [each for each in group if each.evaluation.about.algorithm != REFERENCE]
    found = []
    for dataset in dict.fromkeys(each.evaluation.about.dataset for each in trained):
        methods: dict[str, list[Found]] = {REFERENCE: references} if references else {}
        for each in trained:
            if each.evaluation.about.dataset == dataset:
                methods.setdefault(each.evaluation.about.algorithm, []).append(each)
        last = {name: _last_round(runs) for name, runs in methods.items()}
        if len(last) > 1:
            found.append(_comparison(dataset, last, plan))
    return found


def _last_round(runs: Sequence[Found]) -> list[Found]:
    """The runs of the last round that there is."""
    last = max(run.evaluation.about.order for run in runs)
    return [run for run in runs if run.evaluation.about.order == last]


def _comparison(dataset: str, methods: Methods, plan: BootstrapPlan) -> Comparison:
    from gpuherd.posttrain.eval.compare import at_equal_kl, differences, shared_kls, unmoved

    about = next(iter(methods.values()))[0].evaluation.about
    knows = all(run.evaluation.own.metrics.pass_at_1 is not None for runs in methods.values() for run in runs)
    metric = "pass@1" if knows else "reward"
    own = {name: [_run_of(run, run.evaluation.own, metric) for run in runs] for name, runs in methods.items()}
    note = _no_common_law(methods)
    sweeps = {} if note else _sweeps(methods, metric)
    figures, apart = at_equal_kl(sweeps, shared_kls(sweeps, plan), plan)
    between = tuple(differences(own, plan))
    still = unmoved(sweeps, plan)
    return Comparison(
        about.family, dataset, about.evaluated_on, metric, between, tuple(figures), tuple(apart), still, note
    )


def _no_common_law(methods: Methods) -> str | None:
    """Why divergences are not of like laws: exact ones are at temperature 1, estimates at that of the draws. The
    reference's, which is 0 by any law, doesn't count."""
    trained = [run for name, runs in methods.items() if name != REFERENCE for run in runs]
    points = [point.metrics.kl for run in trained for point in run.evaluation.points]
    exact = {kl.estimator is Estimator.EXACT for kl in points if kl is not None}
    temperatures = {run.evaluation.sampling.get("temperature", 1.0) for run in trained}
    if len(exact) < 2 or temperatures == {1.0}:
        return None
    return (
        "the divergence of some methods is exact, at temperature 1, and that of others estimated at the temperature of "
        "the draws: not compared at equal KL; evaluation.kl=exact makes them alike"
    )


def _run_of(found: Found, point: Point, metric: str) -> Run:
    from gpuherd.posttrain.eval.compare import Run

    table = found.table(point)
    return Run(found.evaluation.about.seed, table.problems, table.ratios[metric])


def _sweeps(methods: Methods, metric: str) -> dict[str, list[SweepPoint]]:
    """Each method's curve over its etas, the reference its beginning: of the problems that all were asked, and of
    methods whose divergence was measured."""
    asked = [each.problems for runs in methods.values() for run in runs for each in run.tables.values()]
    sets = [set(each) for each in asked]
    common = [problem for problem in asked[0] if all(problem in each for each in sets)]
    if len(common) < 2:
        return {}
    curves = {name: _sweep(runs, metric, common) for name, runs in methods.items()}
    start = curves.pop(REFERENCE, [])
    return {name: [*start, *points] for name, points in curves.items() if points}


def _sweep(runs: Sequence[Found], metric: str, common: Sequence[str]) -> list[SweepPoint]:
    """A point for each eta that all the runs have."""
    from gpuherd.posttrain.eval.compare import SweepPoint, cut

    found = []
    for point in runs[0].evaluation.points:
        same = [(run, each) for run in runs for each in run.evaluation.points if each.eta == point.eta]
        if len(same) == len(runs) and all(each.metrics.kl is not None for _, each in same):
            kl, height = ([cut(_run_of(*each, name), common) for each in same] for name in ("kl", metric))
            found.append(SweepPoint(kl, height, tuple(run.evaluation.about.seed for run, _ in same)))
    return found


# ---- tables


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
        drawn: how completions were sampled, where not from the model's own distribution (``Evaluation.drawn``).
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
    drawn: str | None
    tokens_per_second: float | None
    gpu_hours: float | None


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


def gather(root: Path) -> Gathered:
    """The tables of all results below a folder."""
    found, damaged = find_results(root)
    return gathered(found, damaged)


def gathered(
    found: Sequence[Found], damaged: Iterable[str] = (), on_progress: Callable[[int, int], None] | None = None
) -> Gathered:
    """The tables of these results. Those whose scores can't be read are left out, and reported; so are all but the last
    of one policy and seed (a run that was begun anew), which would pass for several seeds.

    Args:
        on_progress: called with how many results have been read, of how many.
    """
    from gpuherd.qa.bootstrap import BootstrapPlan

    notes = list(damaged)
    whole = _whole(found, notes, on_progress)
    confidence = whole[0].evaluation.confidence if whole else EvaluationOptions().confidence
    notes += _other_settings(whole)
    plan = BootstrapPlan(RESAMPLES, confidence, "percentile")
    policies = grouped(whole, lambda each: (replace(each.evaluation.about, seed=0), each.settings))  # over seeds
    rows = [row for runs in policies.values() for row in _rows(runs, plan)]
    rows.sort(key=_order)
    groups = grouped(whole, lambda each: (*_problems_of(each), each.settings))
    comparisons = [each for runs in groups.values() for each in comparisons_of(runs, plan)]
    return Gathered(tuple(rows), tuple(comparisons), tuple(notes), confidence)


def _whole(found: Sequence[Found], notes: list[str], on_progress: Callable[[int, int], None] | None) -> list[Found]:
    """Those that can be read, one a policy and seed, by their seeds; what is left out is added to ``notes``."""
    whole = []
    for number, each in enumerate(found, 1):
        try:
            each.tables  # noqa: B018 (reads them)
            whole.append(each)
        except BadResult as problem:
            notes.append(str(problem))
        if on_progress is not None:
            on_progress(number, len(found))
    once = {(each.evaluation.about, each.settings): each for each in whole}
    if len(once) < len(whole):
        notes.append(f"{len(whole) - len(once)} results are of a policy and seed that a later one is of too: left out")
    return sorted(once.values(), key=lambda each: each.evaluation.about.seed)


def _other_settings(whole: Sequence[Found]) -> list[str]:
    """A sentence for each set of problems that was asked by different settings, and one for different intervals."""
    notes = [
        f"{family} on {name} was evaluated by different settings of drawing: such results are neither taken together "
        "nor compared, and a policy may have several rows"
        for (family, name), runs in grouped(whole, _problems_of).items()
        if len({each.settings for each in runs}) > 1
    ]
    confidences = {each.evaluation.confidence for each in whole}
    if len(confidences) > 1:
        words = ", ".join(f"{100 * each:g} %" for each in sorted(confidences))
        notes.append(f"the intervals of these results are of different confidence ({words})")
    return notes


def _problems_of(found: Found) -> tuple[str, str]:
    return found.evaluation.about.family, found.evaluation.about.evaluated_on


def grouped(values: Iterable[Value], key_of: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """The values of each key, in the order in which keys first occur."""
    found: dict[Key, list[Value]] = {}
    for each in values:
        found.setdefault(key_of(each), []).append(each)
    return found


def _order(row: Row) -> tuple[object, ...]:
    about = row.about
    base = about.algorithm != REFERENCE
    return (about.family, about.evaluated_on, about.dataset, base, about.algorithm, about.order, -(row.eta or 0.0))


def _rows(runs: Sequence[Found], plan: BootstrapPlan) -> list[Row]:
    """A row for each eta, of the runs that have it; of one run its own figures as they were written."""
    etas = dict.fromkeys(point.eta for run in runs for point in run.evaluation.points)
    return [
        _row([(run, each) for run in runs for each in run.evaluation.points if each.eta == eta], plan) for eta in etas
    ]


def _row(runs: Sequence[tuple[Found, Point]], plan: BootstrapPlan) -> Row:
    (first, point), metrics = runs[0], [each.metrics for _, each in runs]
    costs = [each.cost for _, each in runs]
    seconds = sum(each.seconds for each in costs)
    hours = [each.gpu_hours for each in costs if each.gpu_hours is not None]
    return Row(
        about=first.evaluation.about,
        seeds=tuple(run.evaluation.about.seed for run, _ in runs),
        eta=point.eta,
        own=point.own,
        figures=figures_of(point.metrics) if len(runs) == 1 else _over_seeds(runs, plan),
        by_seed={} if len(runs) == 1 else _by_seed(metrics),
        problems=point.metrics.problems,
        samples=point.metrics.samples,
        estimator=None if point.metrics.kl is None else point.metrics.kl.estimator.value,
        tie=point.metrics.tie.value,
        drawn=first.evaluation.drawn,
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
    values = {name: [table[name].value for table in tables if name in table] for name in tables[0]}
    known = {name: tuple(each for each in some if each is not None) for name, some in values.items()}
    return {name: some for name, some in known.items() if len(some) == len(tables)}


def _over_seeds(runs: Sequence[tuple[Found, Point]], plan: BootstrapPlan) -> dict[str, Figure]:
    from gpuherd.posttrain.eval.metrics import counted, over_seeds

    tables = [run.table(point) for run, point in runs]
    same = len({each.problems for each in tables}) == 1
    found = {}
    for name in (name for name in tables[0].ratios if all(name in each.ratios for each in tables)):
        ratios = [each.ratios[name] for each in tables]
        figure = over_seeds(ratios, same, plan)
        least = min(each.top.size for each in ratios)
        found[name] = counted(figure, least, plan.confidence) if ratios[0].share else figure
    return found
