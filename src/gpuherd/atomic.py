"""Files and folders that are there as a whole or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# Gives a finished file its name unless that name is taken: atomically, so that one of several processes wins.
#
# A hard link does so everywhere that has them, over NFS too. File systems without them (exFAT, CIFS, much of FUSE)
# have a rename that replaces nothing; where that is missing as well, those that try take turns by a file that only
# one can make.

# Errors of file systems without hard links, and of files with the most links that the file system allows.
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_NO_SUCH_RENAME = frozenset({errno.EINVAL, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_AT_FDCWD, _NOREPLACE = -100, 1
# A turn takes less than a millisecond: after this long its process must have been killed.
_SILENT_S = 10.0
_PAUSE_S = 0.005


def put_first(finished: Path, path: Path) -> bool:
    """Gives a file, whose name only the caller knows, the name ``path``; False where there is such a file already.

    ``finished`` may keep its old name too; the caller removes that, if it is there. Raises OSError.
    """
    try:
        return link_first(finished, path)
    except OSError as problem:
        if problem.errno not in NO_LINKS:
            raise
    renamed = _rename(finished, path)
    return _in_turn(finished, path) if renamed is None else renamed


def link_first(finished: Path, path: Path) -> bool:
    """The same by a hard link alone: also over NFS one of several machines wins. Raises OSError, with an errno among
    ``NO_LINKS`` where the file system has none."""
    try:
        os.link(finished, path)
    except OSError as problem:
        # Over NFS the answer to a link may be lost though it was made: the number of names tells.
        with suppress(OSError):
            if _names(finished) == 2:
                return True
        if isinstance(problem, FileExistsError):
            return False
        raise
    return True


def _names(path: Path) -> int:
    """The number of hard links of a file. Opens the file, which makes an NFS client ask the server instead of using
    attributes that it cached seconds ago."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_nlink


def _rename(finished: Path, path: Path) -> bool | None:
    """Renames unless ``path`` is there; None where C library, kernel or file system can't. Raises OSError."""
    import ctypes  # slow to import, and nearly all file systems have links

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    if rename(_AT_FDCWD, os.fsencode(finished), _AT_FDCWD, os.fsencode(path), _NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number in _NO_SUCH_RENAME:
        return None
    raise OSError(number, os.strerror(number), str(finished), None, str(path))


def _in_turn(finished: Path, path: Path) -> bool:
    """Checks and renames while no other process does, under a lock file created exclusively."""
    turn = path.with_name(f".{path.name[:100]}.turn")
    while not _make(turn):
        if os.path.lexists(path):
            return False
        _wait(turn)
    try:
        if os.path.lexists(path):
            return False
        finished.rename(path)
        return True
    finally:
        turn.unlink(missing_ok=True)


def _make(turn: Path) -> bool:
    try:
        os.close(os.open(turn, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _wait(turn: Path) -> None:
    """Waits until another process's turn is over; removes the turn file of a killed process. Measures the time by our
    own clock, since clocks of machines differ."""
    with suppress(FileNotFoundError):
        met, until = _identity(turn), time.monotonic() + _SILENT_S
        while _identity(turn) == met:
            if time.monotonic() > until:
                turn.unlink()
                return
            time.sleep(_PAUSE_S)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


# Writing a file so that it is there as a whole or not at all, whenever the process or the machine dies.


def without_waiting(name: str, flags: int) -> int:
    """An ``opener`` for files in folders of others, where a name may be a FIFO: opening and reading it never waits for
    its other end. Raises OSError."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def atomic_write(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data``: temporary file there, sync, rename, sync of the folder. Raises OSError.

    A reader sees the old content or the new, never a part. A kill can leave a ``.<name>.*.tmp`` behind, nothing else.
    """
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """The same for what is written piece by piece: a binary file that takes the place of ``path`` when the block ends.

    When the block raises, the old content stays and the temporary file is removed. Raises OSError.

    Args:
        mode: who may do what with it; None for what the user's umask lets others do with a new file.
    """
    # Not by tempfile: a leader on a node begins once for each attempt, and that is slow to import.
    temporary = path.with_name(f".{path.name[:100]}.{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # whatever the umask
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def private_write(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data`` as ``atomic_write`` does, for its owner alone. Raises OSError."""
    with replacing(path, 0o600) as file:
        file.write(data)


def remove_strays(folder: Path, before: float) -> None:
    """Removes what ``atomic_write`` left in ``folder`` when it was killed, if last written before this wall-clock time.

    The caller knows that no process that began before then still writes here.
    """
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if path.is_file() and path.stat().st_mtime < before:
                path.unlink()


def append_line(path: Path, line: str) -> None:
    """Adds one line to a log of records, in one write, so that two writers' lines don't mix. Raises OSError."""
    data = (line.replace("\n", " ") + "\n").encode("utf-8", "backslashreplace")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in a folder survive a power cut. A file system that can't is left alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A folder that is there as a whole or not at all, whenever the process or the machine dies.


def aside(folder: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return folder.with_name(f".{folder.name}.tmp")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """An empty folder next to ``folder`` to be filled; when the block ends it takes its place, synced. Raises OSError.

    What stood there before is there until then (or, for the moment of the exchange, as ``.<name>.old``). When the block
    raises, it stays. A kill can leave ``.<name>.tmp`` behind, which the next start removes.
    """
    import shutil  # a leader on a node loads this module, and no shutil

    temporary = aside(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    publish(folder)


def publish(folder: Path) -> None:
    """Lets what lies aside take its name, all of it synced before."""
    import shutil  # a leader on a node loads this module, and no shutil

    temporary = aside(folder)
    for path in temporary.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            sync_file(path)
    sync_folder(temporary)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def settle(folder: Path) -> None:
    """Ends what a kill has left half done: the old folder gets its name back where the new one did not get it."""
    import shutil  # a leader on a node loads this module, and no shutil

    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for stray in (old, aside(folder)):
        with suppress(FileNotFoundError):
            shutil.rmtree(stray)


def sync_file(path: Path) -> None:
    """Puts a file's content on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
