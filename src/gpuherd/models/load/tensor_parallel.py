"""One model over several GPUs that all work at once: each layer is divided, by transformers' own tensor parallelism.

Unlike layers one after the other this is faster with more GPUs, and it takes a process a GPU. ``relaunch`` turns one
into torchrun, which starts those on this machine, on a free port, and ends them all when one dies; in each of them
``load_tensor_parallel`` loads that rank's part. What can't be divided is refused before any of this, without torch. On
GPUs the processes talk by NCCL, without CUDA by gloo.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from gpuherd.engines import host, progress
from gpuherd.errors import UsageError, naming_extras
from gpuherd.gpus.visible import ORDER, PCI_ORDER, narrowed
from gpuherd.gpus.visible import environment as visible_environment
from gpuherd.models.describe.description import Architecture
from gpuherd.models.load import loading
from gpuherd.models.load.loading import Loaded, LoadedTensor, OnDevice
from gpuherd.models.load.options import CPU, LoadRequest
from gpuherd.models.load.placement import all_on
from gpuherd.models.load.prepare import ModelDoesNotFit, Placed, PreparedModel, ThisMachine, prepare, requested_gpus
from gpuherd.models.load.pretrained import EXTRAS, check_torch, load_weights
from gpuherd.models.memory.usage import CostTable, Usage
from gpuherd.models.memory.weights import Precision
from gpuherd.models.names import quoted
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.planner import make_plan
from gpuherd.models.place.result import AnswerRefusal, MemoryPlan

# Large enough for any model.
_ROOMY = GpuSpec("0", "", 1 << 56, 1 << 56)


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """One of the processes that hold a model together: its number, on this machine and in all, and of how many."""

    number: int
    local: int
    ways: int


def this_rank(environment: Mapping[str, str]) -> TensorParallelRank | None:
    """The rank of a process with this environment, None for one that torchrun did not start."""
    try:
        return TensorParallelRank(
            int(environment["RANK"]), int(environment["LOCAL_RANK"]), int(environment["WORLD_SIZE"])
        )
    except (KeyError, ValueError):
        return None


def plan_tensor_parallel(request: LoadRequest) -> MemoryPlan:
    """The plan of a model whose layers are divided over the GPUs that are free here (``request.gpus``).

    Raises:
        UsageError: there are no GPUs, or an adapter or offloading is asked for.
        ModelDoesNotFit: it has no room, or can't be divided: its heads by this number, its layers by transformers, its
            weights because they are quantised. The message has the figures, and what would fit.
        MissingModel, BadModel: as ``load_model``.
    """
    return _prepared(request, _gpus(request))[1]


def command(ways: int, words: Sequence[str]) -> list[str]:
    """The argument list that runs a module and its words (``["package.module", "--flag"]``) once a rank."""
    run = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ways}", "--max-restarts=0"]
    return [sys.executable, "-P", "-m", *run, "-m", *words]


def environment_for(
    plan: MemoryPlan, environment: Mapping[str, str], cores: int, *, pretend: bool = False
) -> dict[str, str]:
    """The environment of the ranks: the plan's GPUs, where they are really there, and a share of the cores each.

    ``pretend``: no GPU is shown, so that the ranks compute on the CPU.
    """
    found = dict(environment)
    uuids = [load.gpu.uuid for load in plan.loads]
    if pretend:
        found |= visible_environment(())
    elif all(uuid is not None for uuid in uuids):
        found = {**narrowed(found, [uuid or "" for uuid in uuids]), ORDER: PCI_ORDER}
    found["OMP_NUM_THREADS"] = str(max(1, cores // plan.gpus))
    return found


def relaunch(request: LoadRequest, words: Sequence[str]) -> None:
    """Becomes torchrun, which runs these words (a module and its arguments) once a rank; their exit code is ours.

    Returns only where one GPU is all that there is, so that there is nothing to divide. Raises what
    ``plan_tensor_parallel`` raises, before anything is started.
    """
    with naming_extras(EXTRAS, "loading models takes"):
        import torch.distributed
    plan = plan_tensor_parallel(request)
    if plan.gpus < 2:
        return
    there = torch.cuda.device_count()
    if not request.simulate and any(load.gpu.uuid is not None for load in plan.loads):
        check_torch(there)
    if 0 < there < plan.gpus and not request.simulate:
        raise UsageError(f"{plan.gpus} GPUs are planned, and torch sees {there}; pretend all of them with --simulate")
    environment = environment_for(plan, os.environ, host.cores(), pretend=request.simulate)
    _become(command(plan.gpus, words), environment)


def _become(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], list(argv), dict(environment))  # noqa: S606 - no shell


def load_tensor_parallel(request: LoadRequest, rank: TensorParallelRank | None = None) -> tuple[Loaded, Usage]:
    """This rank's part of a model, checked; and what the plan expects on its GPU, the reserve for a GPU's size not
    counted. All ranks must call it.

    Raises:
        UsageError: this process is no rank: start it with ``relaunch``, or under torchrun.
        ModelDoesNotFit: the model can't be divided so.
        WrongPlacement: a tensor is on another device, in another dtype, or not as large as planned.
    """
    rank = this_rank(os.environ) if rank is None else rank
    if rank is None:
        raise UsageError("tensor parallelism takes a process a GPU: start this under torchrun --nproc-per-node N")
    started = time.monotonic()
    # Whether there is room was decided before the ranks were started: by now they take it from each other.
    ready, plan = _prepared(request, [_ROOMY] * rank.ways)
    ways = plan.gpus
    if ways != rank.ways:
        raise ModelDoesNotFit(f"{request.model} can be divided over {ways} GPUs, and {rank.ways} ranks were started")
    with naming_extras(EXTRAS, "loading models takes"):
        import torch
        from transformers.distributed import DistributedConfig
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank.local)
    before = torch.cuda.memory_allocated(rank.local) if cuda else 0
    model, ready = load_weights(ready, divided=DistributedConfig(tp_size=rank.ways))
    device = f"cuda:{rank.local}" if cuda else "cpu"
    tensors = loading.tensors_of(model, divided=True)
    costs = CostTable(ready.base, ready.precision, request.workload, request.reserve, ways=rank.ways)
    whole = (0, len(ready.base.blocks))
    weights, state = costs.weights(*whole)
    usage = costs.usage(*whole, GpuSpec(str(rank.local), "", 0, 0))
    here = OnDevice(
        device=rank.local if cuda else "cpu",
        blocks=f"part {rank.number + 1} of {rank.ways} of every layer",
        predicted=weights + state,
        real=sum({each.storage: each.nbytes for each in tensors if not each.buffer}.values()),
        cuda=torch.cuda.memory_allocated(rank.local) - before if cuda else None,
        planned=usage.total,
    )
    _check_as_planned(ready, tensors, device, here)
    report = loading.load_report(
        ready,
        model,
        tensors,
        [here],
        device_map={block.name: here.device for block in ready.base.blocks},
        input_device=device,
        simulated=not cuda,
        started=started,
    )
    return Loaded(model, report, ready.folder, ready.tokenizer_folder, request.trust_remote_code), usage


def load_requested(request: LoadRequest, words: Sequence[str]) -> tuple[Loaded, dict[int, Usage]]:
    """The model in this process, and what the plan expects on each GPU; with ``parallel`` ``tensor`` a part of it in
    each of the ranks that this process becomes, which run ``words`` (a module and its arguments).

    Raises as ``load_model``.
    """
    if request.parallel == "tensor":
        rank = this_rank(os.environ)
        if rank is not None:
            progress.report(0, None, "load")
            loaded, usage = load_tensor_parallel(request, rank)
            return loaded, {rank.local: usage}
        relaunch(request, words)
        request = replace(request, parallel=None)  # one GPU is all that there is
    ready = prepare(request)
    progress.report(0, None, "load")
    return loading.load_prepared(ready), {gpu: load.usage for gpu, load in (ready.placement.loads or {}).items()}


def leave() -> None:
    """Ends the connection between the ranks; to be called when all is computed, in each of them."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# ---- before ----------------------------------------------------------------------------------------------------------


def _prepared(request: LoadRequest, gpus: Sequence[GpuSpec]) -> tuple[PreparedModel, MemoryPlan]:
    """Names, headers, precision and refusals as for any loading, and how it is divided over the GPUs."""
    if request.adapter is not None or request.allow_offload is not None:
        raise UsageError("with --parallel tensor a model is loaded whole and alone: no adapter, no offloading")
    if request.plan is not None or request.device_map is not None:
        raise UsageError("with --parallel tensor transformers lays out every layer: no plan of layers, no device map")
    plans: list[MemoryPlan] = []

    def divided(_: LoadRequest, architecture: Architecture, precision: Precision, __: ThisMachine) -> Placed:
        result = make_plan(architecture, gpus, precision, request.workload, request.reserve, parallel="tensor")
        if isinstance(result, AnswerRefusal):
            raise ModelDoesNotFit(result.reason, result)
        plans.append(result)
        # Which device is not chosen here: transformers gives each rank its part of every block.
        return all_on(architecture, CPU), (), result.warnings

    ready = prepare(replace(request, parallel=None), divided)
    if ready.adapter is not None:
        raise UsageError(f"{quoted(request.model)} is an adapter: merge it into its base first, with 'gpuherd merge'")
    return ready, plans[-1]


def _gpus(request: LoadRequest) -> tuple[GpuSpec, ...]:
    """The GPUs that may be taken. Raises UsageError where there are none."""
    now = requested_gpus(request)
    if not now.gpus and request.gpus == "auto":
        why = now.problem or "; ".join(now.left_out)
        raise UsageError(f"no GPU to divide the layers over: {why}; pretend some with --gpus 2x40GB")
    return now.gpus


# ---- after -----------------------------------------------------------------------------------------------------------


def _check_as_planned(ready: PreparedModel, tensors: Sequence[LoadedTensor], device: str, here: OnDevice) -> None:
    """Raises WrongPlacement where this rank's part is not what was planned."""
    problems = [f"{each.name} is on {each.device}" for each in tensors if each.device != device]
    problems += loading.wrong_dtypes(ready, tensors)
    if not here.within:
        problems.append(f"its tensors take {here.real} bytes here, and {here.predicted} were predicted")
    loading.refuse_placement(ready, problems)
