"""``gpuherd export``: a plan of jobs as files that a person can read, change and submit by hand. Groups of like jobs,
quoting, a script for bash, and writing all files or none.
"""

from __future__ import annotations

import heapq
import json
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.atomic import replacing
from gpuherd.batch.assemble import read_jobs
from gpuherd.batch.job_options import Planner
from gpuherd.engines.base import Placement
from gpuherd.engines.options import EngineOptions
from gpuherd.errors import CannotWrite, UsageError, printable
from gpuherd.jobs.job import Job, JobState, check_needs, job_of
from gpuherd.jobs.queue.reader import QueueReader, is_there
from gpuherd.jobs.run_dir import RunDirectory

# Jobs put in order and together: like ones in a group, each group behind all that it needs. Pure.

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


# A job as one line of bash, whatever its words hold; and names as comments. Pure.

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_KILL_AFTER_S = 10


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


def line_of(job: Job, folder: str) -> str:
    """What runs the job, as one line of bash: in its folder, with its variables, within its time, and it has succeeded
    only when its result is there. ``folder``: for a job that names none.

    Raises UsageError for a variable that bash can't set.
    """
    parts = [f"cd -- {quoted(job.cwd or folder)}"]
    for name, value in job.env.items():
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"job {job.name!r} sets the variable {name!r}, which a shell can't set; rename it")
        parts.append(f"export {name}={quoted(value)}")
    command = " ".join(quoted(word) for word in job.argv)
    if job.timeout_s is not None:
        command = f"timeout --kill-after={_KILL_AFTER_S} {math.ceil(job.timeout_s)} {command}"
    # By exec a program is run whatever bash itself has of that name (echo, time, test).
    if job.result is None:
        parts.append(f"exec -- {command}")
    else:
        parts += [f"(exec -- {command})", f"test -e {quoted(job.result)}"]
    return " && ".join(parts)


# The jobs to export: those of a job file, or the unfinished ones of a run's folder. Nothing is changed.


@dataclass(frozen=True, slots=True)
class Found:
    """``jobs`` to export, ``folder`` for those that name none, and why others of the run are left out, by name."""

    jobs: tuple[Job, ...]
    folder: str
    left_out: Mapping[str, str]


def of_file(path: str, *, shell: bool, gpus: int, planner: Planner | None) -> Found:
    """The jobs of a job file. Raises NoJobFile and BadJobFile."""
    return Found(read_jobs(path, shell=shell, gpus=gpus, planner=planner), str(Path.cwd()), {})


def of_folder(run: RunDirectory) -> Found:
    """The jobs of a run that wait. Those that run are left out, and all that needs them: where and whether they end is
    not ours to know. Raises UsageError without a queue, and QueueUnreadable.
    """
    with closing(QueueReader(run.queue)) as reader:
        rows = reader.rows(
            "SELECT name, state, spec, gpus FROM jobs"
            " WHERE submission = (SELECT value FROM meta WHERE key = 'submission') ORDER BY id"
        )
    left_out = {row["name"]: "it runs now" for row in rows if row["state"] == JobState.RUNNING}
    waiting = {
        row["name"]: replace(job_of(row["spec"]), gpus=row["gpus"]) for row in rows if row["state"] == JobState.WAITING
    }
    # In order, so that whatever needs one that is left out comes behind it. What is done need not be waited for.
    for job in in_order([_needing(job, waiting) for job in waiting.values()]):
        need = next((each for each in waiting[job.name].needs if each in left_out), None)
        if need is not None:
            left_out[job.name] = f"it needs {need}, which is left out"
    kept = {name: job for name, job in waiting.items() if name not in left_out}
    return Found(tuple(_needing(job, kept) for job in kept.values()), _folder_of(run), left_out)


def _needing(job: Job, these: Collection[str]) -> Job:
    """The job with no other needs than these."""
    return replace(job, needs=tuple(need for need in job.needs if need in these))


def of(path: str, *, shell: bool, gpus: int, planner: Planner | None = None) -> Found:
    """What a path means: a run's folder, or a job file. Raises UsageError when nothing is to be done."""
    run = RunDirectory(path)
    if run.root.is_dir():
        if not is_there(run.queue):
            raise UsageError(f"there is no queue in {run.root}; name the folder of a run, or a job file")
        found = of_folder(run)
    else:
        found = of_file(path, shell=shell, gpus=gpus, planner=planner)
    if not found.jobs:
        running = f"; {len(found.left_out)} are left out, which run now or need one that does" if found.left_out else ""
        raise UsageError(f"no job waits in {run.root}, so there is nothing to export{running}")
    return found


def _folder_of(run: RunDirectory) -> str:
    """The folder that the run's command was started in, where its record says so, else ours."""
    try:
        told = json.loads(run.run_json.read_text(encoding="utf-8"))
        folder = told.get("cwd") if isinstance(told, dict) else None
    except (OSError, ValueError):
        folder = None
    return folder if isinstance(folder, str) and folder.startswith("/") else str(Path.cwd())


# Jobs as one script for bash on one machine: a block a job, one after the other, GPUs as variables. Pure.

RUN = "run.sh"

_HEAD = """\
#!/bin/bash
# {jobs}, each after all that it needs: bash {name}
# Only some of them: bash {name} 2 5 (their numbers are above them). What one prints is in logs/.
unset CDPATH
here=${{BASH_SOURCE[0]}}
if [[ $here == */* ]]; then cd -- "${{here%/*}}" || exit; fi
mkdir -p logs || exit
{gpus}
wanted=" $* "
declare -A how
failures=0

# begin NUMBER NAME NEEDED...: whether the job is to run.
begin() {{
    local number=$1 name=$2 needed
    shift 2
    if [[ $wanted != "  " && $wanted != *" $number "* ]]; then return 1; fi
    for needed in "$@"; do
        if [[ ${{how[$needed]:-}} == failed ]]; then
            echo "$number: $name: left out, it needs $needed, which has failed"
            how[$number]=failed failures=$((failures + 1))
            return 1
        fi
    done
    echo "$number: $name"
}}

# ended NUMBER CODE
ended() {{
    if [[ $2 == 0 ]]; then how[$1]=done; return; fi
    echo "$1: failed with exit code $2; see logs/$1.log"
    how[$1]=failed failures=$((failures + 1))
}}
"""
_GPUS = """\
# The GPUs to use, by number or UUID; or from outside: {first}=2 bash {name}
{lines}
export CUDA_DEVICE_ORDER=PCI_BUS_ID"""
_TAIL = """\

if [[ $failures != 0 ]]; then echo "$failures failed"; exit 1; fi
"""


def files(jobs: Sequence[Job], folder: str) -> Mapping[str, str]:
    """The script by its name. ``folder``: where jobs run that name none.

    Raises UsageError for jobs on several nodes.
    """
    for job in jobs:
        if job.nodes > 1:
            raise UsageError(f"job {job.name!r} spans {job.nodes} nodes; that is for --to slurm")
    ordered = in_order(jobs)
    numbers = {job.name: number for number, job in enumerate(ordered, start=1)}
    blocks = [_block(number, job, numbers, folder) for number, job in enumerate(ordered, start=1)]
    return {RUN: _head(ordered) + "".join(blocks) + _TAIL}


def _head(jobs: Sequence[Job]) -> str:
    most = max((job.gpus for job in jobs), default=0)
    lines = "\n".join(f"GPU_{number}=${{GPU_{number}:-{number}}}" for number in range(most))
    gpus = _GPUS.format(first="GPU_0", name=RUN, lines=lines) if most else "export CUDA_VISIBLE_DEVICES="
    return _HEAD.format(jobs="1 job" if len(jobs) == 1 else f"{len(jobs)} jobs", name=RUN, gpus=gpus)


def _block(number: int, job: Job, numbers: Mapping[str, int], folder: str) -> str:
    needs = "".join(f" {numbers[need]}" for need in dict.fromkeys(job.needs))
    visible = ",".join(f"$GPU_{gpu}" for gpu in range(job.gpus))
    name = quoted(comment(job.name))
    return (
        f"\n# {number}: {comment(job.name)}\n"
        f"if begin {number} {name}{needs}; then\n"
        f'    (\n        export CUDA_VISIBLE_DEVICES="{visible}"\n'
        f"        {line_of(job, folder)}\n"
        f"    ) >logs/{number}.log 2>&1 </dev/null\n"
        f"    ended {number} $?\n"
        "fi\n"
    )


# Puts exported files into their folder: all of them or none over others, each whole, for their owner alone.


def write(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Writes the files, and makes ``logs`` beside them. Commands and environments may hold secrets.

    Raises UsageError when one of them is there already, unless ``force``; nothing is written then. CannotWrite.
    """
    there = sorted(name for name in files if (folder / name).exists() or (folder / name).is_symlink())
    if there and not force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UsageError(f"{folder / there[0]}{more} exists; --force replaces it, or choose another --output")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with replacing(folder / name, 0o700 if name.endswith(".sh") else 0o600) as file:
                file.write(text.encode("utf-8", "surrogateescape"))
    except OSError as problem:
        raise CannotWrite(f"can't write in {folder}: {problem.strerror}") from problem
