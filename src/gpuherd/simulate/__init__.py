"""Replays a queue against a machine or cluster of any size, in virtual time, with the policy that real runs use.

The public names are imported when first used: the command line reads ``simulate.options`` for its flags and must not
pay for the simulation then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.simulate.options import Rules, Variant, variants
    from gpuherd.simulate.people import User, UserFigures, users, works_of
    from gpuherd.simulate.results import Figures, History, Result
    from gpuherd.simulate.workload import (
        Background,
        Mix,
        Recipe,
        Scenario,
        Spread,
        Trial,
        Work,
        background,
        drawn,
        listed,
        machine,
        machines,
        spread,
    )

__all__ = [
    "Background",
    "Figures",
    "History",
    "Mix",
    "Recipe",
    "Result",
    "Rules",
    "Scenario",
    "Spread",
    "Trial",
    "User",
    "UserFigures",
    "Variant",
    "Work",
    "background",
    "drawn",
    "listed",
    "machine",
    "machines",
    "simulate",
    "spread",
    "users",
    "variants",
    "works_of",
]

_HOMES = dict.fromkeys(__all__, "workload")
_HOMES |= dict.fromkeys(("Rules", "Variant", "variants"), "options")
_HOMES |= dict.fromkeys(("Figures", "History", "Result"), "results")
_HOMES |= dict.fromkeys(("User", "UserFigures", "users", "works_of"), "people")

__getattr__, __dir__ = on_first_use(__name__, _HOMES)


def simulate(
    scenario: Scenario, variants: Sequence[Variant], progress: Callable[[int, int, int], None] | None = None
) -> tuple[Result, ...]:
    """Runs every variant. ``progress`` is called with the variant's number and the numbers of ended and of all jobs.

    Raises UsageError for jobs and external users that a variant's policy does not support.
    """
    from gpuherd.simulate.people import user_figures
    from gpuherd.simulate.results import Result, figures

    results = []
    for number, variant in enumerate(variants):
        history = _run(scenario, variant.rules, None if progress is None else partial(progress, number))
        people = user_figures(history, scenario.works) if scenario.users else ()
        results.append(Result(variant, history, figures(history, scenario.works), people))
    return tuple(results)


def _run(scenario: Scenario, rules: Rules, progress: Callable[[int, int], None] | None) -> History:
    from gpuherd.simulate.engine import Simulation
    from gpuherd.simulate.other_schedulers import Handover, run_guides

    machines, works = scenario.machines, scenario.works
    if scenario.users:
        return _run_shared(scenario, rules, progress)
    if rules.names_turns:
        raise UsageError("turns, half_life, grace, slice and keep_share are for several users: --users alice:2,bob")
    if rules.policy == "guides":
        return run_guides(machines, works, scenario.background, scenario.seed, progress)
    if rules.policy == "handover":
        if scenario.background is not None:
            raise UsageError("--background is for our own policy; the other load of a cluster is not simulated")
        return Handover(machines, works, rules).run(progress)
    several = next((work.job.name for work in works if work.job.nodes > 1), None)
    if several is not None:
        raise UsageError(f"job {several!r} spans several nodes, which needs a cluster's engine: use --policy handover")
    return Simulation(machines, works, rules, scenario.background, scenario.seed, scenario.starts_at).run(progress)


def _run_shared(scenario: Scenario, rules: Rules, progress: Callable[[int, int], None] | None) -> History:
    from gpuherd.simulate.shared import SharedSimulation

    if rules.policy != "gpuherd":
        raise UsageError(f"--policy {rules.policy} knows no users; --users is for our own policy")
    if len(scenario.machines) > 1:
        raise UsageError("--users share one machine: use --machine 8x80GB")
    several = next((work.job.name for work in scenario.works if work.job.nodes > 1), None)
    if several is not None:
        raise UsageError(f"job {several!r} spans several nodes, which needs a cluster's engine: use --policy handover")
    return SharedSimulation(
        scenario.machines,
        scenario.works,
        scenario.users,
        rules,
        scenario.background,
        scenario.seed,
        scenario.starts_at,
    ).run(progress)
