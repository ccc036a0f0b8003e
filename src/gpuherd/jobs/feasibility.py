"""Whether jobs can ever run, before they start: for dry runs, and for ``gpuherd submit`` before a job enters a queue.

A query of the GPUs costs more than all the rest of ``gpuherd submit``. The state file of the queue's dispatcher costs
nothing, and that dispatcher would refuse the job. Without a dispatcher, or before it has seen its GPUs, ``submit``
takes the job, and a dispatcher refuses it later; only a dry run queries the GPUs itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.engines.base import Placement
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import ExitCode, JobCannotFit, UsageError
from gpuherd.jobs.job import Job
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.run_dir import RunDirectory

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu
    from gpuherd.jobs.dispatcher_state import GpuState
    from gpuherd.jobs.options import DispatchOptions

# A dispatcher writes its state once a second at least.
STATE_WITHIN_S = 1.2


def would_ask(job: Job, options: DispatchOptions) -> Placement:
    """What the job requests from the engine at its first attempt."""
    from gpuherd.jobs.attempts import GRACE_S
    from gpuherd.jobs.remote.submit import placement_of

    return placement_of(job, job.gpus, options, GRACE_S)


def never(jobs: Sequence[Job], options: DispatchOptions) -> list[str | None]:
    """For each job why the engine, or this machine, can never run it; None if it can. Nothing is started.

    Raises UsageError, EngineMissing and EngineAway as ``Engine.check``; NoSuchGpu.
    """
    if options.engine == LOCAL:
        return _never_here(jobs, options)
    from gpuherd.jobs.remote.dispatcher import opened

    requests = [would_ask(job, options) for job in jobs]
    with opened(options) as engine:
        reasons = {} if engine is None else engine.check(set(requests))
    return [reasons.get(each) for each in requests]


def _never_here(jobs: Sequence[Job], options: DispatchOptions) -> list[str | None]:
    from gpuherd.engines import host
    from gpuherd.jobs.gpu.watch import GpuWatch
    from gpuherd.jobs.scheduler.limits import as_declared, limits
    from gpuherd.jobs.scheduler.types import why_never
    from gpuherd.jobs.settings import load

    watch = GpuWatch(options, "plan", load()) if any(job.gpus for job in jobs) else None
    if watch is not None and watch.awaits_driver:
        return [None for _ in jobs]  # they wait for the driver, and what it will show is not known
    gpus = () if watch is None else watch.gpus
    most = limits(options, gpus, host.cores(), host_mb=host.memory_mb())
    requests = [as_declared(job) for job in jobs]
    reasons = {each: why_never(each, gpus, most) for each in set(requests)}
    return [reasons[each] for each in requests]


@dataclass(frozen=True, slots=True)
class Feasibility:
    """What becomes of jobs with the engine that options name.

    Attributes:
        engine: its name.
        where: where the jobs would run there ("partition gpu"), None for wherever it sends them.
        counts: how many jobs there are, by how many GPUs each gets on a node.
        asks: what each of those asks for, in words; nothing for jobs of this machine.
        never: why some can never be had, in sentences, each once; () where all can.
    """

    engine: str
    where: str | None
    counts: Mapping[int, int]
    asks: Mapping[int, str]
    never: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """For people; empty for jobs that this machine can run."""
        never = [f"never: {reason}" for reason in self.never]
        if not self.asks:
            return never
        requests = [f"{many} x {self.asks[gpus]}" for gpus, many in self.counts.items()]
        where = "" if self.where is None else f", {self.where}"
        return [f"engine: {self.engine}{where}; the jobs would ask for {'; '.join(requests)}", *never]

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a dry run: 1 if a job can never run."""
        return ExitCode.FAILED if self.never else ExitCode.OK

    def to_dict(self) -> dict[str, Any]:
        """For programs: ``engine``, and ``never``."""
        return {"engine": self.engine, "never": list(self.never)}


def of_like(gpus: Sequence[int], options: DispatchOptions, run: RunDirectory | None = None) -> Feasibility:
    """As ``of_jobs``, for one job with each of these numbers of GPUs."""
    return of_jobs([Job(name=f"on {number} GPUs", argv=("job",), gpus=number) for number in gpus], options, run)


def of_jobs(jobs: Sequence[Job], options: DispatchOptions, run: RunDirectory | None = None) -> Feasibility:
    """The outlook of these jobs; those with the same number of GPUs request the same from a cluster.

    ``run``: their run folder, if there may be one. Raises as ``never``, and as ``settled`` (jobs.remote.dispatcher),
    which decides where they would run.
    """
    from gpuherd.jobs.remote.dispatcher import settled

    options = settled(jobs, options, run) if jobs else options
    counts = Counter(job.gpus for job in jobs)
    like = {job.gpus: job for job in jobs}
    asks = {} if options.engine == LOCAL else {gpus: in_words(would_ask(job, options)) for gpus, job in like.items()}
    reasons = dict.fromkeys(reason for reason in never(jobs, options) if reason is not None) if jobs else ()
    return Feasibility(options.engine, options.spec.where(options), counts, asks, tuple(reasons))


def in_words(request: Placement) -> str:
    """A placement for people.

    >>> in_words(Placement(gpus=4, nodes=2, cpus=8, memory_mb=65536, time_s=5400))
    '4 GPUs, 8 cores, 64 GB, 90 min on each of 2 nodes'
    >>> in_words(Placement(gpus=0))
    'no GPU'
    """
    words = ["no GPU" if request.gpus == 0 else "1 GPU" if request.gpus == 1 else f"{request.gpus} GPUs"]
    if request.cpus is not None:
        words.append("1 core" if request.cpus == 1 else f"{request.cpus} cores")
    if request.memory_mb is not None:
        words.append(f"{request.memory_mb / 1024:g} GB")
    if request.time_s is not None:
        words.append(f"{request.time_s / 60:.0f} min")
    return ", ".join(words) + (f" on each of {request.nodes} nodes" if request.nodes > 1 else "")


# --- before a job enters a queue --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownMachine:
    """GPUs that jobs may get, and how many of them a run takes at most."""

    gpus: tuple[Gpu, ...]
    max_gpus: int


def refuse_missing_folder(job: Job) -> None:
    """Raises UsageError when the job's folder doesn't exist and no job that it needs can make it."""
    if job.cwd is not None and not job.needs and not Path(job.cwd).is_dir():
        raise UsageError(f"there is no folder {job.cwd}; make it, or name another by --cwd")


def refuse_beyond_this_machine(nodes: int, host_memory_mb: int | None, what: str = "the job") -> None:
    """Raises JobCannotFit for several nodes, or more main memory than this machine has."""
    if nodes == 1 and host_memory_mb is None:
        return
    from gpuherd.engines import host
    from gpuherd.jobs.scheduler.types import Limits, WaitingJob, why_never

    request = WaitingJob(0, 0, nodes=nodes, host_memory_mb=host_memory_mb)
    reason = why_never(request, (), Limits(1, cpu_slots=1, host_memory_mb=host.memory_mb()))
    if reason is not None:
        raise JobCannotFit(f"{what} {reason}; nothing was started")


def refuse_if_never(job: Job, machine: KnownMachine | None) -> None:
    """Raises JobCannotFit, with the reason, when the job could never run there; None for an unknown machine."""
    reason = None if machine is None else _why_never(job, machine)
    if reason is not None:
        raise JobCannotFit(f"the job {reason}; nothing was submitted")


def refuse_if_dispatcher_would(job: Job, run: RunDirectory) -> None:
    """Raises JobCannotFit, with the reason, when the queue's dispatcher would never start the job."""
    if not _could_be_too_much(job):
        return
    machine = dispatchers_machine(run)
    if machine is None or _why_never(job, machine) is None:
        return
    # The dispatcher writes changes (gpuherd set) within a second: only a job about to be refused waits for that.
    time.sleep(STATE_WITHIN_S)
    refuse_if_never(job, dispatchers_machine(run))


def _could_be_too_much(job: Job) -> bool:
    return job.gpus > 1 or (job.gpus == 1 and job.memory_mb is not None)


def _why_never(job: Job, machine: KnownMachine) -> str | None:
    if not _could_be_too_much(job):
        return None
    from gpuherd.jobs.scheduler.limits import as_declared
    from gpuherd.jobs.scheduler.types import Limits, why_never

    return why_never(as_declared(job), machine.gpus, Limits(machine.max_gpus, cpu_slots=1))


def dispatchers_machine(run: RunDirectory) -> KnownMachine | None:
    """The GPUs of the queue's dispatcher, as in its last state file; None if there is none, or it has no GPUs yet."""
    pid = DispatcherLock.holder(run.lock)
    if pid is None:
        return None
    from gpuherd.jobs import dispatcher_state

    state = dispatcher_state.read(run.state_file, pid)
    if state is None or not state.gpus or any(gpu.total_mb is None for gpu in state.gpus):
        return None
    most = state.settings.get("max_gpus")
    return KnownMachine(_gpus(state.gpus), most if isinstance(most, int) else len(state.gpus))


def look_at_machine() -> KnownMachine | None:
    """The GPUs of this machine, by a query of the driver; None if there are none, or the driver can't read one."""
    from gpuherd.gpus.query import machine

    gpus = machine(processes=False).gpus
    if not gpus or any(gpu.problem is not None and not gpu.mig_instances for gpu in gpus):
        return None
    return KnownMachine(gpus, len(gpus))


def _gpus(states: Sequence[GpuState]) -> tuple[Gpu, ...]:
    from gpuherd.gpus.state import Gpu

    labels = [gpu.label for gpu in states]
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
        for gpu in states
        # A GPU that is split into instances runs no job itself.
        if not any(label.startswith(f"{gpu.label}:") for label in labels)
    )
