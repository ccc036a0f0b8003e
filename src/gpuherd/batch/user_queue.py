"""The user's own queues, one for each engine, and ``gpuherd submit``, which adds a command to one.

Knows where the queues are and who may read them; ``gpuherd.jobs`` runs their jobs. A job waits until a dispatcher runs.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.engines.registry import LOCAL, names
from gpuherd.errors import CannotWrite, QueueUnreadable, UsageError
from gpuherd.jobs.control.messages import wake
from gpuherd.jobs.feasibility import (
    look_at_machine,
    refuse_beyond_this_machine,
    refuse_if_dispatcher_would,
    refuse_if_never,
    refuse_missing_folder,
)
from gpuherd.jobs.job import Job, JobState, check_needs
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.run_dir import RunDirectory

if TYPE_CHECKING:
    from gpuherd.jobs.queue.store import Queue

VARIABLE = "GPUHERD_QUEUE"


def folder(engine: str = LOCAL) -> Path:
    """The folder of the user's own queue: GPUHERD_QUEUE, else gpuherd/queue in XDG_STATE_HOME (~/.local/state).

    The queue of a cluster's engine is next to it: ``queue-slurm``. Creates nothing. Raises UsageError for a user
    without a home folder.
    """
    base = _base()
    return base if engine == LOCAL else base.with_name(f"{base.name}-{engine}")


def in_use() -> tuple[str, ...]:
    """The engines for which the user has a queue already."""
    return tuple(engine for engine in names() if _is_in_use(engine))


def _is_in_use(engine: str) -> bool:
    from gpuherd.jobs.queue.reader import is_there  # with SQLite, which not every command needs

    try:
        return is_there(RunDirectory(folder(engine)).queue)
    except QueueUnreadable:
        return False  # the home folder belongs to another user: sudo, a container


def _base() -> Path:
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    state = os.environ.get("XDG_STATE_HOME", "")
    if state.startswith("/"):  # the XDG standard ignores a relative path
        return Path(state) / "gpuherd" / "queue"
    try:
        return Path.home() / ".local" / "state" / "gpuherd" / "queue"
    except RuntimeError:
        raise UsageError(f"there is no home folder for a queue; set {VARIABLE} to a folder") from None


def open_folder(path: Path | None = None, *, engine: str = LOCAL) -> RunDirectory:
    """The queue's run folder (``path``, else the user's own for the engine), created with mode 0700 if missing.

    Raises CannotWrite when it can't be created, belongs to another user, or other users may write in it.
    """
    place = folder(engine) if path is None else Path(path).absolute()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.stat()
    except OSError as problem:
        raise CannotWrite(f"can't make {place}: {problem.strerror}; set {VARIABLE} to another folder") from None
    # Jobs and their environments are in it: a user who can write here could run any command as us.
    if status.st_uid != os.geteuid():
        raise CannotWrite(f"{place} belongs to someone else; set {VARIABLE} to a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotWrite(f"others may write in {place}; run: chmod go-w {place}")
    run = RunDirectory(place)
    run.create()
    return run


# --- gpuherd submit -----------------------------------------------------------------------------------------------

_UNFINISHED = frozenset({JobState.WAITING, JobState.RUNNING})


class _Undone(Exception):
    """Rolls a transaction back."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job in the queue.

    Attributes:
        job: the job, with its name.
        state: waiting; or done, when a job of this name and command has been done before.
        worker: the pid of the queue's dispatcher, None when there is none.
    """

    job: Job
    state: JobState
    worker: int | None


def with_surroundings(job: Job, environment: Mapping[str, str], cwd: str) -> Job:
    """The job as typed in this folder with this environment.

    It doesn't get the variables that choose GPUs, which are chosen when it starts, nor those of gpuherd itself.
    """
    folder = os.path.join(cwd, job.cwd or "")  # noqa: PTH118 - text: a job's folder need not exist here and now
    if any("DEVICE" in name for name in environment):
        from gpuherd.gpus.visible import without  # here: most shells have none of these, and submit starts fast

        environment = without(environment)
    kept = {name: value for name, value in environment.items() if not name.startswith("GPUHERD_")}
    # Its identity leaves the environment out: half of what a shell exports changes from one terminal to the next.
    return replace(job, env=kept, cwd=folder, identity=json.dumps([job.argv, folder]))


def check(job: Job, *, named: bool, engine: str = LOCAL, run: RunDirectory | None = None) -> None:
    """Raises what ``submit`` would raise for this job, and JobCannotFit after a query of the GPUs. Changes nothing."""
    from gpuherd.jobs.queue.store import Queue

    directory = RunDirectory(folder(engine)) if run is None else run
    refuse_missing_folder(job)
    if engine == LOCAL:
        refuse_beyond_this_machine(job.nodes, job.host_memory_mb)
        refuse_if_never(job, look_at_machine())
        refuse_if_dispatcher_would(job, directory)
    if not directory.queue.exists():
        check_needs([job])
        return
    with suppress(_Undone), Queue(directory.queue, check=False) as queue, queue.transaction():
        _enter(job, queue, named=named)
        raise _Undone


def submit(job: Job, *, named: bool, engine: str = LOCAL, run: RunDirectory | None = None) -> Submitted:
    """Adds the job to the queue and wakes its dispatcher.

    Args:
        job: the job, ``with_surroundings`` if it was typed in a terminal.
        named: its name is its own; else it gets ``job-0001`` or the next.
        engine: the engine that runs it; a cluster's dispatcher refuses what the cluster can never give.
        run: the queue's folder; the user's own for the engine if not given.

    Raises:
        UsageError: the name belongs to another job that has not ended, ``needs`` names none, or its folder is missing.
        JobCannotFit: the queue's dispatcher has too few or too small GPUs; several nodes, or more main memory than
            there is, on this machine.
        CannotWrite, QueueUnreadable: the queue can't be used.
    """
    from gpuherd.jobs.queue.schema import raising_cannot_write
    from gpuherd.jobs.queue.store import Queue

    directory = open_folder(engine=engine) if run is None else run
    refuse_missing_folder(job)
    if engine == LOCAL:
        refuse_beyond_this_machine(job.nodes, job.host_memory_mb)
        refuse_if_dispatcher_would(job, directory)
    with (
        raising_cannot_write(directory.queue, "submit it again; nothing was added"),
        Queue(directory.queue, check=False) as queue,
        queue.transaction(),
    ):
        found, job = _enter(job, queue, named=named)
    wake(directory.control_fifo)
    state = JobState.WAITING if found is None else found[1]
    return Submitted(job, state, DispatcherLock.holder(directory.lock))


def _enter(job: Job, queue: Queue, *, named: bool) -> tuple[tuple[QueuedJob, JobState] | None, Job]:
    """The job as it is in the queue afterwards, with its state; and the job with its name."""
    if named:
        _refuse_other(queue, job)
    else:
        job = replace(job, name=_next_name(queue))
    queue.add([job])
    return queue.job(job.name), job


def _refuse_other(queue: Queue, job: Job) -> None:
    found = queue.job(job.name)
    if found is not None and found[1] in _UNFINISHED and found[0].job.identity != job.identity:
        raise UsageError(f"the name {job.name!r} is taken: another job of that name is {found[1]}; choose another name")


def _next_name(queue: Queue) -> str:
    """``job-0001``, or the first number that is free. Jobs are never removed, so that bisection finds it."""

    def taken(number: int) -> bool:
        return queue.job(f"job-{number:04d}") is not None

    above = 1
    while taken(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if taken(middle) else (below, middle)
    return f"job-{above:04d}"
