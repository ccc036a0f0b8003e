"""Options of commands that load a model, of jobs that each load one, and the request that options or keywords make.
Light.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gpuherd.engines.options import refuse_ranks
from gpuherd.errors import UsageError
from gpuherd.jobs.options import DispatchOptions
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.request import DTYPES, PARALLEL_OPTIONS, ParallelOption, parse_precision
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan
from gpuherd.options import option
from gpuherd.units import count, positive_int

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

    ``quantization`` can be given together with the dtype that it computes in. Raises UsageError where they
    contradict each other.
    """
    plain = None if dtype is None else parse_precision(dtype)
    found = None if quantization is None else quantisation_named(quantization)
    if found is not None and plain is not None and plain not in (found, found.computes_in):
        raise UsageError(f"dtype {plain} and quantization {found} together: {found} computes in {found.computes_in}")
    return found or plain


_model, _work = partial(option, None, group="model"), partial(option, group="work")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is loaded, on whatever GPUs a job has. Raises UsageError for options that contradict each other."""

    dtype: Precision | None = _model(
        help="precision of the weights in memory; the checkpoint's own by default",
        parse=parse_precision,
        choices=DTYPES,
    )
    quantization: Precision | None = _model(
        help="quantise by bitsandbytes while loading; the same as --dtype int8, nf4 or nf4-dq",
        aliases=("quantisation", "quantize"),
        parse=quantisation_named,
        choices=QUANTISATIONS,
    )
    device_map: str | None = _model(
        help="where the blocks go: auto (planned), cpu, or a JSON file as 'gpuherd plan --device-map' prints it",
        metavar="auto|cpu|FILE",
    )
    parallel: ParallelOption | None = _model(
        help="fewest GPUs that hold it (auto), layers over all GPUs, each layer over all GPUs, or one GPU",
        choices=PARALLEL_OPTIONS,
    )
    allow_offload: Offload | None = _model(
        help="what fits on no GPU goes to the computer's memory or its disk, which is slow; refused otherwise",
        choices=OFFLOADS,
    )
    adapter: str | None = _model(help="a LoRA adapter on top of the model", metavar="ADAPTER")
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
    """The options as given: the keywords of ``load_model``, which explains them."""

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


def load_request(model: str, options: ModelOptions, workload: Workload, *, simulate: bool = False) -> LoadRequest:
    """The request of a command's options. Raises UsageError for a device map that can't be read."""
    kind = LoadOptions if isinstance(options, LoadOptions) else ModelOptions
    given = {each.name: getattr(options, each.name) for each in fields(kind)}
    given["device_map"] = read_device_map(options.device_map)
    return LoadRequest(model, **given, workload=workload, simulate=simulate)


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


# ---- options of work that jobs share, each with a model of its own: one declaration for commands and workers ---------


@dataclass(frozen=True, kw_only=True)
class WorkOptions(DispatchOptions, ModelOptions):
    """Options of work that is divided among jobs, each of which loads the model."""

    gpus_per_job: int = option(
        1,
        help="GPUs that each job gets at least; a model that needs more gets more",
        aliases=("num-gpus-per-job",),
        parse=positive_int,
        metavar="N",
        group="GPUs",
    )
    batch_size: int = _work(
        32, help="sequences at once in a job; halved when memory runs out", parse=positive_int, metavar="N"
    )
    shards: int | None = _work(
        None,
        help="jobs to divide the work among (default: as many as can run at once); kept when the work goes on",
        parse=positive_int,
        metavar="N",
    )
    retries: int = _work(1, help="further tries for a job that crashed or ran out of memory", parse=count, metavar="N")
    dry_run: bool = _work(False, help="show what would run and start nothing")
    enqueue_only: bool = _work(False, help="put the jobs into the queue of the run's folder and end")

    def __post_init__(self) -> None:
        DispatchOptions.__post_init__(self)
        refuse_ranks(self)
        ModelOptions.__post_init__(self)
        object.__setattr__(self, "gpu_list", tuple(self.gpu_list))
        for name, least, instead in (
            ("gpus_per_job", 1, " (on the CPU: --device-map cpu)"),
            ("batch_size", 1, ""),
            ("shards", 1, ""),
            ("retries", 0, ""),
        ):
            number = getattr(self, name)
            if number is not None and number < least:
                raise UsageError(f"{name}={number}; the least is {least}{instead}")


@dataclass(frozen=True, kw_only=True)
class ShardOptions(ModelOptions):
    """Options of every worker: the model, the folder of the work, its shard, and what it does at once."""

    model: str = _work(help="the model: a folder, a weight file, or a Hugging Face id", metavar="MODEL")
    folder: str = _work(help="the folder of the work, which has its shards.json", metavar="DIR")
    shard: int = _work(help="which of the shards", parse=count, metavar="N")
    batch_size: int = _work(32, help="sequences at once", parse=positive_int, metavar="N")
    prompt_tokens: int = _work(
        512, help="tokens of the longest prompt, for the memory plan", parse=positive_int, metavar="N"
    )
    new_tokens: int = _work(
        1, help="most new tokens of a sequence, for the memory plan", parse=positive_int, metavar="N"
    )
    simulate: bool = _work(False, help="the GPUs are pretended: what is planned on them lies in the CPU's memory")
