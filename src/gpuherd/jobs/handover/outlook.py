"""What jobs would ask of an engine, and what it could never give: for those who only want to know (``--dry-run``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuherd.engines.cluster import Placement
from gpuherd.engines.options import LOCAL
from gpuherd.jobs.handover.decision import placement_of
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.supervisor import GRACE_S
from gpuherd.jobs.timelimits import Limits as TimeLimits


def would_ask(job: Job, options: DispatchOptions) -> Placement:
    """What the job asks of the engine at its first attempt."""
    return placement_of(job, job.gpus, options, TimeLimits.of(job, options), GRACE_S)


def never(jobs: Sequence[Job], options: DispatchOptions) -> list[str | None]:
    """For each job why the engine can never run it, None where it can. Nothing is handed over.

    Raises UsageError, EngineMissing and EngineAway as ``Engine.check``.
    """
    from gpuherd.jobs.handover.opening import opened

    asked = [would_ask(job, options) for job in jobs]
    with opened(options) as engine:
        reasons = {} if engine is None else engine.check(set(asked))
    return [reasons.get(each) for each in asked]


def lines(gpus: Sequence[int], options: DispatchOptions) -> list[str]:
    """For people: where jobs on so many GPUs each would go, what they would ask for, and what can never be; nothing is
    to be said of jobs of this machine. Raises as ``never``.
    """
    if options.engine == LOCAL or not gpus:
        return []
    counts = Counter(gpus)
    jobs = [Job(name=f"on {number} GPUs", argv=("job",), gpus=number) for number in counts]
    told = [f"{many} x {in_words(would_ask(job, options))}" for job, many in zip(jobs, counts.values(), strict=True)]
    partition = f", partition {options.partition}" if options.partition is not None else ""
    refused = [f"never: {reason}" for reason in never(jobs, options) if reason is not None]
    return [f"engine: {options.engine}{partition}; the jobs would ask for {'; '.join(told)}", *refused]


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
