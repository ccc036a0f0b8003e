"""Who may use a GPU, among all gpuherds of the machine: a kernel lock per GPU in a folder that all users share.

The lock (``flock`` on ``<uuid>.lock``) belongs to the open file, not to a process. The dispatcher takes it and hands
its file descriptor to the job, so that it lives as long as any process of the job, outlives a dispatcher that is
killed, and ends with the last of them, by the kernel and without any cleaning up. The file's content means nothing.

Knows locks and nothing of GPUs. No lock file is ever unlinked: one that another process has open would become a lock
that nobody else can see. Containers share leases only if they share the folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gpuherd.errors import CannotWrite
from gpuherd.gpus.lease_notes import Note, owner_of_process, pid_in_kernel_table, read_notes, write_note
from gpuherd.gpus.lease_place import existing_place, make_place, refuse_unsafe, user_name

# How often a lock file may be found replaced or removed before we say that something is wrong.
_TRIES = 50
# Someone who only looks whether a GPU is taken holds its lock for some microseconds.
_LOOKERS = 3
_LOOK_PAUSE_S = 0.0005
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """What others are told of a lease: the job's name, if they may know it. Pid, user and time are added."""

    job: str | None = None


NO_NOTE = LeaseNote()


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a GPU. What can't be known for sure is None; ``since`` is in seconds since 1970."""

    uuid: str
    pid: int | None = None
    user: str | None = None
    since: float | None = None
    job: str | None = None


class Lease:
    """A taken GPU. Pass ``fd`` to the job (``pass_fds``); it holds the GPU until every copy of it is closed."""

    def __init__(self, uuid: str, fd: int) -> None:
        self.uuid = uuid
        self._fd: int | None = fd

    @property
    def fd(self) -> int:
        """The open lock file. No child inherits it by itself: ``pass_fds`` gives it to the one that is meant."""
        if self._fd is None:
            raise ValueError(f"the lease of {self.uuid} is closed")
        return self._fd

    def close(self) -> None:
        """Drops this process's copy. The GPU stays taken while a job has the other."""
        # Not LOCK_UN: that would free the lock for every copy at once.
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LeaseFolder:
    """The folder of locks. All users of the machine must use the same one.

    Raises:
        CannotWrite: the folder is a symbolic link, no folder, closed to this user, or lets everyone replace the files
            of others. The message says what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_unsafe(path)

    @staticmethod
    def default() -> LeaseFolder:
        """The folder that GPUHERD_LEASE_DIR names, else the machine's usual one; made if it is not there."""
        return LeaseFolder(existing_place() or make_place())

    @staticmethod
    def existing() -> LeaseFolder | None:
        """The default folder if it is there: for those who only look."""
        place = existing_place()
        return None if place is None else LeaseFolder(place)

    def acquire(self, uuid: str, note: LeaseNote = NO_NOTE) -> Lease | None:
        """Takes the GPU for whoever holds the lease's file descriptor; None if someone has it already.

        Raises:
            CannotWrite: the lock file can't be made or opened.
        """
        path = self._lock_path(uuid)
        for _ in range(_TRIES):
            fd = _open_lock(path)
            try:
                if not _lock(fd):
                    os.close(fd)
                    return None
                if _is_file_at(path, fd):
                    told = Note(pid=os.getpid(), uid=os.geteuid(), since=time.time(), job=note.job)
                    write_note(self.path, _file_name(uuid), told)
                    return Lease(uuid, fd)
            except BaseException:
                os.close(fd)
                raise
            # The file was removed or replaced between opening and locking: this lock is one that no other sees.
            os.close(fd)
        raise CannotWrite(f"{path} is replaced again and again; is something clearing {self.path}?")

    def holder(self, uuid: str) -> Holder | None:
        """Who holds the GPU, or None if nobody of gpuherd does."""
        path = self._lock_path(uuid)
        try:
            file = path.lstat()
        except OSError:
            return None
        pid = pid_in_kernel_table(file)
        # In a container the kernel's table hides locks whose taker has ended; trying the lock finds those too.
        if pid is None and not _is_locked(path):
            return None
        return self._describe(uuid, pid)

    def _describe(self, uuid: str, pid: int | None) -> Holder:
        notes = [note for note in read_notes(self.path, _file_name(uuid)) if pid is None or note.pid == pid]
        owner = None if pid is None else owner_of_process(pid)
        if owner is not None:
            if not notes:
                return Holder(uuid, pid, user_name(owner))
            notes = [note for note in notes if note.uid == owner]
        # Two users who both claim to be a process that has ended can't be told apart.
        if not notes or (pid is not None and len({note.uid for note in notes}) > 1):
            return Holder(uuid, pid)
        newest = max(notes, key=lambda note: note.since)
        return Holder(uuid, newest.pid, user_name(newest.uid), newest.since, newest.job)

    def _lock_path(self, uuid: str) -> Path:
        return self.path / f"{_file_name(uuid)}.lock"


def _file_name(uuid: str) -> str:
    """A UUID as a file name: the old form of MIG UUIDs has slashes."""
    name = uuid.replace("/", "_")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", name):
        raise ValueError(f"{uuid!r} is no GPU UUID")
    return name


def _open_lock(path: Path) -> int:
    """The lock file, made if need be, open for reading, which is enough to lock it."""
    for _ in range(_TRIES):
        try:
            # Without O_CREAT first: fs.protected_regular forbids it on another user's file in a sticky folder.
            return _only_regular(os.open(path, _OPEN), path)
        except FileNotFoundError:
            fd = _create_lock(path)
            if fd is not None:
                return fd
        except PermissionError as error:
            hint = "its owner should make it readable for all"
            raise CannotWrite(f"GPU lock {path} can't be opened: {error.strerror}; {hint}") from None
        except OSError as error:
            raise CannotWrite(f"GPU lock {path} can't be opened: {error.strerror}; remove it") from None
    raise CannotWrite(f"GPU lock {path} can't be opened: it comes and goes; is something clearing {path.parent}?")


def _create_lock(path: Path) -> int | None:
    """A new lock file, open; None if another process was faster.

    It gets its name when all users can read it, whatever the umask says: if we are killed on the way, no lock is left
    behind that is closed to the others for good.
    """
    try:
        fd, fresh = tempfile.mkstemp(prefix=".lock-", dir=path.parent)
    except OSError as error:
        raise CannotWrite(f"GPU lock {path} can't be made: {error.strerror}") from None
    try:
        os.fchmod(fd, 0o644)
        os.link(fresh, path)
    except OSError as error:
        os.close(fd)
        if isinstance(error, FileExistsError):
            return None
        raise CannotWrite(f"GPU lock {path} can't be made: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            Path(fresh).unlink()
    return fd


def _only_regular(fd: int, path: Path) -> int:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise CannotWrite(f"GPU lock {path} is not a regular file; remove it")


def _lock(fd: int) -> bool:
    for _ in range(_LOOKERS):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_PAUSE_S)
        else:
            return True
    return False


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, _OPEN)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_file_at(path: Path, fd: int) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
