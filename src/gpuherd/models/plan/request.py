"""What a job asks its queue for, so that its plan comes true: a number of GPUs and the memory free on each. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.models.plan.result import MemoryPlan
from gpuherd.models.plan.workload import MIB


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """``gpus`` GPUs with ``memory_mb`` MB (2^20 bytes) free on each: context and reserve are in it."""

    gpus: int
    memory_mb: int


def gpu_request(plan: MemoryPlan) -> GpuRequest:
    """What one replica of this plan asks for. Queues know one figure for all GPUs of a job: that of the fullest."""
    return GpuRequest(plan.gpus, max(-(-load.usage.total // MIB) for load in plan.loads))
