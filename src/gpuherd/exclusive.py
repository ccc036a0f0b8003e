"""Gives a finished file its name unless that name is taken: atomically, so that one of several processes wins.

A hard link does so everywhere that has them, over NFS too. File systems without them (exFAT, CIFS, much of FUSE) have a
rename that replaces nothing; where that is missing as well, those that try take turns by a file that only one can make.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

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
        os.link(finished, path)
    except OSError as problem:
        # Over NFS the answer to a link may be lost though it was made: the number of names tells.
        with suppress(OSError):
            if _names(finished) == 2:
                return True
        if isinstance(problem, FileExistsError):
            return False
        if problem.errno not in NO_LINKS:
            raise
        renamed = _rename(finished, path)
        return _in_turn(finished, path) if renamed is None else renamed
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
