"""Will a model fit, where, and what else would: the planner's one question. Pure, no torch, a few milliseconds.

``placement`` decides, ``advice`` tries what else would fit when it doesn't. ``training`` is the same for trainings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuherd.models.place.advice import alternatives
from gpuherd.models.place.gpus import MOST_COMMON_GPUS, GpuKind, GpuSpec, common_kinds, gpus_of_kind
from gpuherd.models.place.placement import AnswerTask, ParallelOption, place
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.workload import Reserve, Workload

_QUANTISED = (Precision.INT8, Precision.NF4)


def make_plan(
    architecture: Architecture,
    gpus: Sequence[GpuSpec],
    precision: Precision,
    workload: Workload,
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    *,
    parallel: ParallelOption = "auto",
    count: int | None = None,
    advise: bool = True,
) -> MemoryPlan | AnswerRefusal:
    """Where the model goes on these GPUs, or why it doesn't fit and what would.

    The split is the contiguous one that leaves the fullest GPU as empty as can be; ``largest_batch`` is exact. Of
    several sets of GPUs the roomiest is taken, or neighbours in the order given where these are about as roomy.

    Args:
        gpus: those that may be used, linked neighbours side by side (``gpus_now``).
        parallel: ``auto``: fewest GPUs that hold it, replicas over the rest; ``replica``: one GPU each; ``layers``: one
            after the other over all (or ``count``); ``tensor``: each layer over all (or ``count``) that divide its
            heads.
        count: exactly so many GPUs a replica.
        advise: look for alternatives when it doesn't fit, each of which is planned itself.

    Raises:
        UsageError: no GPUs, or a ``count`` that there are not.
    """
    task = AnswerTask(architecture, precision, workload, reserve)
    result = place(task, gpus, parallel, count)
    if isinstance(result, AnswerRefusal) and advise:
        return replace(result, alternatives=alternatives(task, gpus, parallel, count))
    return result


# ---- common kinds of GPUs, for users who have none yet ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommonGpuPlans:
    """A kind of GPU, and the plan on the fewest of them in each precision; None where even 16 are too few."""

    kind: GpuKind
    plans: dict[Precision, MemoryPlan | None]


def precisions_to_compare(precision: Precision) -> tuple[Precision, ...]:
    """This one, and smaller ones that the model could be loaded in instead."""
    if precision.is_quantised or precision is Precision.AS_STORED:
        return (precision,)
    return (precision, *_QUANTISED)


def plan_on_common_gpus(
    architecture: Architecture,
    precisions: Sequence[Precision],
    workload: Workload,
    reserve: Reserve,
    *,
    parallel: ParallelOption = "auto",
    count: int | None = None,
) -> list[CommonGpuPlans]:
    """The model on each common kind, in each of these precisions."""
    tasks = {precision: AnswerTask(architecture, precision, workload, reserve) for precision in precisions}
    rows = []
    for kind in common_kinds():
        plans: dict[Precision, MemoryPlan | None] = {}
        for precision, task in tasks.items():
            result = place(task, gpus_of_kind(kind, MOST_COMMON_GPUS), parallel, count)
            plans[precision] = result if isinstance(result, MemoryPlan) else None
        rows.append(CommonGpuPlans(kind, plans))
    return rows
