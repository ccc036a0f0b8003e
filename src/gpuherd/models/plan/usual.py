"""What a model takes on the GPUs that clusters and clouds usually have: for whom has none yet, and chooses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.kinds import Kind, kind_named
from gpuherd.models.plan.placing import Task, Wish, place
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import MemoryPlan
from gpuherd.models.plan.workload import Reserve, Workload

NAMES = ("T4", "RTX4090", "A100-40", "L40S", "A100-80", "H200", "B200")
MOST_GPUS = 16
_QUANTISED = (Precision.INT8, Precision.NF4)


@dataclass(frozen=True, slots=True)
class OnUsual:
    """A kind of GPU, and the plan on the fewest of them in each precision; None where even 16 don't do."""

    kind: Kind
    plans: dict[Precision, MemoryPlan | None]


def usual_cards(kind: Kind, count: int = MOST_GPUS) -> tuple[Card, ...]:
    """So many of a kind."""
    return tuple(Card(str(place), kind.name, kind.memory, kind.memory, kind.capability) for place in range(count))


def usual_kinds() -> list[Kind]:
    """The usual kinds, smallest first."""
    return [kind for kind in map(kind_named, NAMES) if kind is not None]


def precisions_beside(precision: Precision) -> tuple[Precision, ...]:
    """This one, and smaller ones that it could be loaded in instead."""
    if precision.is_quantised or precision is Precision.AS_STORED:
        return (precision,)
    return (precision, *_QUANTISED)


def on_usual_cards(
    architecture: Architecture,
    precisions: Sequence[Precision],
    workload: Workload,
    reserve: Reserve,
    *,
    parallel: Wish = "auto",
    gpus: int | None = None,
) -> list[OnUsual]:
    """The model on each usual kind, in each of these precisions."""
    tasks = {precision: Task(architecture, precision, workload, reserve) for precision in precisions}
    rows = []
    for kind in usual_kinds():
        plans: dict[Precision, MemoryPlan | None] = {}
        for precision, task in tasks.items():
            told = place(task, usual_cards(kind), parallel, gpus)
            plans[precision] = told if isinstance(told, MemoryPlan) else None
        rows.append(OnUsual(kind, plans))
    return rows
