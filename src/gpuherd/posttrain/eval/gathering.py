"""Many results become tables: a row a policy, over its seeds, and comparisons of methods.

What is taken together or compared was drawn by the same settings from models of one family.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gpuherd.posttrain.eval.comparing import Comparison, comparisons_of
from gpuherd.posttrain.eval.files import BadResult
from gpuherd.posttrain.eval.found import Found, find_results
from gpuherd.posttrain.eval.options import EvaluationOptions
from gpuherd.posttrain.eval.result import REFERENCE, About, Metrics, Point
from gpuherd.qa.intervals import Figure

if TYPE_CHECKING:
    from gpuherd.qa.bootstrap import BootstrapPlan

Key = TypeVar("Key", bound=Hashable)

RESAMPLES = 500  # of comparisons, which are many


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
    """The tables of these results. Those whose scores can't be read are left out, and told; so are all but the last of
    one policy and seed (a run that was begun anew), which would pass for several seeds.

    Args:
        on_progress: told how many results have been read, of how many.
    """
    from gpuherd.qa.bootstrap import BootstrapPlan

    told = list(damaged)
    whole = _whole(found, told, on_progress)
    confidence = whole[0].evaluation.confidence if whole else EvaluationOptions().confidence
    told += _other_settings(whole)
    plan = BootstrapPlan(RESAMPLES, confidence, "percentile")
    rows = [row for runs in _by(whole, _policy_key).values() for row in _rows(runs, plan)]
    rows.sort(key=_order)
    groups = _by(whole, lambda each: (*_problems_of(each), each.settings))
    comparisons = [each for runs in groups.values() for each in comparisons_of(runs, plan)]
    return Gathered(tuple(rows), tuple(comparisons), tuple(told), confidence)


def _whole(found: Sequence[Found], told: list[str], on_progress: Callable[[int, int], None] | None) -> list[Found]:
    """Those that can be read, one a policy and seed, by their seeds; what is left out is added to ``told``."""
    whole = []
    for number, each in enumerate(found, 1):
        try:
            each.tables  # noqa: B018 (reads them)
            whole.append(each)
        except BadResult as problem:
            told.append(str(problem))
        if on_progress is not None:
            on_progress(number, len(found))
    once = {(each.evaluation.about, each.settings): each for each in whole}
    if len(once) < len(whole):
        told.append(f"{len(whole) - len(once)} results are of a policy and seed that a later one is of too: left out")
    return sorted(once.values(), key=lambda each: each.evaluation.about.seed)


def _other_settings(whole: Sequence[Found]) -> list[str]:
    """A sentence for each set of problems that was asked by different settings, and one for different intervals."""
    told = [
        f"{family} on {name} was evaluated by different settings of drawing: such results are neither taken together "
        "nor compared, and a policy may have several rows"
        for (family, name), runs in _by(whole, _problems_of).items()
        if len({each.settings for each in runs}) > 1
    ]
    confidences = {each.evaluation.confidence for each in whole}
    if len(confidences) > 1:
        words = ", ".join(f"{100 * each:g} %" for each in sorted(confidences))
        told.append(f"the intervals of these results are of different confidence ({words})")
    return told


def _problems_of(found: Found) -> tuple[str, str]:
    return found.evaluation.about.family, found.evaluation.about.evaluated_on


def _by(found: Iterable[Found], key: Callable[[Found], Key]) -> dict[Key, list[Found]]:
    groups: dict[Key, list[Found]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups


def _policy_key(found: Found) -> tuple[About, str]:
    """What results of several seeds have in common."""
    return replace(found.evaluation.about, seed=0), found.settings


def _order(row: Row) -> tuple[object, ...]:
    about = row.about
    last = about.round if about.round is not None else -1
    base = about.algorithm != REFERENCE
    return (about.family, about.evaluated_on, about.dataset, base, about.algorithm, last, -(row.eta or 0.0))


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
    found = {}
    for name in tables[0]:
        values = [table[name].value for table in tables if name in table]
        known = [value for value in values if value is not None]
        if len(known) == len(tables):
            found[name] = tuple(known)
    return found


def _over_seeds(runs: Sequence[tuple[Found, Point]], plan: BootstrapPlan) -> dict[str, Figure]:
    from gpuherd.posttrain.eval.metrics import counted
    from gpuherd.posttrain.eval.over_seeds import over_seeds

    tables = [run.table(point) for run, point in runs]
    same = len({each.problems for each in tables}) == 1
    found = {}
    for name in (name for name in tables[0].ratios if all(name in each.ratios for each in tables)):
        ratios = [each.ratios[name] for each in tables]
        figure = over_seeds(ratios, same, plan)
        least = min(each.top.size for each in ratios)
        found[name] = counted(figure, least, plan.confidence) if ratios[0].share else figure
    return found
