"""Options of commands that load a model, the request that they or keywords make, and what contradicts itself in it.
Light."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpuherd.errors import UsageError
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.placement import PARALLEL_OPTIONS, ParallelOption
from gpuherd.models.place.request import DTYPES, parse_precision
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.workload import Reserve, Workload
from gpuherd.options import option

# A GPU's number, CPU or DISK.
Device = int | str
CPU, DISK = "cpu", "disk"
Offload = Literal["cpu", "disk"]
OFFLOADS: tuple[Offload, ...] = ("cpu", "disk")

QUANTISATIONS = tuple(each.value for each in Precision if each.is_quantised)


def quantisation_named(word: str) -> Precision:
    """The way to quantise of this name. Raises UsageError, which names those that there are.

    >>> [quantisation_named(word).value for word in ("8bit", "nf4-dq")]
    ['int8', 'nf4-dq']
    """
    found = parse_precision(word)
    if not found.is_quantised:
        raise UsageError(f"quantization {word!r}: it is one of {', '.join(QUANTISATIONS)}")
    return found


def requested_precision(dtype: str | None, quantization: str | None) -> Precision | None:
    """The precision that two words ask for, None where neither is said.

    ``quantization`` may stand beside the dtype that it computes in. Raises UsageError where they contradict each other.
    """
    plain = None if dtype is None else parse_precision(dtype)
    found = None if quantization is None else quantisation_named(quantization)
    if found is not None and plain is not None and plain not in (found, found.computes_in):
        raise UsageError(f"dtype {plain} and quantization {found} together: {found} computes in {found.computes_in}")
    return found or plain


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is loaded, on whatever GPUs a job has. Raises UsageError for options that contradict each other."""

    dtype: Precision | None = option(
        None,
        help="precision of the weights in memory; the checkpoint's own by default",
        parse=parse_precision,
        choices=DTYPES,
        group="model",
    )
    quantization: Precision | None = option(
        None,
        help="quantise by bitsandbytes while loading; the same as --dtype int8, nf4 or nf4-dq",
        aliases=("quantisation", "quantize"),
        parse=quantisation_named,
        choices=QUANTISATIONS,
        group="model",
    )
    device_map: str | None = option(
        None,
        help="where the blocks go: auto (planned), cpu, or a JSON file as 'gpuherd plan --device-map' prints it",
        metavar="auto|cpu|FILE",
        group="model",
    )
    parallel: ParallelOption | None = option(
        None,
        help="fewest GPUs that hold it (auto), layers over all GPUs, each layer over all GPUs, or one GPU",
        choices=PARALLEL_OPTIONS,
        group="model",
    )
    allow_offload: Offload | None = option(
        None,
        help="what fits on no GPU goes to the computer's memory or its disk, which is slow; refused otherwise",
        choices=OFFLOADS,
        group="model",
    )
    adapter: str | None = option(None, help="a LoRA adapter on top of the model", metavar="ADAPTER", group="model")
    merge_adapter: bool = option(False, help="merge the adapter into the weights", group="model")
    trust_remote_code: bool = option(False, help="run the code that a model brings; read it before", group="model")

    def __post_init__(self) -> None:
        requested_precision(self.dtype, self.quantization)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ModelOptions):
    """How a model is loaded by a program that has all of this machine's GPUs before it."""

    gpus: str = option(
        "auto",
        help="the GPUs to plan for: those that are free here, or GPUs to pretend, such as 4x40GB: where there is no "
        "CUDA their blocks lie in the CPU's memory",
        metavar="auto|4x40GB",
        group="model",
    )


# ---- a request to load a model ---------------------------------------------------------------------------------------

_MAX_MAP_BYTES = 5_000_000


@dataclass(frozen=True, slots=True)
class LoadRequest:
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


def load_request(model: str, options: LoadOptions, workload: Workload, *, simulate: bool = False) -> LoadRequest:
    """What a command's options ask for. Raises UsageError for a device map that can't be read."""
    return LoadRequest(
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


def check(request: LoadRequest) -> None:
    """Raises UsageError for keywords that contradict each other."""
    if request.plan is not None and request.device_map is not None:
        raise UsageError("a plan and a device map: the plan has its own; give one of them")
    if request.plan is not None and request.parallel is not None:
        raise UsageError("a plan and parallel: the plan says how the model is laid out; give one of them")
    if request.gpus != "auto" and (request.plan is not None or request.device_map not in (None, "auto")):
        raise UsageError(
            "gpus beside a plan or a device map, which says on which GPUs the model lies; give one of them"
        )
    if isinstance(request.plan, MemoryPlan) and request.allow_offload is not None:
        raise UsageError("a plan and allow_offload: the plan has room for the whole model; give one of them")
    if request.allow_offload is not None and request.allow_offload not in OFFLOADS:
        raise UsageError(f"allow_offload {request.allow_offload!r}: it is one of {', '.join(OFFLOADS)}")
    if isinstance(request.device_map, str) and request.device_map not in ("auto", CPU):
        raise UsageError(f"device map {request.device_map!r}: it is auto, cpu, or a mapping of module paths to devices")
    if request.device_map is not None and request.device_map != "auto" and request.parallel is not None:
        raise UsageError("a device map and parallel: the map says where everything goes; give one of them")
    if request.parallel == "tensor" or (isinstance(request.plan, MemoryPlan) and request.plan.parallel == "tensor"):
        raise UsageError(
            "each layer over several GPUs takes a process a GPU: use gpuherd.models.load.tensor_parallel, or "
            "'python -m gpuherd.models.load.worker --parallel tensor'"
        )
