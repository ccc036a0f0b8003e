"""One dispatcher a queue: a kernel lock on a file beside it, gone with the process that held it, however it died."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from gpuherd.errors import CannotWrite, QueueBusy


class DispatcherLock:
    """Held from construction to ``close``. Raises QueueBusy, naming the holder's pid, when another process holds it."""

    def __init__(self, path: Path):
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            raise CannotWrite(f"can't write {path}: {problem.strerror}") from problem
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._fd, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise QueueBusy(
                f"another gpuherd (pid {pid}) works on {path.parent}; wait for it, stop it, or use another folder"
            ) from None
        with suppress(OSError):  # a full disk: the lock is a lock without the pid too
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Gives the lock back. The file stays: removing it would let two processes lock two files of one name."""
        os.close(self._fd)
