"""The folder for the files of a cluster of our own. Whoever has it holds a lock on it, and so does the process beside
Ray: one that nobody holds was left by processes that were all killed at once, and goes when the next one is made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

# Ray's sockets lie below it, and a socket's path must be short.
_PLACE = Path("/tmp")  # noqa: S108 - made by mkdtemp
_PREFIX = "gpuherd-ray."


class OwnFolder:
    """A new one. Raises OSError where none can be made.

    Attributes:
        path: the folder.
        hold: the descriptor that has the lock; a process that inherits it holds it too.
    """

    def __init__(self, place: Path = _PLACE):
        for left in place.glob(f"{_PREFIX}*"):
            _remove_left(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            try:
                self.hold = _locked(self.path, fcntl.LOCK_EX)
            except FileNotFoundError:
                continue
            if self.path.exists():
                return
            os.close(self.hold)  # somebody took it for one that was left, before we had the lock

    def remove(self) -> None:
        """Removes it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.hold)


def _locked(path: Path, kind: int) -> int:
    """A descriptor of the folder that has the lock. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_left(path: Path) -> None:
    try:
        if path.lstat().st_uid != os.geteuid():
            return
        descriptor = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or gone
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
