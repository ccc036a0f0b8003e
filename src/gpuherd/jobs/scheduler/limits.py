"""How many GPUs this user may hold now, and how many jobs this machine can run at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpuherd.errors import JobCannotFit, clean
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import settings as quiet_hours
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.scheduler.types import Limits, WaitingJob, why_never
from gpuherd.jobs.settings import Hours, Settings

# How many GPUs this user may hold at some moment: the smallest of the user's own limit, the machine's limit for the
# user, in quiet hours what those leave, and none when the user has used up the GPU-hours of a week. Limits count all
# GPUs that the user's gpuherds hold on this machine, so that two runs share one limit. A job that runs when quiet hours
# begin runs to its end; no job starts above the limit.

# GPU-hours of a week are a sum that fades with this time constant: a user who holds a constant number of GPUs for long
# has the sum of one week. So it takes no list of past uses, and never falls in steps.
WEEK_S = 7 * 86400.0
WEEK_HALF_LIFE_S = WEEK_S * math.log(2)


@dataclass(frozen=True, slots=True)
class Allowance:
    """The GPUs that this run may hold now.

    Attributes:
        max_gpus: the most GPUs at once for this run; None for no limit.
        excluded: GPUs that the machine's policy keeps for others: indices, labels or UUIDs.
        sentence: why ``max_gpus`` is what it is; None without a limit.
        changes_at: seconds since 1970 when quiet hours next begin or end, or the GPU-hours of a week may be below their
            limit again; None without any.
    """

    max_gpus: int | None = None
    excluded: tuple[str, ...] = ()
    sentence: str | None = None
    changes_at: float | None = None

    @property
    def closed(self) -> str | None:
        """Why no job may start on a GPU now, as a sentence; None when one may."""
        return self.sentence if self.max_gpus == 0 else None


def allowance(
    settings: Settings, user: str, local: datetime, held_elsewhere: int = 0, used_week_s: float = 0.0
) -> Allowance:
    """The allowance of this run.

    Args:
        user: the user's name by the system, never by the environment.
        local: local time, without a time zone.
        held_elsewhere: GPUs that other gpuherds of the same user hold on this machine.
        used_week_s: GPU-seconds that the user has used, faded by ``WEEK_HALF_LIFE_S``.
    """
    every = (*settings.hours.quiet, *settings.policy.hours.quiet)
    below_at = week_below_at(settings, user, local, used_week_s)
    changes = (quiet_hours.next_change(every, local), below_at if below_at != local else None)
    change = min((at for at in changes if at is not None), default=None)
    least: tuple[int, str] | None = None
    limits_now = list(_limits(settings, user, local))
    if below_at is not None:
        limits_now.append((0, _week(settings.policy.week_hours(user) or 0.0, user, local, below_at, used_week_s)))
    for most, why in limits_now:
        left = max(0, most - held_elsewhere)
        if least is None or left < least[0]:
            elsewhere = f"; {held_elsewhere} are held by your other runs" if held_elsewhere else ""
            least = (left, why + elsewhere)
    return Allowance(
        max_gpus=None if least is None else least[0],
        excluded=settings.policy.exclude_gpus,
        sentence=None if least is None else least[1],
        changes_at=None if change is None else change.timestamp(),
    )


def most_ever(settings: Settings, user: str) -> int | None:
    """The most GPUs that the user may ever hold: a job that requests more can never start."""
    known = [most for most in (settings.max_gpus, settings.policy.max_gpus(user)) if most is not None]
    return min(known, default=None)


def _limits(settings: Settings, user: str, local: datetime) -> Iterator[tuple[int, str]]:
    """Each limit that applies now, with its sentence."""
    if settings.max_gpus is not None:
        yield settings.max_gpus, f"at most {_gpus(settings.max_gpus)} by your own settings"
    machine = settings.policy.max_gpus(user)
    if machine is not None:
        yield machine, f"at most {_gpus(machine)} for {user} by this machine's policy"
    for hours, whose in ((settings.policy.hours, "this machine's"), (settings.hours, "your")):
        quiet = _quiet(hours, whose, local)
        if quiet is not None:
            yield quiet


def _quiet(hours: Hours, whose: str, local: datetime) -> tuple[int, str] | None:
    now = quiet_hours.active(hours.quiet, local)
    if now is None:
        return None
    over = quiet_hours.over_at(hours.quiet, local)
    until = "" if over is None else f", until {over:%a %H:%M}"
    return hours.max_gpus, f"at most {_gpus(hours.max_gpus)} in {whose} quiet hours ({now.text}){until}"


def week_below_at(settings: Settings, user: str, local: datetime, used_week_s: float) -> datetime | None:
    """When the GPU-hours that the user has used up fall below the limit of a week, if none are added; None where they
    are below it. ``local`` itself where that can't be said: a limit of 0."""
    hours = settings.policy.week_hours(user)
    if hours is None or used_week_s < hours * 3600:
        return None
    wait_s = WEEK_S * math.log(used_week_s / (hours * 3600)) if hours > 0 else 0.0
    # The next minute: at the very moment it would not be below yet.
    return local + timedelta(seconds=wait_s + 60) if hours > 0 else local


def _week(hours: float, user: str, local: datetime, below_at: datetime, used_week_s: float) -> str:
    used = f"{user} may use {hours:g} GPU-hours a week by this machine's policy, and has used {used_week_s / 3600:.1f}"
    if below_at == local:
        return used
    form = "%a %H:%M" if below_at - local < timedelta(days=6) else "%Y-%m-%d %H:%M"
    return f"{used} of late; from {below_at:{form}} on it is less again"


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def limits(
    options: DispatchOptions,
    gpus: Sequence[Gpu] | None,
    cores: int,
    ever: int | None = None,
    host_mb: int | None = None,
) -> Limits:
    """The limits of a run. ``gpus`` is None when no job requests a GPU, and empty when none are available.

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


def as_declared(job: Job) -> WaitingJob:
    """The job with its declared request, before anything was learned."""
    return WaitingJob(0, job.gpus, job.memory_mb, nodes=job.nodes, host_memory_mb=job.host_memory_mb)


def refuse_if_none_fits(jobs: Sequence[Job], gpus: Sequence[Gpu], limits: Limits) -> None:
    """Raises JobCannotFit, with the first job's reason, when not one of the jobs could ever run here."""
    first_of_kind = {as_declared(job): job for job in reversed(jobs)}
    reasons = {job.name: why_never(asked, gpus, limits) for asked, job in first_of_kind.items()}
    if jobs and None not in reasons.values():
        raise JobCannotFit(f"job {clean(jobs[0].title or jobs[0].name)} {reasons[jobs[0].name]}")


def most_at_once(sizes: Collection[int], jobs: int, gpus: Sequence[Gpu], limits: Limits) -> int:
    """How many jobs can run at once, at least 1: the machine's cores are divided by it.

    ``sizes``: the numbers of GPUs that jobs request, each once; ``jobs``: how many there are.
    """
    on_gpus = [size for size in sizes if size and not limits.cpu_only]
    places = min(limits.max_gpus, len(gpus)) // min(on_gpus) if on_gpus else 0
    if len(on_gpus) < len(sizes):
        places += limits.cpu_slots
    if limits.max_concurrent is not None:
        places = min(places, limits.max_concurrent)
    return max(1, min(places, jobs))
