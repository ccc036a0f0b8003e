"""What jobs would ask of an engine, and what it or this machine could never give: for those who only want to know
(``--dry-run``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.engines.base import Placement
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import ExitCode
from gpuherd.jobs.attempts.supervise import GRACE_S
from gpuherd.jobs.attempts.time_limits import TimeLimits
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.remote.batches import placement_of
from gpuherd.jobs.run_dir import RunDirectory


def would_ask(job: Job, options: DispatchOptions) -> Placement:
    """What the job asks of the engine at its first attempt."""
    return placement_of(job, job.gpus, options, TimeLimits.of(job, options), GRACE_S)


def never(jobs: Sequence[Job], options: DispatchOptions) -> list[str | None]:
    """For each job why the engine, or this machine, can never run it, None where it can. Nothing is started.

    Raises UsageError, EngineMissing and EngineAway as ``Engine.check``; NoSuchGpu.
    """
    if options.engine == LOCAL:
        return _never_here(jobs, options)
    from gpuherd.jobs.remote.dispatcher import opened

    asked = [would_ask(job, options) for job in jobs]
    with opened(options) as engine:
        reasons = {} if engine is None else engine.check(set(asked))
    return [reasons.get(each) for each in asked]


def _never_here(jobs: Sequence[Job], options: DispatchOptions) -> list[str | None]:
    from gpuherd.engines import host
    from gpuherd.jobs.gpu.watch import GpuWatch
    from gpuherd.jobs.scheduler.limits import as_first_asked, limits
    from gpuherd.jobs.scheduler.policy import why_never
    from gpuherd.jobs.settings import load

    watch = GpuWatch(options, "plan", load()) if any(job.gpus for job in jobs) else None
    if watch is not None and watch.awaits_driver:
        return [None for _ in jobs]  # they wait for the driver, and what it will show is not known
    gpus = () if watch is None else watch.gpus
    most = limits(options, gpus, host.cores(), host_mb=host.memory_mb())
    asked = [as_first_asked(job) for job in jobs]
    reasons = {each: why_never(each, gpus, most) for each in set(asked)}
    return [reasons[each] for each in asked]


@dataclass(frozen=True, slots=True)
class Outlook:
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
        """For people; nothing is to be said of jobs that this machine can run."""
        never = [f"never: {reason}" for reason in self.never]
        if not self.asks:
            return never
        told = [f"{many} x {self.asks[gpus]}" for gpus, many in self.counts.items()]
        where = "" if self.where is None else f", {self.where}"
        return [f"engine: {self.engine}{where}; the jobs would ask for {'; '.join(told)}", *never]

    @property
    def exit_code(self) -> ExitCode:
        """What a dry run ends with: 1 where a job can never be had."""
        return ExitCode.FAILED if self.never else ExitCode.OK

    def to_dict(self) -> dict[str, Any]:
        """For programs: ``engine``, and ``never``."""
        return {"engine": self.engine, "never": list(self.never)}


def of_like(gpus: Sequence[int], options: DispatchOptions, run: RunDirectory | None = None) -> Outlook:
    """The outlook of jobs that get so many GPUs each, and ask for what the options say. As ``of_jobs``."""
    return of_jobs([Job(name=f"on {number} GPUs", argv=("job",), gpus=number) for number in gpus], options, run)


def of_jobs(jobs: Sequence[Job], options: DispatchOptions, run: RunDirectory | None = None) -> Outlook:
    """The outlook of jobs of which those with as many GPUs ask a cluster for the same. Raises as ``never``, and as
    ``opening.settled``, which decides where they would run; ``run``: their folder, if it can be there."""
    from gpuherd.jobs.remote.dispatcher import settled

    options = settled(jobs, options, run) if jobs else options
    counts = Counter(job.gpus for job in jobs)
    like = {job.gpus: job for job in jobs}
    asks = {} if options.engine == LOCAL else {gpus: in_words(would_ask(job, options)) for gpus, job in like.items()}
    reasons = dict.fromkeys(reason for reason in never(jobs, options) if reason is not None) if jobs else ()
    return Outlook(options.engine, options.spec.where(options), counts, asks, tuple(reasons))


def in_words(asked: Placement) -> str:
    """A placement for people.

    >>> in_words(Placement(gpus=4, nodes=2, cpus=8, memory_mb=65536, time_s=5400))
    '4 GPUs, 8 cores, 64 GB, 90 min on each of 2 nodes'
    >>> in_words(Placement(gpus=0))
    'no GPU'
    """
    words = ["no GPU" if asked.gpus == 0 else "1 GPU" if asked.gpus == 1 else f"{asked.gpus} GPUs"]
    if asked.cpus is not None:
        words.append("1 core" if asked.cpus == 1 else f"{asked.cpus} cores")
    if asked.memory_mb is not None:
        words.append(f"{asked.memory_mb / 1024:g} GB")
    if asked.time_s is not None:
        words.append(f"{asked.time_s / 60:.0f} min")
    return ", ".join(words) + (f" on each of {asked.nodes} nodes" if asked.nodes > 1 else "")
