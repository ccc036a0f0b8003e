"""Jobs for export: like ones in groups, each group behind all that it needs; words quoted for bash; and the files for a
batch system (``ClusterFiles``), which its folder gives the system's own words. Pure.
"""

from __future__ import annotations

import os
import re
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpuherd.engines.base import ExportJob, Placement
from gpuherd.errors import UsageError, printable

# SLURM's own default for the largest array.
MOST_IN_GROUP = 1000
# A test of the shell: whether a machine's GPUs are AMD's.
IS_AMD = "[ -e /dev/kfd ] && [ ! -e /dev/nvidiactl ]"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_WORD = 40


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a job stands: the group and the place in it, both counted from 0."""

    group: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportGroup:
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


def groups_of(jobs: Sequence[ExportJob], most: int = MOST_IN_GROUP) -> tuple[ExportGroup, ...]:
    """The jobs in groups of at most ``most``, each group behind all that it needs."""
    together: dict[tuple[int, Placement, frozenset[int]], list[int]] = {}
    for number, job in enumerate(jobs):
        together.setdefault((job.round, job.placement, frozenset(job.needs)), []).append(number)
    groups: list[ExportGroup] = []
    places: dict[int, Place] = {}
    earlier: tuple[int, ...] = ()
    # By round: a group of a round may have been begun before one of the round before it, where it only needs others.
    for _, of_round in groupby(sorted(together.items(), key=_round_of), _round_of):
        first = len(groups)
        for (_, placement, needs), members in of_round:
            after = tuple(sorted(places[need] for need in needs))
            for start in range(0, len(members), most):
                part = members[start : start + most]
                places |= {member: Place(len(groups), index) for index, member in enumerate(part)}
                its = tuple(jobs[member] for member in part)
                name = _name(len(groups) + 1, its)
                groups.append(ExportGroup(name=name, placement=placement, jobs=its, after=after, behind=earlier))
        earlier = tuple(range(first, len(groups)))
    return tuple(groups)


def _round_of(together: tuple[tuple[int, Placement, frozenset[int]], list[int]]) -> int:
    return together[0][0]


def grouped_dependencies(after: Sequence[Place], groups: Sequence[ExportGroup]) -> tuple[set[int], tuple[Place, ...]]:
    """The same as groups of which every job is needed, and single jobs of others."""
    counts = Counter(place.group for place in after)
    whole = {group for group, count in counts.items() if count == len(groups[group].jobs)}
    return whole, tuple(place for place in after if place.group not in whole)


def _name(number: int, jobs: Sequence[ExportJob]) -> str:
    """A group's name by its number and what its jobs' names begin with; else the first job's."""
    names = [_UNSAFE.sub("-", job.name) for job in (jobs[0], jobs[-1])]
    words = (text[:_LONGEST_WORD].strip(".-_") for text in (os.path.commonprefix(names), *names))  # noqa: RUF071 - of characters
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


# --- the files for a batch system -------------------------------------------------------------------------------------

SUBMIT = "submit.sh"
_LINE = """\
line=$(sed -n "{number}p" {commands})
if [ -z "$line" ]; then echo "{name}.commands has no such line" >&2; exit 2; fi
"""
# The shell of a job outlives SIGTERM: it looks for the job's result when the job has saved what it has.
ONE_PROCESS = """\
run=(bash -c 'trap : TERM; eval "$1"' bash "$line")
"""
RUN = """\
exec "${run[@]}"
"""
_RUN_WITH_NOTICE = """\
# Before its end by force this script alone gets a signal; the job gets SIGTERM from here, to save what it has.
set -m
"${run[@]}" &
job=$!
trap 'kill -TERM -- "-$job"' SIGNALS
wait "$job"
code=$?
while kill -0 "$job" 2>/dev/null; do
    wait "$job"
    code=$?
done
"""
_SUBMIT_HEAD = """\
set -euo pipefail
unset CDPATH
here=${BASH_SOURCE[0]}
if [[ $here == */* ]]; then cd -- "${here%/*}"; fi
"""


def run_with_notice(*signals: str) -> str:
    """Lines of bash that run the job and hand these signals on to it as SIGTERM; ``$code`` is its exit code then."""
    return _RUN_WITH_NOTICE.replace("SIGNALS", " ".join(signals))


class ClusterFiles(ABC):
    """For each group of like jobs a script and a file of commands, and a script that submits all. A batch system's
    folder has a subclass, with what is the system's own.

    Attributes:
        title: the system's.
        suffix: of a group's script. ``directive``: the beginning of its lines that are the system's options.
        commands: where a running script finds the file of commands, with the group's name for ``{}``.
        submit_comments: what the reader of ``submit.sh`` has to know. ``submit_setup``: its first lines, in the folder.
    """

    title: str
    suffix: str
    directive: str
    commands: str
    submit_comments: str
    submit_setup: str

    def __init__(self, groups: Sequence[ExportGroup]):
        self.groups = groups

    def files(self) -> Mapping[str, str]:
        """Texts by file name. Raises UsageError for jobs and options that can't be exported."""
        found: dict[str, str] = {}
        for group in self.groups:
            found[f"{group.name}.commands"] = "".join(f"{job.line}  # {comment(job.name)}\n" for job in group.jobs)
            found[f"{group.name}{self.suffix}"] = self._script(group)
        found[SUBMIT] = self._submit()
        return found

    # --- what a subclass says ---------------------------------------------------------------------------------------

    @abstractmethod
    def directives(self, group: ExportGroup) -> Sequence[str]:
        """The options of a group, one a line."""

    @abstractmethod
    def line_number(self, group: ExportGroup) -> str:
        """The line of a job in the file of commands, as bash computes it."""

    @abstractmethod
    def before(self, group: ExportGroup) -> Sequence[str]:
        """Lines of bash that run first."""

    @abstractmethod
    def run(self, group: ExportGroup) -> str:
        """The lines that run the job, whose line is in ``$line``."""

    @abstractmethod
    def submission(self, number: int, group: ExportGroup) -> Sequence[str]:
        """The words that submit the group of this number, counted from 0. They print the job's number; those of groups
        before are in ``$job_1`` and so on."""

    def after_submission(self, number: int) -> Sequence[str]:  # noqa: ARG002
        """Lines of ``submit.sh`` behind a submission."""
        return ()

    # --- the texts --------------------------------------------------------------------------------------------------

    def _script(self, group: ExportGroup) -> str:
        lines = [
            "#!/bin/bash",
            f"# {_jobs(len(group.jobs))}, one a line of {group.name}.commands. To be submitted from this folder, as"
            f" {SUBMIT} does.",
            *(f"{self.directive} {self._checked(word)}" for word in self.directives(group)),
            "",
            *self.before(group),
        ]
        commands = self.commands.format(group.name)
        line = _LINE.format(number=self.line_number(group), commands=commands, name=group.name)
        return "\n".join(lines) + "\n" + line + self.run(group)

    def _checked(self, directive: str) -> str:
        if not directive.isprintable():
            raise UsageError(
                f"{directive!r} can't be written into a script for {self.title}; take out what is not printable"
            )
        return directive

    def _submit(self) -> str:
        jobs = _jobs(sum(len(group.jobs) for group in self.groups))
        head = f"#!/bin/bash\n# Hands {jobs} to {self.title}: bash {SUBMIT}\n"
        parts = [head, self.submit_comments, _SUBMIT_HEAD, self.submit_setup]
        for number, group in enumerate(self.groups):
            job = f"job_{number + 1}"
            more = f" and {len(group.jobs) - 1} more" if len(group.jobs) > 1 else ""
            lines = [
                "",
                f"# {comment(group.jobs[0].name)}{more}",
                f"{job}=$({' '.join(self.submission(number, group))})",
                f"{job}=${{{job}%%[;.]*}}",
                *self.after_submission(number),
                f'echo "{group.name}: ${{{job}}}"',
            ]
            parts.append("\n".join(lines) + "\n")
        return "".join(parts)


def _jobs(count: int) -> str:
    return f"{count} job{'s' if count != 1 else ''}"
