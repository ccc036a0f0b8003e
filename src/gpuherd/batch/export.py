"""``gpuherd export``: a plan of jobs as files that a person can read, change and submit by hand. Which files, each
engine knows itself (``EngineSpec.exporter``); here jobs become lines of bash in an order that respects their needs, and
all files are written or none.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path

from gpuherd.atomic import replacing
from gpuherd.batch.assemble import FileRules, read_jobs
from gpuherd.engines.base import ExportJob, Placement
from gpuherd.engines.export import quoted
from gpuherd.engines.options import EngineOptions
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.jobs.job import Job, JobState, Planner, check_needs, job_of
from gpuherd.jobs.queue.reader import QueueReader, is_there
from gpuherd.jobs.run_dir import RunDirectory

# Added to a job's own time limit: to begin, and to end after SIGTERM.
_AROUND_S = 60.0
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_KILL_AFTER_S = 10


def files(jobs: Sequence[Job], options: EngineOptions, folder: str) -> Mapping[str, str]:
    """Texts by file name, as the engine of these options writes them. ``folder``: where jobs run that name none.

    Raises UsageError for needs, jobs and options that can't be exported.
    """
    exporter = options.spec.exporter
    if exporter is None:
        raise UsageError(f"jobs can't be exported for {options.spec.title}")
    return exporter.files(to_export(jobs, options, folder), options)


def to_export(jobs: Sequence[Job], options: EngineOptions, folder: str) -> tuple[ExportJob, ...]:
    """The jobs in order. Raises UsageError."""
    ordered = in_order(jobs)
    places = {job.name: place for place, job in enumerate(ordered)}
    return tuple(
        ExportJob(
            name=job.name,
            line=line_of(job, folder),
            placement=placement_of(job, options),
            needs=tuple(places[need] for need in dict.fromkeys(job.needs)),
            round=job.round,
        )
        for job in ordered
    )


def placement_of(job: Job, options: EngineOptions) -> Placement:
    """The job's request: its own options first, then those of the export."""
    time_s = options.time_limit
    if time_s is None and job.timeout_s is not None:
        time_s = job.timeout_s + _AROUND_S
    return Placement(
        gpus=job.gpus,
        nodes=job.nodes,
        tasks=options.spec.tasks(options),
        cpus=options.cpus_per_job if job.cpus is None else job.cpus,
        memory_mb=options.host_mem if job.host_memory_mb is None else job.host_memory_mb,
        time_s=time_s,
    )


def in_order(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """The jobs in an order in which each comes after all that it needs and after all of earlier rounds; of those that
    could come next first the one of the highest priority, then the oldest. Raises UsageError for wrong needs.
    """
    check_needs(jobs)
    numbers = {job.name: number for number, job in enumerate(jobs)}
    sorter = TopologicalSorter({job.name: job.needs for job in jobs})
    sorter.prepare()
    ready: list[tuple[int, int, int]] = []
    found: list[Job] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            number = numbers[name]
            heapq.heappush(ready, (jobs[number].round, -jobs[number].priority, number))
        found.append(jobs[heapq.heappop(ready)[2]])
        sorter.done(found[-1].name)
    return tuple(found)


def left_over(jobs: Sequence[Job]) -> Mapping[str, int]:
    """Options of these jobs that files run by hand ignore, and how many jobs have them."""
    stages = sum(job.stage_timeout_s is not None or job.heartbeat_s is not None for job in jobs)
    memory = sum(job.memory_mb is not None for job in jobs)
    said = {"time limits for stages and heartbeats": stages, "GPU memory (mem=)": memory}
    return {what: count for what, count in said.items() if count}


def line_of(job: Job, folder: str) -> str:
    """The job as one line of bash: in its folder, with its variables, within its time limit; it succeeds only if its
    result exists. ``folder``: for a job that names none.

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
    # exec runs the program even where bash has a command of that name (echo, time, test).
    if job.result is None:
        parts.append(f"exec -- {command}")
    else:
        parts += [f"(exec -- {command})", f"test -e {quoted(job.result)}"]
    return " && ".join(parts)


# The jobs to export: those of a job file, or the waiting ones of a run's folder. Nothing is changed.


@dataclass(frozen=True, slots=True)
class Found:
    """``jobs`` to export, ``folder`` for those that name none, and by name why others of the run are left out."""

    jobs: tuple[Job, ...]
    folder: str
    left_out: Mapping[str, str]


def of_folder(run: RunDirectory) -> Found:
    """The jobs of a run that wait. Those that run are left out, and all that need them: whether they will succeed is
    not known. Raises UsageError without a queue, and QueueUnreadable.
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
    # In order, so that a job comes after one that it needs and that is left out. Needs that are done are dropped.
    for job in in_order([_needing(job, waiting) for job in waiting.values()]):
        need = next((each for each in waiting[job.name].needs if each in left_out), None)
        if need is not None:
            left_out[job.name] = f"it needs {need}, which is left out"
    kept = {name: job for name, job in waiting.items() if name not in left_out}
    return Found(tuple(_needing(job, kept) for job in kept.values()), _folder_of(run), left_out)


def _needing(job: Job, these: Collection[str]) -> Job:
    """The job with only those of its needs that are among these."""
    return replace(job, needs=tuple(need for need in job.needs if need in these))


def of(path: str, *, shell: bool, gpus: int, planner: Planner | None = None) -> Found:
    """The jobs of a path: a run's folder, or a job file. Raises UsageError when no job waits, NoJobFile, BadJobFile."""
    run = RunDirectory(path)
    if run.root.is_dir():
        if not is_there(run.queue):
            raise UsageError(f"there is no queue in {run.root}; name the folder of a run, or a job file")
        found = of_folder(run)
    else:
        found = Found(read_jobs(path, FileRules(shell=shell, gpus=gpus, planner=planner)), str(Path.cwd()), {})
    if not found.jobs:
        running = f"; {len(found.left_out)} are left out, which run now or need one that does" if found.left_out else ""
        raise UsageError(f"no job waits in {run.root}, so there is nothing to export{running}")
    return found


def _folder_of(run: RunDirectory) -> str:
    """The folder in which the run's command was started, from its record; else the current one."""
    try:
        record = json.loads(run.run_json.read_text(encoding="utf-8"))
        folder = record.get("cwd") if isinstance(record, dict) else None
    except (OSError, ValueError):
        folder = None
    return folder if isinstance(folder, str) and folder.startswith("/") else str(Path.cwd())


# Writes exported files into their folder: all of them or none, each whole, readable by their owner alone.


def write(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Writes the files, and makes ``logs`` next to them. Commands and environments may hold secrets.

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
