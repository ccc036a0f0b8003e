"""A FIFO in the run folder that wakes the dispatcher: what is asked lies in the queue, the bell only rings.

The dispatcher sleeps until it rings, without looking at the queue in between. A bell that nobody hears is not there:
ringing says so.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_BYTES = 4096


class Doorbell:
    """The dispatcher's end. ``fileno`` becomes readable when somebody has rung.

    Raises OSError where the file system has no FIFOs, or something else lies in the place.
    """

    def __init__(self, path: Path):
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # For writing too: else the end of the last who rang would make it readable for ever.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise FileExistsError(f"{path} is no FIFO; remove it")

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._fd

    def hush(self) -> None:
        """Takes note of the ringing; to be called before looking what is asked, so that nothing is missed."""
        with suppress(BlockingIOError):
            while len(os.read(self._fd, _BYTES)) == _BYTES:
                pass

    def close(self) -> None:
        """Nobody listens any more."""
        os.close(self._fd)


def ring(path: Path) -> bool:
    """Rings. False when nobody listens."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        with suppress(BlockingIOError):  # full: it rings already
            os.write(fd, b"!")
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
