"""A job's logs by its name: those of an attempt as they stand, or followed as they grow, over further attempts.

Which attempts there are the queue knows; how a log is read, ``logtail``. Text is passed on as it was written. Where a
job that was handed to an engine wrote nothing, perhaps because it never began, what the engine itself printed is shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import UsageError
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.attempts.log_file import Growing, size, start_of_last
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.job import ENDED, JobState
from gpuherd.jobs.monitor.job_status import Page
from gpuherd.jobs.monitor.status import attempts_of, job_names, opened, status_of
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.records import AttemptRow, AttemptState
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.options import did_you_mean

_LOOK_S = 0.2
_REASON_S = 2.0
_NUMBERS = re.compile(r"\d+")
_STANDS = {
    JobState.WAITING: "waits",
    JobState.RUNNING: "has not begun",
    JobState.CANCELLED: "was cancelled",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some lines of a job's log, without their ends. ``begins``: they are the first of this attempt that are told;
    ``ended_line``: the last of them is whole, and not the beginning of one that has no end yet.
    """

    job: str
    attempt: int
    state: AttemptState
    path: str
    lines: list[str]
    begins: bool = False
    ended_line: bool = True


def read(run: RunDirectory, job: str, attempt: int | None = None, last_lines: int | None = None) -> Iterator[Part]:
    """An attempt's log as it stands: the latest, or the one with this number; all of it, or only its last lines.

    Comes in parts of at most a megabyte, the first also when there is nothing in it. Raises UsageError, with the
    nearest name, for a job that is not there, and for one without (this) attempt.
    """
    with opened(run) as reader:
        found = _attempt(reader, job, attempt)
    if found is None:
        raise UsageError(f"job {clean(job)!r} has not been started yet, so it has no log; -f waits for it")
    path = log_of(run, found)
    if found.in_line and found.handed is not None and not size(path):
        raise UsageError(
            f"job {clean(job)!r} waits in {engine_name(found.handed.engine)} and has not begun, so it has no log; "
            "-f waits for it"
        )
    growing = _growing(path, last_lines, to_now=True)
    lines, begins = growing.rest(), True
    while lines or begins:
        yield _part(job, found, lines, growing, begins=begins)
        lines, begins = growing.rest(), False


def log_of(run: RunDirectory, attempt: AttemptRow) -> Path:
    """The file in which an attempt's words are: its log, or the engine's own output where it wrote none."""
    log, handed = Path(attempt.log), attempt.handed
    if handed is None or size(log):
        return log
    of_engine = run.engine_output(handed.batch, handed.index)
    return of_engine if size(of_engine) else log


def follow(
    run: RunDirectory,
    job: str,
    attempt: int | None = None,
    last_lines: int | None = None,
    look_s: float = _LOOK_S,
    on_wait: Callable[[str], None] = lambda _: None,
) -> Iterator[Part]:
    """The same, and then what is added, until the attempt has ended; without ``attempt`` until the job has.

    A job that has not been started yet is waited for. Raises as ``read``.

    Args:
        on_wait: gets a sentence whenever the job waits and the reason is another one, and when a job ends that never
            started.
    """
    with opened(run) as reader:
        current = _attempt(reader, job, attempt)
        if attempt is not None and current is None:
            raise UsageError(f"job {clean(job)!r} has no attempt {attempt} yet")
        waits = _WaitReporter(run, reader, job, on_wait)
        while current is None:
            waits.look()
            if _state(reader, job) in ENDED:
                return
            time.sleep(look_s)
            current = _attempt(reader, job, None)
        if current.in_line:
            waits.look()
        yield from _follow_attempt(run, reader, job, current, last_lines, look_s)
        while attempt is None:
            later = _later(reader, job, current.number)
            if later is not None:
                current = later
                yield from _follow_attempt(run, reader, job, current, None, look_s)
            elif _state(reader, job) in ENDED:
                return
            else:
                waits.look()
                time.sleep(look_s)


class _WaitReporter:
    """Reports why a job does not run, once for each reason."""

    def __init__(self, run: RunDirectory, reader: QueueReader, job: str, on_wait: Callable[[str], None]):
        self._run, self._reader, self._job, self._on_wait = run, reader, job, on_wait
        self._said: str | None = None
        self._next = 0.0

    def look(self) -> None:
        """Looks, once in ``_REASON_S`` at most."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REASON_S
        found = status_of(self._run, self._reader, Page(names=(self._job,))).jobs
        if not found or found[0].state not in _STANDS or (found[0].state is JobState.RUNNING and not found[0].reason):
            return
        reason = f": {clean(found[0].reason)}" if found[0].reason else ""
        said = f"job {clean(self._job)!r} {_STANDS[found[0].state]}{reason}"
        without_numbers = _NUMBERS.sub("", said)  # seconds until the next try, places in the queue
        if without_numbers != self._said:
            self._said = without_numbers
            self._on_wait(said)


def _follow_attempt(
    run: RunDirectory, reader: QueueReader, job: str, attempt: AttemptRow, last_lines: int | None, look_s: float
) -> Iterator[Part]:
    """One attempt's lines until it has ended."""
    growing, begins = _growing(Path(attempt.log), last_lines), True
    while True:
        # In this order: what it wrote before its end was recorded is in the log by then.
        ended = _has_ended(reader, attempt)
        lines = growing.rest() if ended else growing.more()
        if lines:
            yield _part(job, attempt, lines, growing, begins=begins)
            begins = False
        elif ended and begins and log_of(run, attempt) != growing.path:
            growing = _growing(log_of(run, attempt), last_lines)
        elif ended:
            return
        else:
            time.sleep(look_s)


def _growing(path: Path, last_lines: int | None, *, to_now: bool = False) -> Growing:
    """``to_now``: what is written from now on is left, else a job that writes faster than we read would never end."""
    return Growing(path, 0 if last_lines is None else start_of_last(path, last_lines), size(path) if to_now else None)


def _part(job: str, attempt: AttemptRow, lines: list[str], growing: Growing, *, begins: bool) -> Part:
    return Part(
        job=job,
        attempt=attempt.number,
        state=attempt.state,
        path=str(growing.path),
        lines=lines,
        begins=begins,
        ended_line=growing.ended_line,
    )


def _attempt(reader: QueueReader, job: str, number: int | None) -> AttemptRow | None:
    """The job's attempt with this number, or its latest; None while it has none at all."""
    found = attempts_of(reader, job)
    if not found:
        if _state(reader, job) is None:
            hint = did_you_mean(job, job_names(reader), show=clean)
            raise UsageError(f"there is no job {clean(job)!r} in this queue{hint}")
        return None
    if number is None:
        return found[-1]
    for attempt in found:
        if attempt.number == number:
            return attempt
    raise UsageError(f"job {clean(job)!r} has no attempt {number}; the latest is {found[-1].number}")


def _later(reader: QueueReader, job: str, number: int) -> AttemptRow | None:
    return next((attempt for attempt in attempts_of(reader, job) if attempt.number > number), None)


def _has_ended(reader: QueueReader, attempt: AttemptRow) -> bool:
    row = reader.one("SELECT state FROM attempts WHERE id = ?", (attempt.id,))
    return row is None or row["state"] != AttemptState.RUNNING


def _state(reader: QueueReader, job: str) -> JobState | None:
    row = reader.one("SELECT state FROM jobs WHERE name = ?", (job,))
    return None if row is None else JobState(row["state"])
