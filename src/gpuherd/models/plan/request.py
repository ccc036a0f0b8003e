"""What a job asks its queue for, so that its plan comes true: a number of GPUs and the memory free on each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuherd.models.plan.advice import alternatives
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.placing import Task, Wish
from gpuherd.models.plan.planner import make_plan
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import MemoryPlan, Refusal
from gpuherd.models.plan.workload import MIB, Reserve, Workload


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """``gpus`` GPUs with ``memory_mb`` MB (2^20 bytes) free on each: context and reserve are in it."""

    gpus: int
    memory_mb: int


def gpu_request(plan: MemoryPlan) -> GpuRequest:
    """What one replica of this plan asks for. Queues know one figure for all GPUs of a job: that of the fullest."""
    return GpuRequest(plan.gpus, max(-(-load.usage.total // MIB) for load in plan.loads))


def request_for(
    architecture: Architecture,
    precision: Precision,
    workload: Workload,
    card_mb: Sequence[int],
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    *,
    parallel: Wish = "auto",
    gpus: int | None = None,
) -> GpuRequest | Refusal:
    """What a job should ask for on a machine with GPUs of these sizes in MB, when they are free.

    The fewest GPUs that have what each must hold; of as few the smallest memory, so that the most GPUs will do. On a
    machine of 24 and 80 GB a model that fits one of 24 asks for what it needs there, and may get either.

    Raises UsageError: no GPUs, or fewer than ``gpus``.
    """
    best: GpuRequest | None = None
    refused: tuple[Refusal, list[Card]] | None = None
    for size in sorted({mb for mb in card_mb if mb > 0}, reverse=True) or [0]:
        # Whatever GPUs the queue gives, each has this much at least.
        many = sum(mb >= size for mb in card_mb)
        if gpus is not None and many < gpus <= len(card_mb):
            continue
        cards = [Card(str(place), f"{size}MB", size * MIB, size * MIB) for place in range(many)]
        told = make_plan(architecture, cards, precision, workload, reserve, parallel=parallel, gpus=gpus, advise=False)
        if isinstance(told, MemoryPlan):
            asked = gpu_request(told)
            if best is None or (asked.gpus, asked.memory_mb) < (best.gpus, best.memory_mb):
                best = asked
        elif refused is None or told.missing < refused[0].missing:
            refused = told, cards
    if best is not None:
        return best
    assert refused is not None  # noqa: S101 - no size at all is a UsageError of make_plan
    what = Task(architecture, precision, workload, reserve)
    return replace(refused[0], alternatives=alternatives(what, refused[1], parallel, gpus))
