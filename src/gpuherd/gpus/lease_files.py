"""The lock files of GPUs: their names, and opening, making, locking and testing one.

A GPU's locks are ``<uuid>.lock`` and, when one file does not do (``gpuherd.gpus.lease`` says when), ``<uuid>.1.lock``,
``<uuid>.2.lock`` and so on. Knows files and locks, and nothing of who may take what.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gpuherd.errors import CannotWrite
from gpuherd.exclusive import put_first

# How often a lock file may be found replaced or removed before we say that something is wrong.
TRIES = 50
# Someone who only looks whether a GPU is taken holds its lock for some microseconds.
_LOOKERS = 3
_LOOK_PAUSE_S = 0.0005
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class FileId:
    """A lock file that can't be mistaken for another: also a new one that got the number of a removed one differs in
    the time of its last change, which nobody can set."""

    inode: int
    owner: int
    changed_ns: int


@lru_cache(maxsize=1024)
def base_name(uuid: str) -> str:
    """A UUID as a file name: the old form of MIG UUIDs has slashes. Raises ValueError for what is no UUID."""
    name = uuid.replace("/", "_")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", name):
        raise ValueError(f"{uuid!r} is no GPU UUID")
    return name


def first_path(folder: Path, uuid: str) -> Path:
    """The lock file that everyone tries first."""
    return folder / f"{base_name(uuid)}.lock"


def further_paths(folder: Path, uuid: str, there: Sequence[str] | None = None) -> list[Path]:
    """The further lock files that are there now, in the order of their numbers. ``there``: the names of all files in
    the folder, for who asks about many GPUs at once."""
    beginning = base_name(uuid) + "."
    found = []
    for name in os.listdir(folder) if there is None else there:  # noqa: PTH208 - for every lease
        if name.startswith(beginning) and name.endswith(".lock"):
            number = name.removeprefix(beginning).removesuffix(".lock")
            if number.isdecimal() and len(number) <= 9:
                found.append((int(number), folder / name))
    return [path for _, path in sorted(found)]


def names_in(folder: Path) -> list[str]:
    """The names of all files in the folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def next_path(folder: Path, uuid: str) -> Path:
    """A name for one more lock file, above all that are there."""
    there = further_paths(folder, uuid)
    number = int(there[-1].name.split(".")[-2]) + 1 if there else 1
    return folder / f"{base_name(uuid)}.{number}.lock"


def open_lock(path: Path) -> int:
    """The lock file, made if need be, open for reading, which is enough to lock it.

    Raises CannotWrite when it can't be opened or is no plain file.
    """
    for _ in range(TRIES):
        # Without O_CREAT first: fs.protected_regular forbids it on another user's file in a sticky folder.
        fd = open_existing(path)
        if fd is None:
            fd = create_lock(path)
        if fd is not None:
            return fd
    raise CannotWrite(f"GPU lock {path} can't be opened: it comes and goes; is something clearing {path.parent}?")


def open_existing(path: Path) -> int | None:
    """The lock file, open; None when it is not there. Raises CannotWrite as ``open_lock`` does."""
    try:
        fd = os.open(path, _OPEN)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        hint = "its owner should make it readable for all"
        raise CannotWrite(f"GPU lock {path} can't be opened: {error.strerror}; {hint}") from None
    except OSError as error:
        raise CannotWrite(f"GPU lock {path} can't be opened: {error.strerror}; remove it") from None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise CannotWrite(f"GPU lock {path} is not a regular file; remove it")


def open_readable(path: Path) -> int | None:
    """A further lock file, open; None for what is none: those that gpuherd makes are plain and can be read by all."""
    try:
        return open_existing(path)
    except CannotWrite:
        return None


def create_lock(path: Path, *, locked: bool = False) -> int | None:
    """A new lock file, open; None if another process was faster. ``locked``: nobody meets it before we have locked it.

    It gets its name when all users can read it, whatever the umask says: if we are killed on the way, no lock is left
    behind that is closed to the others for good.
    """
    import tempfile  # slow to import, and most lock files are there

    try:
        fd, fresh = tempfile.mkstemp(prefix=".lock-", dir=path.parent)
    except OSError as error:
        raise CannotWrite(f"GPU lock {path} can't be made: {error.strerror}") from None
    try:
        if locked:
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.fchmod(fd, 0o644)
        if not put_first(Path(fresh), path):
            os.close(fd)
            return None
    except OSError as error:
        os.close(fd)
        raise CannotWrite(f"GPU lock {path} can't be made: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            Path(fresh).unlink()
    return fd


def lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks the file (LOCK_EX or LOCK_SH); False when someone holds it. Lookers are waited for."""
    for _ in range(_LOOKERS):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_PAUSE_S)
        else:
            return True
    return False


def is_locked(path: Path, kind: int = fcntl.LOCK_SH) -> bool:
    """Whether a lock of this kind can't be had now; False too when there is no such file, or it can't be read.

    With LOCK_SH: someone holds it as their own. With LOCK_EX: someone holds it at all, or looks at this moment.
    """
    try:
        fd = os.open(path, _OPEN)
    except OSError:
        return False
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_file_at(path: Path, fd: int) -> bool:
    """Whether the open file is still the one of this name; a lock on another is one that nobody else sees."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def is_safe_from_others(fd: int) -> bool:
    """Whether only we or root can remove the file: in a sticky folder, its owner decides."""
    return os.fstat(fd).st_uid in (0, os.geteuid())


def file_id(path: Path) -> FileId | None:
    """What tells this file apart; None when it is not there."""
    try:
        state = path.lstat()
    except OSError:
        return None
    return FileId(state.st_ino, state.st_uid, state.st_ctime_ns)
