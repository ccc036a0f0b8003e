"""The last words on an attempt, of its leader or of its guardian: the report of its end, the exit code, and a line for
the engine's file.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpuherd.engines.local import CannotStart
from gpuherd.engines.stop import Stop
from gpuherd.errors import ExitCode, one_line
from gpuherd.jobs.handover.manifest import Order
from gpuherd.jobs.handover.reports import Ended, write_ended

T = TypeVar("T")

INTERRUPTED = int(ExitCode.BUSY)
_PAUSES_S = (0.1, 0.5, 2.0)
_FOR_GOOD = frozenset({errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EOPNOTSUPP})


def tell(order: Order, ended: Ended, patience_s: float) -> None:
    """Writes the report, again and again for so long when it fails. Raises OSError when that was no use."""
    patiently(lambda: write_ended(Path(order.ended), ended), f"can't write {order.ended}, that is {ended}", patience_s)
    for path in (order.status, order.first_failure):
        with suppress(OSError):
            path.unlink()


def exit_code(ended: Ended) -> int:
    """0 for a success, 75 for what may run again as it is, 1 for a failure."""
    return ExitCode.OK if ended.well else INTERRUPTED if ended.interrupted else ExitCode.FAILED


def has_result(order: Order) -> bool:
    """Whether what the job was to make is there."""
    return order.result is None or Path(order.cwd or ".", order.result).exists()


def patiently(act: Callable[[], T], trouble: str, patience_s: float, stop: Stop | None = None) -> T:
    """What ``act`` returns, tried again for so long, and no longer than until we are stopped, while it fails in a way
    that may pass. Raises what it raised last: OSError, CannotStart.
    """
    until, told, tries = time.monotonic() + patience_s, False, 0
    while True:
        pause_s = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
        try:
            return act()
        except (OSError, CannotStart) as problem:
            if not _may_pass(problem) or time.monotonic() + pause_s > until or (stop is not None and stop.asked):
                raise
            if not told:
                say(f"{trouble}: {problem}; trying again for {patience_s:g} s")
        told, tries = True, tries + 1
        time.sleep(pause_s)


def say(text: str) -> None:
    """A line for the engine's file."""
    with suppress(OSError):
        sys.stderr.write(f"gpuherd: {one_line(text)}\n")
        sys.stderr.flush()


def _may_pass(problem: OSError | CannotStart) -> bool:
    return problem.may_pass if isinstance(problem, CannotStart) else problem.errno not in _FOR_GOOD
