"""Where the user's own queues are, one for each engine: ``gpuherd submit`` adds to them, ``gpuherd up`` works one off.

Knows their places and who may read them. What happens to its jobs is the business of ``gpuherd.jobs``.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpuherd.engines.options import ENGINES, LOCAL, EngineName
from gpuherd.errors import CannotWrite, QueueUnreadable, UsageError
from gpuherd.jobs.rundir import RunDirectory

VARIABLE = "GPUHERD_QUEUE"


def folder(engine: str = LOCAL) -> Path:
    """The folder of the user's own queue: GPUHERD_QUEUE, else gpuherd/queue in XDG_STATE_HOME (~/.local/state). That of
    a cluster's engine is beside it: ``queue-slurm``.

    Nothing is touched. Raises UsageError when there is no home folder to look in.
    """
    base = _base()
    return base if engine == LOCAL else base.with_name(f"{base.name}-{engine}")


def in_use() -> tuple[EngineName, ...]:
    """The engines for which the user has a queue already."""
    return tuple(engine for engine in ENGINES if _is_in_use(engine))


def _is_in_use(engine: EngineName) -> bool:
    from gpuherd.jobs.reader import is_there  # with SQLite, which not every command needs

    try:
        return is_there(RunDirectory(folder(engine)).queue)
    except QueueUnreadable:
        return False  # the home folder is somebody else's: sudo, a container


def _base() -> Path:
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    state = os.environ.get("XDG_STATE_HOME", "")
    if state.startswith("/"):  # the standard says that a relative one is to be ignored
        return Path(state) / "gpuherd" / "queue"
    try:
        return Path.home() / ".local" / "state" / "gpuherd" / "queue"
    except RuntimeError:
        raise UsageError(f"there is no home folder for a queue; set {VARIABLE} to a folder") from None


def open_folder(path: Path | None = None, *, engine: str = LOCAL) -> RunDirectory:
    """The queue's run folder (``path``, else the user's own for the engine), made for its owner alone if need be.

    Raises CannotWrite when it can't be made, belongs to someone else, or others may write in it.
    """
    place = folder(engine) if path is None else Path(path).absolute()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.stat()
    except OSError as problem:
        raise CannotWrite(f"can't make {place}: {problem.strerror}; set {VARIABLE} to another folder") from None
    # Jobs and their environments are in it: whoever can write here runs what they like in our name.
    if status.st_uid != os.geteuid():
        raise CannotWrite(f"{place} belongs to someone else; set {VARIABLE} to a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotWrite(f"others may write in {place}; run: chmod go-w {place}")
    run = RunDirectory(place)
    run.create()
    return run
