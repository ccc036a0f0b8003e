"""One dispatcher a queue: a kernel lock on a file beside it, gone with the process that held it, however it died."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from gpuherd.engines.process_tree import boot_id
from gpuherd.errors import CannotWrite, QueueBusy
from gpuherd.jobs.one_host import busy_there, machine_name, refuse_elsewhere
from gpuherd.jobs.run_dir import RunDirectory

# Who only does what somebody asked of an idle queue is done in a moment, or after a job's grace.
_PATIENCE_S = 20.0
_LOOK_S = 0.02
# Who only asks who holds the lock has it for some microseconds, whatever the file says meanwhile.
_LOOKERS_S = 0.06
# The file is empty when the lock has just been taken, or is about to be given back.
_CHANGING_HANDS_S = 0.5


class Role(StrEnum):
    """What the holder does with the queue."""

    DISPATCHER = "dispatcher"
    CONTROL = "control"


class DispatcherLock:
    """Held from construction to ``close``. Raises QueueBusy, naming the holder's pid, when another process holds it,
    QueueElsewhere when another machine works on the queue beside it, and CannotWrite.

    A dispatcher waits for one who only does something that was asked of the idle queue.
    """

    def __init__(self, path: Path, role: Role = Role.DISPATCHER):
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            raise CannotWrite(f"can't write {path}: {problem.strerror}") from problem
        try:
            self._wait(path, role)
            run = RunDirectory(path.parent)
            if path.absolute() == run.lock:
                # Where locks of one machine don't hold another off, this does. (A job's own lock, as of a training in
                # the folder of its queue, is taken on a node of a cluster, and says nothing about the queue.)
                refuse_elsewhere(run.queue)
        except BaseException:
            os.close(self._fd)
            raise
        with suppress(OSError):  # a full disk: the lock is a lock without the pid too
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()} {role} {boot_id()} {machine_name()}\n".encode(), 0)

    def _wait(self, path: Path, role: Role) -> None:
        before: Role | None = role
        since = time.monotonic()
        while not _try(self._fd, path):
            pid, held_as, there = _read(self._fd)
            if held_as is not before:
                before, since = held_as, time.monotonic()
            if time.monotonic() - since < _patience_s(role, held_as):
                time.sleep(_LOOK_S)
                continue
            if there is not None:
                raise busy_there(there, pid, path.parent)
            raise QueueBusy(
                f"another gpuherd (pid {pid or 'unknown'}) works on {path.parent}; wait for it, stop it, or use another"
                " folder"
            )

    def close(self) -> None:
        """Gives the lock back. The file stays: removing it would let two processes lock two files of one name."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)

    @staticmethod
    def holder(path: Path) -> int | None:
        """The pid of the dispatcher that holds the lock, None when none does or it is not known.

        Raises QueueElsewhere for one on another machine.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if _try(fd, path, shared=True):
                return None
            pid, role, there = _read(fd)
            if there is not None and role is Role.DISPATCHER:
                raise busy_there(there, pid, path.parent)
            return pid if role is Role.DISPATCHER else None
        finally:
            os.close(fd)


def _patience_s(role: Role, held_as: Role | None) -> float:
    """How long whoever wants the lock in a role waits for one who holds it in another; None: that is not known."""
    if held_as is None:
        return _CHANGING_HANDS_S
    return _PATIENCE_S if (role, held_as) == (Role.DISPATCHER, Role.CONTROL) else _LOOKERS_S


def _try(fd: int, path: Path, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        raise CannotWrite(
            f"the file system of {path} gives no locks ({problem.strerror}); use a folder"
            " on another one, or have it mounted with locks (Lustre: -o flock)"
        ) from problem
    return True


def _read(fd: int) -> tuple[int | None, Role | None, str | None]:
    """The holder's pid and role, and its machine's name when that is not this one."""
    words = os.pread(fd, 512, 0).decode("utf-8", "replace").split()
    pid = int(words[0]) if words and words[0].isdigit() else None
    # A lock of an older gpuherd holds a pid alone: that of a dispatcher.
    role = Role(words[1]) if len(words) > 1 and words[1] in set(Role) else Role.DISPATCHER
    there = words[3] if len(words) > 3 and words[2] != boot_id() else None
    return pid, role if pid is not None else None, there
