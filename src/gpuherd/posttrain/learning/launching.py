"""Which processes a training takes, and the command that starts them. Pure but for the look at the port."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.engines.registry import LOCAL, names
from gpuherd.errors import UsageError
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import environment as visible_environment
from gpuherd.gpus.visible import without
from gpuherd.posttrain.learning.checking import check
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.worker import MODULE, STARTER

_QUIET = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
_LONGEST_GRACE_S = 3600


@dataclass(frozen=True, slots=True)
class Where:
    """What the command line says of it; None is what it didn't say.

    Attributes:
        device: cpu or cuda.
    """

    num_gpus: int | None = None
    gpu_ids: tuple[int, ...] | None = None
    device: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of this machine, among all.

    Attributes:
        here: how many.
        size: on all machines.
        on_cpu: they take no GPUs.
        gpu_ids: which GPUs; None: any that are free.
    """

    here: int
    size: int
    on_cpu: bool
    gpu_ids: tuple[int, ...] | None


def placed(config: TrainConfig, where: Where, engine: str = LOCAL) -> TrainConfig:
    """The configuration with what the command line says of GPUs over it, checked.

    ``--gpu-ids`` and ``--num-gpus`` stand above both keys of the file, and ``enabled`` follows them.

    Args:
        engine: what starts the machines. Only where that is the user, one by one, they must be told of each other.

    Raises UsageError.
    """
    told = config.distributed
    if engine != LOCAL:
        for flag in ("gpu_ids", "node_rank", "master_addr", "master_port"):
            if getattr(where, flag) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} is for machines that you start yourself; --engine {engine} chooses "
                    "that: leave it out"
                )
        # What a file says of machines that its user starts is none of a cluster's.
        told = replace(told, num_gpus=told.gpu_count, gpu_ids=None, node_rank=0, master_port=None)
    if where.num_gpus is not None and where.gpu_ids is not None and where.num_gpus != len(where.gpu_ids):
        raise UsageError(f"--num-gpus {where.num_gpus}, and --gpu-ids names {len(where.gpu_ids)}; leave one out")
    if where.num_gpus is not None or where.gpu_ids is not None:
        told = replace(told, num_gpus=where.num_gpus, gpu_ids=where.gpu_ids, enabled=None)
    if where.nnodes is not None:
        told = replace(told, num_nodes=where.nnodes)
    if where.node_rank is not None:
        told = replace(told, node_rank=where.node_rank)
    if where.master_addr is not None:
        told = replace(told, master_addr=where.master_addr)
    if where.master_port is not None:
        told = replace(told, master_port=where.master_port)
    model = config.model if where.device is None else replace(config.model, device=where.device)
    found = replace(config, distributed=told, model=model)
    check(found)
    if engine == LOCAL and told.num_nodes > 1 and told.master_port is None:
        raise UsageError(
            "distributed.master_port is missing: with several nodes all must know it (a cluster's engine, --engine "
            f"{' or --engine '.join(names()[1:])}, starts them all, and then it isn't needed)"
        )
    return found


def processes_of(config: TrainConfig) -> Processes:
    """How many processes, and on what."""
    told = config.distributed
    here = told.gpu_count
    return Processes(here, here * told.num_nodes, config.on_cpu, None if config.on_cpu else told.gpu_ids)


def command(processes: Processes, config: TrainConfig, folder: Path, *, on_cpu: bool, engine: str = LOCAL) -> list[str]:
    """The words that start the training: Python alone, or torchrun (``torch.distributed.run``).

    On one machine torchrun finds a free port itself, unless one is said. On several of a cluster it reads its place
    among them from the environment that each is given.
    """
    told = config.distributed
    words = ["-m", MODULE, "--output", str(folder), "--resume"]
    words += ["--device", "cpu" if on_cpu else "cuda"]
    if processes.size == 1:
        return [sys.executable, *words]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes.here}"]
    if told.num_nodes == 1 and told.master_port is None:
        launcher += ["--standalone"]
    elif engine != LOCAL:
        return [*launcher, *words]
    else:
        address = "127.0.0.1" if told.num_nodes == 1 else told.master_addr
        launcher += [f"--nnodes={told.num_nodes}", f"--node-rank={told.node_rank}"]
        launcher += [f"--master-addr={address}", f"--master-port={told.master_port}"]
    return [*launcher, *words]


def of_a_job() -> dict[str, str]:
    """What the processes of a job find in their environment besides what the engine says."""
    # The leader of the job says how long a checkpoint may take, and not torchrun.
    return {**_QUIET, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_LONGEST_GRACE_S)}


def environment(
    inherited: Mapping[str, str], gpus: Sequence[Gpu] | None, starter: int, processes: Processes
) -> dict[str, str]:
    """The environment of the processes.

    Args:
        gpus: those that they see, () for none; None: as inherited.
        starter: the pid that waits for them.
    """
    shown = inherited if gpus is None else without(inherited) | visible_environment(gpus)
    found = {**shown, **_QUIET, STARTER: str(starter)}
    if processes.here > 1:
        # As torchrun sets it too, but with a warning.
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


def check_port(config: TrainConfig) -> None:
    """Raises UsageError where the port that this machine is to listen at is in use."""
    told = config.distributed
    if told.master_port is None or told.node_rank != 0 or told.gpu_count * told.num_nodes == 1:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", told.master_port))
        except OSError as problem:
            hint = "" if told.num_nodes > 1 else ", or leave it out: a free one is found"
            raise UsageError(
                f"distributed.master_port={told.master_port} can't be listened at ({problem.strerror}); choose "
                f"another{hint}"
            ) from None
