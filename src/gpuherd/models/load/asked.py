"""What was asked for when a model is to be loaded, as keywords or as options, and what contradicts itself in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.models.load.options import OFFLOADS, LoadOptions, Offload
from gpuherd.models.load.placed import CPU
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.placement import ParallelOption
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.models.plan.workload import Reserve, Workload

_MAX_MAP_BYTES = 5_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for: the keywords of ``load_model``, which explains them."""

    model: str
    plan: MemoryPlan | AnswerRefusal | None = None
    device_map: Mapping[str, Any] | str | None = None
    quantization: str | None = None
    dtype: str | None = None
    adapter: str | None = None
    merge_adapter: bool = False
    allow_offload: Offload | None = None
    parallel: ParallelOption | None = None
    gpus: str | Sequence[GpuSpec] = "auto"
    trust_remote_code: bool = False
    workload: Workload = field(default_factory=Workload)
    reserve: Reserve = field(default_factory=Reserve)
    simulate: bool = False


def asked_for(model: str, options: LoadOptions, workload: Workload, *, simulate: bool = False) -> Asked:
    """What a command's options ask for. Raises UsageError for a device map that can't be read."""
    return Asked(
        model=model,
        device_map=read_device_map(options.device_map),
        quantization=options.quantization,
        dtype=options.dtype,
        adapter=options.adapter,
        merge_adapter=options.merge_adapter,
        allow_offload=options.allow_offload,
        parallel=options.parallel,
        gpus=options.gpus,
        trust_remote_code=options.trust_remote_code,
        workload=workload,
        simulate=simulate,
    )


def read_device_map(word: str | None) -> Mapping[str, Any] | str | None:
    """The device map that ``--device-map`` means: ``auto``, ``cpu``, or what a JSON file holds.

    Raises UsageError: the file is not there or holds no device map.
    """
    if word is None or word in ("auto", "cpu"):
        return word
    try:
        with Path(word).open("rb") as file:
            found = json.loads(file.read(_MAX_MAP_BYTES))
    except OSError as problem:
        raise UsageError(f"--device-map {word}: it is auto, cpu or a JSON file; {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"--device-map {word}: the file is no JSON: {problem}") from None
    if not isinstance(found, dict) or not all(isinstance(device, int | str) for device in found.values()):
        raise UsageError(f"--device-map {word}: a device map is an object of module paths and devices")
    return found


def check(asked: Asked) -> None:
    """Raises UsageError for keywords that contradict each other."""
    if asked.plan is not None and asked.device_map is not None:
        raise UsageError("a plan and a device map: the plan has its own; give one of them")
    if asked.plan is not None and asked.parallel is not None:
        raise UsageError("a plan and parallel: the plan says how the model is laid out; give one of them")
    if asked.gpus != "auto" and (asked.plan is not None or asked.device_map not in (None, "auto")):
        raise UsageError(
            "gpus beside a plan or a device map, which says on which GPUs the model lies; give one of them"
        )
    if isinstance(asked.plan, MemoryPlan) and asked.allow_offload is not None:
        raise UsageError("a plan and allow_offload: the plan has room for the whole model; give one of them")
    if asked.allow_offload is not None and asked.allow_offload not in OFFLOADS:
        raise UsageError(f"allow_offload {asked.allow_offload!r}: it is one of {', '.join(OFFLOADS)}")
    if isinstance(asked.device_map, str) and asked.device_map not in ("auto", CPU):
        raise UsageError(f"device map {asked.device_map!r}: it is auto, cpu, or a mapping of module paths to devices")
    if asked.device_map is not None and asked.device_map != "auto" and asked.parallel is not None:
        raise UsageError("a device map and parallel: the map says where everything goes; give one of them")
    if asked.parallel == "tensor" or (isinstance(asked.plan, MemoryPlan) and asked.plan.parallel == "tensor"):
        raise UsageError(
            "each layer over several GPUs takes a process a GPU: use gpuherd.models.load.tensor_parallel, or "
            "'python -m gpuherd.models.load.worker --parallel tensor'"
        )
