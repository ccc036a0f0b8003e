"""Replays a queue against a machine or cluster of any size, in virtual time, with the policy that real runs use.

The public names are imported when first used: the command line reads ``simulate.options`` for its flags and must not
pay for the simulation then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.simulate.cluster import machine, machines
    from gpuherd.simulate.figures import Figures
    from gpuherd.simulate.history import History
    from gpuherd.simulate.lengths import Spread, spread
    from gpuherd.simulate.rules import Rules, Variant, variants
    from gpuherd.simulate.scenario import Result, Scenario, simulate
    from gpuherd.simulate.strangers import Background, background
    from gpuherd.simulate.workload import Mix, Recipe, Trial, Work, drawn, listed

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
    "Variant",
    "Work",
    "background",
    "drawn",
    "listed",
    "machine",
    "machines",
    "simulate",
    "spread",
    "variants",
]

_HOME = {
    "Background": "strangers",
    "Figures": "figures",
    "History": "history",
    "Mix": "workload",
    "Recipe": "workload",
    "Result": "scenario",
    "Rules": "rules",
    "Scenario": "scenario",
    "Spread": "lengths",
    "Trial": "workload",
    "Variant": "rules",
    "Work": "workload",
    "background": "strangers",
    "drawn": "workload",
    "listed": "workload",
    "machine": "cluster",
    "machines": "cluster",
    "simulate": "scenario",
    "spread": "lengths",
    "variants": "rules",
}

__getattr__, __dir__ = on_first_use(__name__, _HOME)
