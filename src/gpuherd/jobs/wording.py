"""The words and figures in which a run is told to people, on a line, in a table or on a full screen: pure functions.

It knows no terminal and no styles. Whatever comes from a job passes through ``failures.clean`` here or before.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.engines.progress import Progress
from gpuherd.jobs.failures import clean
from gpuherd.jobs.records import Counts

_BAR = 20


def duration(seconds: float) -> str:
    """A length of time for people.

    >>> duration(4.4), duration(75), duration(5400), duration(200_000)
    ('4 s', '1 min 15 s', '1 h 30 min', '2 d 7 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def counted(counts: Counts, *, paused: int = 0, in_line: int = 0, eta_s: float | None = None) -> str:
    """Counts in one line. ``paused`` of the running and waiting ones don't go on by themselves; ``in_line`` of the
    running ones have been handed to an engine that has not begun them.

    >>> counted(Counts(waiting=12, running=4, done=3, failed=1), eta_s=300)
    '3 of 20 done, 1 failed, 4 running, 12 waiting, about 5 min 0 s left'
    """
    parts = [f"{counts.done} of {counts.total} done"]
    for number, word in ((counts.failed, "failed"), (counts.cancelled, "cancelled")):
        if number:
            parts.append(f"{number} {word}")
    parts += [f"{counts.running - in_line} running", f"{counts.waiting} waiting"]
    if in_line:
        parts.insert(-1, f"{in_line} handed over")
    if paused:
        parts.append(f"{paused} paused")
    if eta_s is not None and counts.running + counts.waiting:
        parts.append(f"about {duration(eta_s)} left")
    return ", ".join(parts)


def place(labels: Sequence[str]) -> str:
    """Where a job runs: ``GPU 0,3:1`` or ``CPU``."""
    return f"GPU {','.join(labels)}" if labels else "CPU"


def bar(told: Progress | None, width: int = _BAR) -> str:
    """How far a job is: a bar and figures where it said of how many, else what it has done.

    >>> bar(Progress(3, 12), 8)
    '━━╌╌╌╌╌╌ 3/12'
    """
    if told is None:
        return ""
    if not told.total:
        return f"{told.done} done"
    filled = round(min(1.0, told.done / told.total) * width)
    return f"{'━' * filled}{'╌' * (width - filled)} {told.done}/{told.total}"


def stage_and_time(told: Progress | None, elapsed_s: float, eta_s: float | None) -> str:
    """What a running job is at, and how long yet, or else for how long already."""
    time = f"{duration(eta_s)} left" if eta_s is not None else f"for {duration(elapsed_s)}"
    return ("" if told is None or not told.stage else clean(told.stage) + ", ") + time


def time_left(told: Progress | None, elapsed_s: float) -> float | None:
    """Seconds until a job is done if it goes on as it went so far; None while nothing can be said."""
    if told is None or not told.total or not 0 < told.done <= told.total:
        return None
    return elapsed_s * (told.total - told.done) / told.done
