"""How much this machine can run at once for a set of jobs, and whether it can run any of them: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpuherd.errors import JobCannotFit
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.failures import clean
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.policy import Limits, WaitingJob, why_never


def limits(
    options: DispatchOptions,
    gpus: Sequence[Gpu] | None,
    cores: int,
    ever: int | None = None,
    host_mb: int | None = None,
) -> Limits:
    """The limits of a run. ``gpus`` is None when no job asks for a GPU, and empty when there are none to give.

    ``ever``: the most GPUs that the settings ever let the user hold (``allowance.most_ever``), None for no limit.
    ``host_mb``: main memory in MB, None where it is not known.
    """
    return Limits(
        options.max_gpus or len(gpus or ()),
        most_ever=ever,
        cpu_slots=options.cpu_jobs or max(1, cores // 2),
        cpu_only=gpus is not None and not gpus,
        max_concurrent=options.max_concurrent,
        longest_first=options.order == "longest",
        host_memory_mb=host_mb,
    )


def as_first_asked(job: Job) -> WaitingJob:
    """The job as it is before anything was learned of it."""
    return WaitingJob(0, job.gpus, job.memory_mb, nodes=job.nodes, host_memory_mb=job.host_memory_mb)


def refuse_if_none_fits(jobs: Sequence[Job], gpus: Sequence[Gpu], limits: Limits) -> None:
    """Raises JobCannotFit, with the first job's reason, when not one of the jobs could ever run here."""
    first_of_kind = {as_first_asked(job): job for job in reversed(jobs)}
    reasons = {job.name: why_never(asked, gpus, limits) for asked, job in first_of_kind.items()}
    if jobs and None not in reasons.values():
        raise JobCannotFit(f"job {clean(jobs[0].title or jobs[0].name)} {reasons[jobs[0].name]}")


def most_at_once(sizes: Collection[int], jobs: int, gpus: Sequence[Gpu], limits: Limits) -> int:
    """How many jobs can run side by side, at least 1: what the machine's cores are divided by.

    ``sizes``: for how many GPUs the jobs ask, each number once; ``jobs``: how many there are.
    """
    on_gpus = [size for size in sizes if size and not limits.cpu_only]
    places = min(limits.max_gpus, len(gpus)) // min(on_gpus) if on_gpus else 0
    if len(on_gpus) < len(sizes):
        places += limits.cpu_slots
    if limits.max_concurrent is not None:
        places = min(places, limits.max_concurrent)
    return max(1, min(places, jobs))
