"""A job's logs by its name: of an attempt as they are now, or followed as they grow, over further attempts.

Text is passed on as it was written; it is untrusted: ``terminal_line`` makes a line safe for a terminal. Where a job
in an engine wrote nothing, perhaps because it never began, the output of the engine itself is shown.
"""

from __future__ import annotations

import codecs
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import UsageError, clean, harmless
from gpuherd.jobs.attempts.failures import size
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.job import ENDED, JobState
from gpuherd.jobs.monitor.job_status import JobSelection
from gpuherd.jobs.monitor.status import attempts_of, job_names, opened, status_of
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.records import AttemptRow, AttemptState
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.options import did_you_mean

_LOOK_S = 0.2
_REASON_S = 2.0
_BLOCK = 65_536
_MOST_AT_ONCE = 1_048_576
_LONGEST_LINE = 4096
_NUMBERS = re.compile(r"\d+")
_STATE_WORDS = {
    JobState.WAITING: "waits",
    JobState.RUNNING: "has not begun",
    JobState.CANCELLED: "was cancelled",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some lines of a job's log, without line ends. ``begins``: it is the first part of this attempt; ``ended_line``:
    its last line is complete.
    """

    job: str
    attempt: int
    state: AttemptState
    path: str
    lines: list[str]
    begins: bool = False
    ended_line: bool = True


def read(run: RunDirectory, job: str, attempt: int | None = None, last_lines: int | None = None) -> Iterator[Part]:
    """The log of an attempt as it is now: of the latest, or of the one with this number; all of it, or its last lines.

    Comes in parts of at most a megabyte, the first one also when it is empty. Raises UsageError, with the nearest name,
    for an unknown job, and for one without (this) attempt.
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
    """The file with an attempt's output: its log, or the engine's own output where the log is empty."""
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
    """The log as ``read`` gives it, then all that is added until the attempt has ended; without ``attempt`` until the
    job has.

    Waits for a job that has not been started yet. Raises as ``read``.

    Args:
        on_wait: gets a sentence when the job waits and the reason has changed, and when a job ends that never started.
    """
    with opened(run) as reader:
        if _attempt(reader, job, attempt) is None and attempt is not None:
            raise UsageError(f"job {clean(job)!r} has no attempt {attempt} yet")
        waits, followed = _WaitReporter(run, reader, job, on_wait), 0
        while True:
            current = _later(reader, job, followed) if followed else _attempt(reader, job, attempt)
            if current is None:
                waits.look()
                if _state(reader, job) in ENDED:
                    return
                time.sleep(look_s)
                continue
            if current.in_line:
                waits.look()
            yield from _follow_attempt(run, reader, job, current, None if followed else last_lines, look_s)
            if attempt is not None:
                return
            followed = current.number


class _WaitReporter:
    """Reports why a job does not run, once for each reason."""

    def __init__(self, run: RunDirectory, reader: QueueReader, job: str, on_wait: Callable[[str], None]):
        self._run, self._reader, self._job, self._on_wait = run, reader, job, on_wait
        self._reported: str | None = None
        self._next = 0.0

    def look(self) -> None:
        """Looks, once in ``_REASON_S`` at most."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _REASON_S
        job = next(iter(status_of(self._run, self._reader, JobSelection(names=(self._job,))).jobs), None)
        if job is None or job.state not in _STATE_WORDS or (job.state is JobState.RUNNING and not job.reason):
            return
        reason = f": {clean(job.reason)}" if job.reason else ""
        sentence = f"job {clean(self._job)!r} {_STATE_WORDS[job.state]}{reason}"
        without_numbers = _NUMBERS.sub("", sentence)  # seconds until the next try, places in the queue
        if without_numbers != self._reported:
            self._reported = without_numbers
            self._on_wait(sentence)


def _follow_attempt(
    run: RunDirectory, reader: QueueReader, job: str, attempt: AttemptRow, last_lines: int | None, look_s: float
) -> Iterator[Part]:
    """One attempt's lines until it has ended."""
    growing, begins = _growing(Path(attempt.log), last_lines), True
    while True:
        # In this order: all that it wrote is in the log once its end is recorded.
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
    """``to_now``: up to the present size, as a job may write faster than we read."""
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
    return bool(reader.value("SELECT state FROM attempts WHERE id = ?", (attempt.id,)) != AttemptState.RUNNING)


def _state(reader: QueueReader, job: str) -> JobState | None:
    state = reader.value("SELECT state FROM jobs WHERE name = ?", (job,))
    return None if state is None else JobState(state)


# --- the file -------------------------------------------------------------------------------------------------------


def terminal_line(line: str) -> str:
    """A line of a log for a terminal: sanitised, its indentation kept, at most 4096 characters.

    >>> shown("  10%|#   \\r  90%|### \\x1b[2J")
    '  90%|###'
    """
    drawn = [part for part in line.split("\r") if part.strip()]
    text = harmless(drawn[-1].expandtabs() if drawn else "").rstrip()
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"


def start_of_last(path: Path, count: int) -> int:
    """The byte at which the last ``count`` lines of the log begin; 0 if it is shorter or can't be read.

    The file is read from its end, so that a log of gigabytes costs no more than the requested lines.
    """
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            left = count
            at_end = True
            while position > 0:
                size = min(_BLOCK, position)
                position -= size
                file.seek(position)
                block = file.read(size)
                if at_end and block.endswith(b"\n"):
                    left += 1  # that one ends the last line and begins none
                at_end = False
                found = len(block)
                while left > 0 and (found := block.rfind(b"\n", 0, found)) >= 0:
                    left -= 1
                    if left == 0:
                        return position + found + 1
    except OSError:
        return 0
    return 0


class Growing:
    """A log that may still grow: each ``more`` returns the lines completed since the last call.

    Bytes that are not UTF-8 become lone surrogates, so that encoding with ``surrogateescape`` restores them. A log that
    was truncated or replaced is read from its beginning.

    Args:
        path: the log; it need not exist yet.
        offset: byte at which to begin, by default the first.
        end: byte at which to stop, None to go on for as long as it grows.
    """

    def __init__(self, path: Path, offset: int = 0, end: int | None = None):
        self.path = path
        self.ended_line = True
        self._offset = offset
        self._end = end
        self._inode: int | None = None
        self._decoder = _decoder()
        self._rest = ""

    def more(self) -> list[str]:
        """New whole lines, without their ends, about a megabyte at most; [] when there is none, or no log to read.

        A line of over a megabyte comes in pieces. ``ended_line`` is False after one that the next piece continues.
        """
        data = self._read()
        self._offset += len(data)
        self.ended_line = True
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        if len(self._rest) > _MOST_AT_ONCE:
            # A line that never ends must not be kept, and copied, for ever.
            lines.append(self._rest)
            self._rest, self.ended_line = "", False
        return lines

    def rest(self) -> list[str]:
        """As ``more``; when there is nothing new, the text after the last end of a line."""
        lines = self.more()
        if lines:
            return lines
        rest, self._rest = self._rest + self._decoder.decode(b"", True), ""
        self.ended_line = not rest
        return [rest] if rest else []

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_size < self._offset or self._inode not in (None, about.st_ino):
                    self._offset, self._rest, self._decoder = 0, "", _decoder()
                self._inode = about.st_ino
                file.seek(self._offset)
                left = _MOST_AT_ONCE if self._end is None else max(0, self._end - self._offset)
                return file.read(min(_MOST_AT_ONCE, left))
        except OSError:
            return b""


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("surrogateescape")
