"""Replays a queue against a machine or cluster of any size, in virtual time, with the policy that real runs use.

The public names are imported when first used: the command line reads ``simulate.options`` for its flags and must not
pay for the simulation then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.simulate.cluster import Background, background, machine, machines
    from gpuherd.simulate.options import Rules, Variant, variants
    from gpuherd.simulate.results import Figures, History
    from gpuherd.simulate.scenario import Result, Scenario, simulate
    from gpuherd.simulate.workload import Mix, Recipe, Spread, Trial, Work, drawn, listed, spread

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

_PUBLIC = {
    "cluster": ("Background", "background", "machine", "machines"),
    "options": ("Rules", "Variant", "variants"),
    "results": ("Figures", "History"),
    "scenario": ("Result", "Scenario", "simulate"),
    "workload": ("Mix", "Recipe", "Spread", "Trial", "Work", "drawn", "listed", "spread"),
}

__getattr__, __dir__ = on_first_use(__name__, {name: module for module, names in _PUBLIC.items() for name in names})
