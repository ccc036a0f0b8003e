"""What was asked for when a model is to be loaded, and what contradicts itself in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.models.load.options import Offload
from gpuherd.models.load.placed import CPU
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.placing import Wish
from gpuherd.models.plan.result import MemoryPlan, Refusal
from gpuherd.models.plan.workload import Reserve, Workload


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for: the keywords of ``load_model``, which explains them."""

    model: str
    plan: MemoryPlan | Refusal | None = None
    device_map: Mapping[str, Any] | str | None = None
    quantization: str | None = None
    dtype: str | None = None
    adapter: str | None = None
    merge_adapter: bool = False
    allow_offload: Offload | None = None
    parallel: Wish | None = None
    gpus: str | Sequence[Card] = "auto"
    trust_remote_code: bool = False
    workload: Workload = field(default_factory=Workload)
    reserve: Reserve = field(default_factory=Reserve)
    simulate: bool = False


def check(asked: Asked) -> None:
    """Raises UsageError for keywords that contradict each other."""
    if asked.plan is not None and asked.device_map is not None:
        raise UsageError("a plan and a device map: the plan has its own; give one of them")
    if asked.plan is not None and asked.parallel is not None:
        raise UsageError("a plan and parallel: the plan says how the model is laid out; give one of them")
    if isinstance(asked.device_map, str) and asked.device_map not in ("auto", CPU):
        raise UsageError(f"device map {asked.device_map!r}: it is auto, cpu, or a mapping of module paths to devices")
    if asked.device_map is not None and asked.device_map != "auto" and asked.parallel is not None:
        raise UsageError("a device map and parallel: the map says where everything goes; give one of them")
    if asked.parallel == "tensor" or (isinstance(asked.plan, MemoryPlan) and asked.plan.parallel == "tensor"):
        raise UsageError(
            "each layer over several GPUs takes a process a GPU: use gpuherd.models.load.tensor_parallel, or "
            "'python -m gpuherd.models.load.worker --parallel tensor'"
        )
