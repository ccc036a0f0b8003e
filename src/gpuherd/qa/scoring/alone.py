"""One writer at a time in a folder of files that are written once: of two commands that begin together one waits."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuherd.atomic import remove_strays
from gpuherd.errors import CannotWrite
from gpuherd.jobs import clock


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Until the block ends nobody else who asks for it writes into the folder, which is made where it isn't there.

    What writers left behind that were killed is removed. Raises CannotWrite, for what goes wrong in the block too.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_strays(folder, clock.wall())
            yield
    except OSError as problem:
        raise CannotWrite(f"can't write into {folder}: {problem.strerror}") from None
