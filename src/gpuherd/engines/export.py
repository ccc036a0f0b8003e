"""Jobs for export: like ones in groups, each group behind all that it needs; and words quoted for bash. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuherd.engines.base import ExportJob, Placement
from gpuherd.errors import printable

# SLURM's own default for the largest array.
MOST_IN_GROUP = 1000
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_WORD = 40


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job stands: the group and the place in it, both counted from 0."""

    group: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Jobs with the same placement that follow the same jobs.

    Attributes:
        name: letters, digits, dots, dashes; unique among the groups.
        after: the jobs that must have succeeded before any of these begins.
        behind: groups that must have ended before, well or not: those of the round before.
    """

    name: str
    placement: Placement
    jobs: tuple[ExportJob, ...]
    after: tuple[Place, ...] = ()
    behind: tuple[int, ...] = ()


def groups_of(jobs: Sequence[ExportJob], most: int = MOST_IN_GROUP) -> tuple[Group, ...]:
    """The jobs in groups of at most ``most``, each group behind all that it needs."""
    together: dict[tuple[int, Placement, frozenset[int]], list[int]] = {}
    for number, job in enumerate(jobs):
        together.setdefault((job.round, job.placement, frozenset(job.needs)), []).append(number)
    groups: list[Group] = []
    places: dict[int, Place] = {}
    of_round: dict[int, list[int]] = {}
    earlier: list[int] = []
    # By round: a group of a round may have been begun before one of the round before it, where it only needs others.
    for (round_, placement, needs), members in sorted(together.items(), key=lambda each: each[0][0]):
        if round_ not in of_round:
            earlier = of_round[max(of_round)] if of_round else []
            of_round[round_] = []
        after = tuple(sorted((places[need] for need in needs), key=lambda place: (place.group, place.index)))
        for start in range(0, len(members), most):
            part = members[start : start + most]
            number = len(groups)
            places.update((member, Place(number, index)) for index, member in enumerate(part))
            members_jobs = tuple(jobs[member] for member in part)
            groups.append(Group(name="", placement=placement, jobs=members_jobs, after=after, behind=tuple(earlier)))
            of_round[round_].append(number)
    return tuple(replace(group, name=_name(number, group.jobs)) for number, group in enumerate(groups, start=1))


def whole_groups(after: Sequence[Place], groups: Sequence[Group]) -> tuple[set[int], tuple[Place, ...]]:
    """The same as groups of which every job is needed, and single jobs of others."""
    counts: dict[int, int] = {}
    for place in after:
        counts[place.group] = counts.get(place.group, 0) + 1
    whole = {group for group, count in counts.items() if count == len(groups[group].jobs)}
    return whole, tuple(place for place in after if place.group not in whole)


def _name(number: int, jobs: Sequence[ExportJob]) -> str:
    """A group's name by its number and what its jobs' names begin with; else the first job's."""
    names = [_UNSAFE.sub("-", job.name) for job in (jobs[0], jobs[-1])]
    common = names[0]
    if len(jobs) > 1:
        length = next((at for at, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]), len(names[0]))
        common = names[0][:length]
    words = (text[:_LONGEST_WORD].strip(".-_") for text in (common, *names))
    word = next((word for word in words if word), None)
    return f"{number:02d}" if word is None else f"{number:02d}-{word}"


def quoted(word: str) -> str:
    r"""The word for bash, in one line: ``shlex.quote``, with line ends written as bash's own escapes.

    >>> print(quoted("a b\n$(c)"))
    'a b'$'\n''$(c)'
    """
    # A line end in what shlex has quoted always stands between single quotes.
    return shlex.quote(word).replace("\n", "'$'\\n''")


def comment(text: str) -> str:
    """Words for a comment: one line, nothing that a terminal would act on."""
    return printable(text)
