"""What of a job's wishes can be known at once to come to nothing, before it is put into a queue.

A look at the GPUs costs more than all the rest of ``gpuherd submit``. What the dispatcher at work tells of its GPUs
costs nothing, and it is the one that would refuse the job. Where nobody is at work, or nothing is told of GPUs yet, the
job is taken, and a dispatcher refuses it later; only a dry run looks for itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.jobs.job import Job
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.run_dir import RunDirectory

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu
    from gpuherd.jobs.dispatcher_state import GpuState

_TOLD_WITHIN_S = 1.2


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """GPUs that jobs may have, and how many of them a run takes at most."""

    gpus: tuple[Gpu, ...]
    max_gpus: int


def refuse_missing_folder(job: Job) -> None:
    """Raises UsageError when the job's folder is not there and no job that it needs can make it."""
    if job.cwd is not None and not job.needs and not Path(job.cwd).is_dir():
        raise UsageError(f"there is no folder {job.cwd}; make it, or name another by --cwd")


def refuse_beyond_this_machine(nodes: int, host_memory_mb: int | None, what: str = "the job") -> None:
    """Raises JobCannotFit for what spans several nodes, or asks for more main memory than there is here."""
    if nodes == 1 and host_memory_mb is None:
        return
    from gpuherd.engines import host
    from gpuherd.jobs.scheduler.types import Limits, WaitingJob, why_never

    asked = WaitingJob(0, 0, nodes=nodes, host_memory_mb=host_memory_mb)
    reason = why_never(asked, (), Limits(1, cpu_slots=1, host_memory_mb=host.memory_mb()))
    if reason is not None:
        raise JobCannotFit(f"{what} {reason}; nothing was started")


def refuse_if_never(job: Job, machine: KnownMachine | None) -> None:
    """Raises JobCannotFit, with the reason, when the job could never run there; None is for what is not known."""
    reason = None if machine is None else _why_never(job, machine)
    if reason is not None:
        raise JobCannotFit(f"the job {reason}; nothing was submitted")


def refuse_if_dispatcher_would(job: Job, run: RunDirectory) -> None:
    """Raises JobCannotFit, with the reason, when the dispatcher that works the queue off would never start the job."""
    if not _could_be_too_much(job):
        return
    told = dispatchers_machine(run)
    if told is None or _why_never(job, told) is None:
        return
    # It tells what has changed (gpuherd set) a second later at most. Who is to be refused can wait so long.
    time.sleep(_TOLD_WITHIN_S)
    refuse_if_never(job, dispatchers_machine(run))


def _could_be_too_much(job: Job) -> bool:
    return job.gpus > 1 or (job.gpus == 1 and job.memory_mb is not None)


def _why_never(job: Job, machine: KnownMachine) -> str | None:
    if not _could_be_too_much(job):
        return None
    from gpuherd.jobs.scheduler.limits import as_first_asked
    from gpuherd.jobs.scheduler.types import Limits, why_never

    return why_never(as_first_asked(job), machine.gpus, Limits(machine.max_gpus, cpu_slots=1))


def dispatchers_machine(run: RunDirectory) -> KnownMachine | None:
    """The GPUs of the dispatcher that works the queue off, as it last told them; None when that is not known."""
    pid = DispatcherLock.holder(run.lock)
    if pid is None:
        return None
    from gpuherd.jobs import dispatcher_state

    told = dispatcher_state.read(run.state_file, pid)
    if told is None or not told.gpus or any(gpu.total_mb is None for gpu in told.gpus):
        return None
    most = told.settings.get("max_gpus")
    return KnownMachine(_gpus(told.gpus), most if isinstance(most, int) else len(told.gpus))


def look_at_machine() -> KnownMachine | None:
    """The GPUs of this machine, by a look at them; None where there are none, or the driver can't read one."""
    from gpuherd.gpus.driver import machine

    gpus = machine(processes=False).gpus
    if not gpus or any(gpu.problem is not None and not gpu.mig_instances for gpu in gpus):
        return None
    return KnownMachine(gpus, len(gpus))


def _gpus(told: Sequence[GpuState]) -> tuple[Gpu, ...]:
    from gpuherd.gpus.state import Gpu

    labels = [gpu.label for gpu in told]
    return tuple(
        Gpu(
            index=0,
            uuid=gpu.uuid,
            name=gpu.label,
            total_mb=gpu.total_mb or 0,
            used_mb=0,
            free_mb=0,
            mig_parent=gpu.label.partition(":")[0] if ":" in gpu.label else None,
        )
        for gpu in told
        # A GPU that is split into instances runs no job itself.
        if not any(label.startswith(f"{gpu.label}:") for label in labels)
    )
