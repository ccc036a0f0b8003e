"""What is simulated, whole: machines, work, strangers, and the variants to compare; and running them, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuherd.errors import UsageError
from gpuherd.simulate.begin import MONDAY
from gpuherd.simulate.cluster import Machine
from gpuherd.simulate.engine import Simulation
from gpuherd.simulate.figures import Figures, figures
from gpuherd.simulate.guides import run_guides
from gpuherd.simulate.handover import HandedOver
from gpuherd.simulate.history import History
from gpuherd.simulate.rules import Rules, Variant
from gpuherd.simulate.strangers import Strangers
from gpuherd.simulate.workload import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """The same for all variants.

    Attributes:
        machines: the GPUs of each machine.
        works: the jobs.
        background: strangers, None for none.
        seed: of the strangers.
        begin: local time of second 0, for quiet hours.
    """

    machines: tuple[Machine, ...]
    works: tuple[Work, ...]
    background: Strangers | None = None
    seed: int = 0
    begin: datetime = MONDAY


@dataclass(frozen=True, slots=True)
class Result:
    """A variant, what happened, and its figures."""

    variant: Variant
    history: History
    figures: Figures


Progress = Callable[[int, int, int], None]


def simulate(scenario: Scenario, variants: Sequence[Variant], progress: Progress | None = None) -> tuple[Result, ...]:
    """Runs every variant. ``progress`` is told of which variant how many of how many jobs have ended.

    Raises UsageError for jobs and strangers that a variant's policy does not know.
    """
    results = []
    for number, variant in enumerate(variants):
        history = run_one(scenario, variant, None if progress is None else _for(progress, number))
        results.append(Result(variant, history, figures(history, scenario.works)))
    return tuple(results)


def run_one(scenario: Scenario, variant: Variant, progress: Callable[[int, int], None] | None = None) -> History:
    """Runs one variant."""
    if variant.rules.policy == "guides":
        return run_guides(scenario.machines, scenario.works, scenario.background, scenario.seed, progress)
    if variant.rules.policy == "handover":
        return _handed_over(scenario, variant.rules, progress)
    several = next((work.job.name for work in scenario.works if work.job.nodes > 1), None)
    if several is not None:
        raise UsageError(
            f"job {several!r} spans several nodes, which only a cluster's engine gives; say --policy handover"
        )
    simulation = Simulation(
        scenario.machines, scenario.works, variant.rules, scenario.background, scenario.seed, scenario.begin
    )
    return simulation.run(progress)


def _handed_over(scenario: Scenario, rules: Rules, progress: Callable[[int, int], None] | None) -> History:
    if scenario.background is not None:
        raise UsageError("--background is for our own policy; what else a cluster runs is not simulated")
    return HandedOver(scenario.machines, scenario.works, rules).run(progress)


def _for(progress: Progress, number: int) -> Callable[[int, int], None]:
    return lambda done, total: progress(number, done, total)
