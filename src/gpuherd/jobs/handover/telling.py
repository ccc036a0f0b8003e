"""The last words on an attempt, of its leader or of its guardian: the report of its end, the exit code, and a line for
the engine's file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpuherd.errors import ExitCode, one_line
from gpuherd.jobs.handover.manifest import Order
from gpuherd.jobs.handover.reports import Ended, write_ended

INTERRUPTED = int(ExitCode.BUSY)
_PAUSES_S = (0.1, 0.5, 2.0)


def tell(order: Order, ended: Ended, patience_s: float) -> int:
    """Writes the report, again and again for so long when it fails. Returns what the leader is to exit with."""
    until = time.monotonic() + patience_s
    for pause_s in pauses():
        try:
            write_ended(Path(order.ended), ended)
            break
        except OSError as problem:
            if time.monotonic() + pause_s > until:
                say(f"can't write {order.ended}: {problem.strerror}; nobody else will know this: {ended}")
                return ExitCode.FAILED
        time.sleep(pause_s)
    with suppress(OSError):
        order.status.unlink()
    return exit_code(ended)


def exit_code(ended: Ended) -> int:
    """0 for a success, 75 for what may run again as it is, 1 for a failure."""
    return ExitCode.OK if ended.well else INTERRUPTED if ended.interrupted else ExitCode.FAILED


def has_result(order: Order) -> bool:
    """Whether what the job was to make is there."""
    return order.result is None or Path(order.cwd or ".", order.result).exists()


def pauses() -> Iterator[float]:
    """Seconds between one try and the next, for ever."""
    yield from _PAUSES_S
    while True:
        yield _PAUSES_S[-1]


def say(text: str) -> None:
    """A line for the engine's file."""
    with suppress(OSError):
        sys.stderr.write(f"gpuherd: {one_line(text)}\n")
        sys.stderr.flush()
