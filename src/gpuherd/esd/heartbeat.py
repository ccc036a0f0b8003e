"""A sign of life while a worker fetches a model: as long as bytes arrive on disk it tells its progress.

Between two matrices the pipeline tells it anyhow. A download of hours would look like a worker that hangs, and one that
hangs must not look like a download: so what counts is what this process has really written, by the kernel's account.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_EVERY_S = 20.0
_MB = 2**20


@contextmanager
def while_bytes_arrive(tell: Callable[[int], None], every_s: float = LOOK_EVERY_S) -> Iterator[None]:
    """While the context lasts, calls ``tell`` with the MB written so far (from a thread), whenever there are more."""
    over = threading.Event()
    before = written_bytes()

    def watch() -> None:
        last = before
        while not over.wait(every_s):
            now = written_bytes()
            if now > last:
                last = now
                tell((now - before) // _MB)

    thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def written_bytes() -> int:
    """Bytes that this process has written by system calls; 0 where the kernel does not say."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return 0
