"""Decides which waiting jobs are submitted to the engine now, and which of them together. Pure.

1. Priority first, as on this machine. Within a priority, jobs that could run at once come first, then those that depend
on others in the engine: otherwise dependent jobs would take the places of jobs that need not wait. Then age, or the
longest first.
2. At most ``at_most`` are in the engine at once. The engine decides which of them runs where and when.
3. Jobs with the same placement and the same dependencies form a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuherd.engines.base import Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.jobs.attempts.time_limits import TimeLimits
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Predecessor, QueuedJob
from gpuherd.jobs.remote import AROUND_S, LONG_STEP_S, SHORT_S, SHORT_STEP_S
from gpuherd.jobs.scheduler.types import Wait

# SLURM's default for the largest array.
LARGEST_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that can be submitted. ``after``: the attempts of those of its needs that are in the engine and have not
    succeeded yet.
    """

    queued: QueuedJob
    after: tuple[Predecessor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """How much is submitted at once.

    Attributes:
        at_most: jobs in the engine; ``open``: so many are there now.
        option: the option that sets that limit.
        longest_first: within a priority the job of the highest rank goes first; else the oldest.
        largest: the most jobs of a batch.
        closed: a sentence when nothing is submitted now, else None.
    """

    at_most: int
    open: int
    option: str = "--at-most"
    longest_first: bool = False
    largest: int = LARGEST_BATCH
    closed: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that go together, in their order."""

    placement: Placement
    after: tuple[Predecessor, ...]
    jobs: tuple[QueuedJob, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision: each candidate is in a group, in ``waits`` or in ``refused``. Groups are in the order of their
    first jobs."""

    groups: tuple[Group, ...] = ()
    waits: tuple[Wait, ...] = ()
    refused: tuple[Wait, ...] = ()


def placement_of(job: Job, gpus: int, options: EngineOptions, limits: TimeLimits, grace_s: float) -> Placement:
    """The placement that a job requests: its own options first, then those of the run. ``gpus``: on each node, now.

    The engine's time limit comes after the job's own has ended it on its node, with the notice before it: otherwise the
    engine would end a job that hangs again and again, and the job would never fail. It is rounded up in steps, so that
    jobs whose limits differ a little form one batch.
    """
    time_s = options.time_limit
    if time_s is None and limits.whole_s is not None:
        time_s = stepped(limits.whole_s + grace_s + options.notice + AROUND_S)
    return Placement(
        gpus=gpus,
        nodes=job.nodes,
        tasks=options.spec.tasks(options),
        cpus=job.cpus if job.cpus is not None else options.cpus_per_job,
        memory_mb=job.host_memory_mb if job.host_memory_mb is not None else options.host_mem,
        time_s=time_s,
    )


def stepped(seconds: float) -> float:
    """The time in seconds, rounded up to the step in which it is requested.

    >>> stepped(61), stepped(3600), stepped(3601)
    (120, 3600, 4500)
    """
    step_s = SHORT_STEP_S if seconds <= SHORT_S else LONG_STEP_S
    return step_s * math.ceil(seconds / step_s)


def decide(
    candidates: Sequence[Candidate],
    asks: Callable[[QueuedJob], Placement],
    never: Mapping[Placement, str],
    limits: BatchLimits,
) -> Decision:
    """Decides what to submit now. ``never``: placements that the engine can never provide, with the reason."""
    places = max(0, limits.at_most - limits.open)
    groups: dict[tuple[Placement, tuple[Predecessor, ...], int], list[QueuedJob]] = {}
    sizes: dict[tuple[Placement, tuple[Predecessor, ...]], int] = {}
    waits, refused = [], []
    for each in sorted(candidates, key=lambda one: _key(one, limits)):
        job, placement = each.queued, asks(each.queued)
        if placement in never:
            refused.append(Wait(job.id, never[placement]))
        elif limits.closed is not None:
            waits.append(Wait(job.id, limits.closed))
        elif places == 0:
            text = f"{limits.at_most} jobs are in the cluster's hands, which is the most at once ({limits.option})"
            waits.append(Wait(job.id, text))
        else:
            places -= 1
            alike = placement, each.after
            size = sizes.get(alike, 0)
            sizes[alike] = size + 1
            groups.setdefault((*alike, size // limits.largest), []).append(job)
    found = [Group(placement, after, tuple(jobs)) for (placement, after, _), jobs in groups.items()]
    return Decision(tuple(found), tuple(waits), tuple(refused))


def _key(candidate: Candidate, limits: BatchLimits) -> tuple[int, bool, float, int]:
    queued = candidate.queued
    rank = -queued.rank if limits.longest_first else 0.0
    return (-queued.job.priority, bool(candidate.after), rank, queued.id)
