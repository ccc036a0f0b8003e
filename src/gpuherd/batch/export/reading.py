"""The jobs to export: those of a job file, or the unfinished ones of a run's folder. Nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.batch.export.plan import in_order
from gpuherd.batch.job_file import read_jobs
from gpuherd.batch.model_use import Planner
from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.reader import QueueReader, is_there
from gpuherd.jobs.rows import job_of
from gpuherd.jobs.rundir import RunDirectory


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
