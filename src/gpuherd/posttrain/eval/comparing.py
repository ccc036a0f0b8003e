"""The methods of one family on the same problems against each other: at their own settings, and at equal KL.

Of a method the last round counts, at its own eta: nothing is chosen by its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuherd.posttrain.eval.found import Found
from gpuherd.posttrain.eval.result import REFERENCE, Estimator, Point

if TYPE_CHECKING:
    from gpuherd.posttrain.eval.equal_kl import AtEqualKL, DifferenceAtKL, SweepPoint
    from gpuherd.posttrain.eval.paired import Difference, Run
    from gpuherd.qa.bootstrap import BootstrapPlan

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
    last = max(_round(run) for run in runs)
    return [run for run in runs if _round(run) == last]


def _round(run: Found) -> int:
    about = run.evaluation.about
    return -1 if about.round is None else about.round


def _comparison(dataset: str, methods: Methods, plan: BootstrapPlan) -> Comparison:
    from gpuherd.posttrain.eval.equal_kl import at_equal_kl, shared_kls, unmoved
    from gpuherd.posttrain.eval.paired import differences

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
    from gpuherd.posttrain.eval.paired import Run

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
    from gpuherd.posttrain.eval.equal_kl import SweepPoint
    from gpuherd.posttrain.eval.paired import cut

    found = []
    for point in runs[0].evaluation.points:
        same = [(run, each) for run in runs for each in run.evaluation.points if each.eta == point.eta]
        if len(same) == len(runs) and all(each.metrics.kl is not None for _, each in same):
            kl, height = ([cut(_run_of(*each, name), common) for each in same] for name in ("kl", metric))
            found.append(SweepPoint(kl, height, tuple(run.evaluation.about.seed for run, _ in same)))
    return found
