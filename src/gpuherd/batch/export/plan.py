"""Jobs put in order and together: like ones in a group, each group behind all that it needs. Pure."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuherd.engines.cluster import Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.jobs.job import Job
from gpuherd.jobs.needs import check_needs

# SLURM's own default for the largest array.
MOST_IN_GROUP = 1000
# Beside a job's own time limit: to begin, and to end after SIGTERM.
_AROUND_S = 60.0
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_WORD = 40


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job stands: the group and the place in it, both counted from 0."""

    group: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Jobs that ask for the same and come after the same.

    Attributes:
        name: letters, digits, dots, dashes; no two groups of a plan have the same.
        after: the jobs that must have succeeded before any of these begins.
        behind: groups that must have ended before, well or not: those of the round before.
    """

    name: str
    placement: Placement
    jobs: tuple[Job, ...]
    after: tuple[Place, ...] = ()
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kind:
    """What jobs of one group have in common."""

    round: int
    placement: Placement
    needs: frozenset[str]


def placement_of(job: Job, options: EngineOptions) -> Placement:
    """What the job asks for: its own words first, then those of the export."""
    time_s = options.time_limit
    if time_s is None and job.timeout_s is not None:
        time_s = job.timeout_s + _AROUND_S
    return Placement(
        gpus=job.gpus,
        nodes=job.nodes,
        tasks=options.ntasks_per_node or 1,
        cpus=options.cpus_per_job if job.cpus is None else job.cpus,
        memory_mb=options.host_mem if job.host_memory_mb is None else job.host_memory_mb,
        time_s=time_s,
    )


def in_order(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """The jobs so that each comes after all that it needs and after all of earlier rounds; among those that could come
    next the one of the highest priority, then the oldest. Raises UsageError for needs that can't be.
    """
    check_needs(jobs)
    missing = {job.name: len(set(job.needs)) for job in jobs}
    dependents: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        for need in set(job.needs):
            dependents.setdefault(need, []).append(number)
    ready = [(job.round, -job.priority, number) for number, job in enumerate(jobs) if not missing[job.name]]
    heapq.heapify(ready)
    found = []
    while ready:
        job = jobs[heapq.heappop(ready)[2]]
        found.append(job)
        for number in dependents.get(job.name, ()):
            later = jobs[number]
            missing[later.name] -= 1
            if not missing[later.name]:
                heapq.heappush(ready, (later.round, -later.priority, number))
    return tuple(found)


def groups_of(jobs: Sequence[Job], options: EngineOptions, most: int = MOST_IN_GROUP) -> tuple[Group, ...]:
    """The jobs in groups of at most ``most``, each group behind all that it needs. Raises as ``in_order``."""
    together: dict[_Kind, list[Job]] = {}
    for job in in_order(jobs):
        kind = _Kind(job.round, placement_of(job, options), frozenset(job.needs))
        together.setdefault(kind, []).append(job)
    groups: list[Group] = []
    places: dict[str, Place] = {}
    of_round: dict[int, list[int]] = {}
    earlier: list[int] = []
    # By round: a group of a round may have been begun before one of the round before it, where it only needs others.
    for kind, members in sorted(together.items(), key=lambda each: each[0].round):
        if kind.round not in of_round:
            earlier = of_round[max(of_round)] if of_round else []
            of_round[kind.round] = []
        after = tuple(sorted((places[need] for need in kind.needs), key=lambda place: (place.group, place.index)))
        for start in range(0, len(members), most):
            part = tuple(members[start : start + most])
            number = len(groups)
            places.update((job.name, Place(number, index)) for index, job in enumerate(part))
            groups.append(Group(name="", placement=kind.placement, jobs=part, after=after, behind=tuple(earlier)))
            of_round[kind.round].append(number)
    return tuple(replace(group, name=_name(number, group.jobs)) for number, group in enumerate(groups, start=1))


def whole_groups(after: Sequence[Place], groups: Sequence[Group]) -> tuple[set[int], tuple[Place, ...]]:
    """The same as groups of which every job is needed, and single jobs of others."""
    counts: dict[int, int] = {}
    for place in after:
        counts[place.group] = counts.get(place.group, 0) + 1
    whole = {group for group, count in counts.items() if count == len(groups[group].jobs)}
    return whole, tuple(place for place in after if place.group not in whole)


def left_over(jobs: Sequence[Job]) -> Mapping[str, int]:
    """What these jobs say that files run by hand don't do, and how many of them say it."""
    said = {
        "time limits for stages and heartbeats": sum(
            job.stage_timeout_s is not None or job.heartbeat_s is not None for job in jobs
        ),
        "GPU memory (mem=)": sum(job.memory_mb is not None for job in jobs),
    }
    return {what: count for what, count in said.items() if count}


def _name(number: int, jobs: Sequence[Job]) -> str:
    """A group's name by its number and what its jobs' names begin with; else the first job's."""
    names = [_UNSAFE.sub("-", job.name) for job in (jobs[0], jobs[-1])]
    common = names[0]
    if len(jobs) > 1:
        length = next((at for at, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]), len(names[0]))
        common = names[0][:length]
    words = (text[:_LONGEST_WORD].strip(".-_") for text in (common, *names))
    word = next((word for word in words if word), None)
    return f"{number:02d}" if word is None else f"{number:02d}-{word}"
