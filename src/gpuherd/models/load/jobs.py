"""Jobs that each load a model and work on a shard: what they request, the jobs themselves, and loading inside one.

A model is planned once for all jobs of a piece of work: each is given the fewest GPUs that hold it with as many
sequences as it will have at once, and as many jobs run side by side as there are GPUs for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuherd.engines import host, progress
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import JobCannotFit
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.models.describe.description import Architecture
from gpuherd.models.load.options import (
    ModelOptions,
    ShardOptions,
    WorkOptions,
    load_request,
    read_device_map,
    requested_precision,
)
from gpuherd.models.memory.kv_cache import Reserve, Workload
from gpuherd.models.place.gpus import GpuSpec, count_gpus
from gpuherd.models.place.inventory import idle_gpus, node_gpus
from gpuherd.options import words_of
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedDirectory
from gpuherd.runs.worker import run_worker

if TYPE_CHECKING:
    from gpuherd.models.load.loading import Loaded

# Workers report progress with each batch, and none while they load: after two hours without any a worker hangs. (A
# batch of long answers by a model that is offloaded to the disk may well take one.)
HEARTBEAT_S = 7200.0
# Work is divided among so many GPUs of a cluster unless --max-gpus says otherwise.
_CLUSTER_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Resources:
    """What jobs may use: GPUs of this machine (none: the CPU) and its cores, or the cluster that the options name."""

    gpus: tuple[Gpu, ...]
    cores: int
    cluster: EngineOptions | None = None

    @property
    def gpu_specs(self) -> tuple[GpuSpec, ...]:
        """GPUs that a job can get, with the memory that is free when no process uses them; of a cluster those of a
        node. Raises as ``node_gpus``."""
        return idle_gpus(self.gpus) if self.cluster is None else node_gpus(self.cluster)

    def most_gpus(self, options: DispatchOptions) -> int:
        """The number of GPUs that the work may use at once."""
        return (options.max_gpus or _CLUSTER_WIDTH) if self.cluster is not None else options.most_of(len(self.gpus))

    def places(self, gpus: int, options: DispatchOptions) -> int:
        """The number of jobs, each on so many GPUs (0: on the CPU), that the work is divided among; at least 1.

        A cluster has room for any number of jobs; there ``max_gpus`` limits it.
        """
        if self.cluster is not None:
            places = self.most_gpus(options) // max(1, gpus)
        elif gpus and self.gpus:
            places = self.most_gpus(options) // gpus
        else:
            places = options.cpu_jobs or self.cores // 2
        if options.max_concurrent is not None:
            places = min(places, options.max_concurrent)
        return max(1, places)


# Flags of gpuherd plan in the spelling of these commands; they have none for the length of prompts.
_SPELLING: Mapping[str, str | None] = {"--batch": "--batch-size {}", "--prompt-tokens": None, "--num-gpus": None}


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What each job requests.

    Attributes:
        gpus: the number of GPUs; 0: it computes on the CPU.
        memory_mb: free memory that it needs on each; None if that is not known.
        at_once: the number of such jobs that can run at the same time, at least 1.
        sentence: the same in words.
    """

    gpus: int
    memory_mb: int | None
    at_once: int
    sentence: str


def resources_for(options: DispatchOptions) -> Resources:
    """The resources for a run with these options: of this machine (raises NoSuchGpu), or of the cluster that they name,
    which is queried only when ``gpu_specs`` is read."""
    if options.engine != LOCAL:
        return Resources((), host.cores(), options)
    from gpuherd.jobs.gpu.watch import watch_for_plan
    from gpuherd.jobs.settings import load

    return Resources(watch_for_plan(options, load()).gpus, host.cores())


def job_request(model: str, options: WorkOptions, workload: Workload, have: Resources, reserved: int = 0) -> JobRequest:
    """What a job with this workload requests. ``reserved``: bytes of another model on the same GPU.

    Raises:
        UsageError: options that contradict each other.
        MissingModel, BadModel: the model can't be found, or can't be planned.
        JobCannotFit: it fits nowhere, and may not be offloaded.
    """
    device_map = read_device_map(options.device_map)
    if device_map == "cpu":
        return JobRequest(0, None, have.places(0, options), "on the CPU, as asked")
    if isinstance(device_map, Mapping):
        return _as_mapped(device_map, options, have)
    return _as_planned(model, options, workload, have, reserved)


def _as_mapped(device_map: Mapping[str, object], options: WorkOptions, have: Resources) -> JobRequest:
    gpus = len({str(device) for device in device_map.values() if str(device) not in ("cpu", "disk")})
    said = f"{count_gpus(gpus)}, as the device map has it" if gpus else "on the CPU, as asked"
    return JobRequest(gpus, None, have.places(gpus, options), said)


def _as_planned(model: str, options: WorkOptions, workload: Workload, have: Resources, reserved: int) -> JobRequest:
    from gpuherd.models.place.resources import resources_for

    specs = have.gpu_specs
    least = options.gpus_per_job
    try:
        demand = resources_for(
            model,
            specs,
            dtype=requested_precision(options.dtype, options.quantization),
            batch=workload.batch,
            prompt_tokens=workload.prompt_tokens,
            new_tokens=workload.new_tokens,
            parallel=options.parallel,
            gpu_range=None if least == 1 else (least, max(least, have.most_gpus(options))),
            most=options.max_gpus,
            reserve=Reserve().with_fixed(reserved),
            read=_reader(options.adapter),
            spelling=_SPELLING,
        )
    except JobCannotFit:
        if options.allow_offload is None or not specs:
            raise
        gpus = options.most_of(len(specs))
        said = f"{count_gpus(gpus)}; what has no room there goes to the {options.allow_offload}"
        return JobRequest(gpus, None, 1, said)
    return JobRequest(demand.gpus, demand.memory_mb, have.places(demand.gpus, options), demand.sentence)


def _reader(adapter: str | None) -> Callable[[str], Architecture]:
    """Reads the shapes of a model, with those of its adapter if there is one."""
    from gpuherd.models.describe.reading import read_architecture

    if adapter is None:
        return read_architecture

    def read(name: str) -> Architecture:
        from gpuherd.models.checkpoints.hub import locate
        from gpuherd.models.describe.reading import with_adapter
        from gpuherd.models.names import parse_model

        return with_adapter(read_architecture(name), locate(parse_model(adapter)))

    return read


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """The part of a worker's call that is the same for all jobs.

    Attributes:
        module: the worker, run by ``python -m``.
        model: the model's name.
        words: further arguments of the worker, after model, folder, shard, workload and model options.
        workload: what it does at once.
        simulate: the GPUs are simulated.
        identity: what the results depend on.
        title: the name of a job in progress lines, before its number.
    """

    module: str
    model: str
    words: tuple[str, ...]
    workload: Workload
    simulate: bool
    identity: str
    title: str


def shard_jobs(
    call: WorkerCall, shards: Sequence[Shard], folder: ShardedDirectory, asks: JobRequest, options: WorkOptions
) -> list[Job]:
    """A job for each shard that has items. A job is done when the file ``folder.shard_done(number)`` exists."""
    many = len(shards)
    return [
        Job(
            name=f"shard-{number:05d}",
            argv=tuple(worker_words(call, number, folder, options)),
            gpus=asks.gpus,
            memory_mb=asks.memory_mb if asks.gpus else None,
            share=options.share and asks.gpus == 1 and asks.memory_mb is not None,
            cost=float(len(shard.items)),
            family=call.title,
            heartbeat_s=options.heartbeat or HEARTBEAT_S,
            retries=options.retries,
            result=str(folder.shard_done(number)),
            title=call.title if many == 1 else f"{call.title} {number + 1}/{many}",
            identity=json.dumps([call.identity, number, many]),
        )
        for number, shard in enumerate(shards)
        if shard.items
    ]


def worker_words(call: WorkerCall, number: int, folder: ShardedDirectory, options: ModelOptions) -> list[str]:
    """The argument list of the worker of a shard; it goes through no shell.

    ``-P`` keeps Python from importing modules out of the folder that the user happens to be in.
    """
    shard_options = ShardOptions(
        **{name: getattr(options, name) for name in ModelOptions.__dataclass_fields__},
        model=call.model,
        folder=str(folder.root),
        shard=number,
        batch_size=call.workload.batch,
        prompt_tokens=call.workload.prompt_tokens,
        new_tokens=call.workload.new_tokens,
        simulate=call.simulate,
    )
    return [sys.executable, "-P", "-m", call.module, *words_of(shard_options, ShardOptions), *call.words]


# ---- inside a job


def load(options: ShardOptions, words: Sequence[str], *, reserved: int = 0) -> Loaded:
    """Loads a worker's model as its job was planned. ``reserved``: bytes kept free on each GPU for another model.

    With ``--parallel tensor`` this process becomes torchrun, which starts ``words`` (a module and its arguments) once
    for each GPU; each of those returns with its part of the model. All of them then do the same work, and only the one
    for which ``is_writer`` holds writes.

    Raises what ``load_model`` raises.
    """
    from gpuherd.models.load.tensor_parallel import load_requested

    workload = Workload(options.batch_size, options.prompt_tokens, options.new_tokens)
    progress.report(0, None, "load")
    request = load_request(options.model, options, workload, simulate=options.simulate)
    return load_requested(replace(request, reserve=Reserve().with_fixed(reserved)), words)[0]


def is_writer() -> bool:
    """Whether this process writes the results: it is the only one, or the first of several ranks."""
    return os.environ.get("RANK", "0") == "0"


def run_model_worker(
    module: str,
    description: str,
    work: Callable[[ShardOptions, Sequence[str]], None],
    argv: Sequence[str] | None = None,
) -> int:
    """``run_worker`` for a worker that loads a model by ``load``. Returns the exit code."""

    def work_and_leave(options: ShardOptions, words: Sequence[str]) -> None:
        work(options, words)
        if "RANK" in os.environ:  # ends the connection between the ranks of a model
            from gpuherd.models.load.tensor_parallel import leave

            leave()

    return run_worker(module, description, ShardOptions, work_and_leave, argv)
