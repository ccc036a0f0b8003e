"""Parts of a job's log for the page: the end of it first, then what is added, and what came before on request.

A log is a stranger's text in a file that may have any size, grow while it is read, or be replaced by something else.
So each part is read by position (a log of 10 GB costs no more than one of 64 KiB), from a plain file that belongs to
the run's owner: a link or a FIFO in its place shows nothing. Lines come as a terminal would show them, without escapes.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.jobs.monitor.logs import terminal_line

PART_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class LogPart:
    """Some lines of a log.

    Attributes:
        lines: whole lines, safe to show anywhere.
        rest: what was written after the last end of a line: of a progress bar its latest state.
        start, end: the bytes that the lines are made of; ``rest`` begins at ``end``.
        size: bytes in the whole file at that moment.
        inode: the file that it was: another one by this name is another log.
        skipped: bytes before ``start`` that were passed over, where a log grew faster than it is shown.
        is_whole: it takes the place of all that was shown before.
    """

    lines: tuple[str, ...]
    rest: str
    start: int
    end: int
    size: int
    inode: int
    skipped: int = 0
    is_whole: bool = False

    @property
    def text(self) -> str:
        """The lines, each with an end."""
        return "".join(f"{line}\n" for line in self.lines)


def read_end(path: Path, owner: int, before: int | None = None) -> LogPart | None:
    """The last lines of a log, or the last before a byte; None where there is no log that can be shown.

    Args:
        owner: the user whose file it must be.
        before: where a later part begins (its ``start``).
    """
    with _Log(path, owner) as log:
        return None if log.state is None else _end(log, log.state, before)


def read_on(path: Path, owner: int, known: LogPart) -> LogPart | None:
    """What was added since a part was read; None while nothing has changed, or there is no log.

    Of a log that was cut short or replaced, and of one that grew by more than is read at once, the end (``is_whole``).
    """
    with _Log(path, owner) as log:
        if log.state is None or (log.state.st_ino == known.inode and log.state.st_size == known.size):
            return None
        if log.state.st_ino != known.inode or log.state.st_size < known.size:
            return replace(_end(log, log.state), is_whole=True)
        data = log.read(known.end, PART_BYTES + 1)
        if len(data) > PART_BYTES:
            part = _end(log, log.state)
            return replace(part, is_whole=True, skipped=max(0, part.start - known.end))
        return _part(data, known.end, log.state)


def _end(log: _Log, state: os.stat_result, before: int | None = None) -> LogPart:
    end = state.st_size if before is None else max(0, min(before, state.st_size))
    start = max(0, end - PART_BYTES)
    data = log.read(start, end - start)
    first = data.find(b"\n") + 1
    # The part begins within a line, unless that line is all there is.
    return _part(data[first:], start + first, state) if start and first else _part(data, start, state)


def _part(data: bytes, start: int, state: os.stat_result) -> LogPart:
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].decode("utf-8", "replace").split("\n")[:-1]
    rest = terminal_line(data[whole:].decode("utf-8", "replace"))
    return LogPart(tuple(map(terminal_line, lines)), rest, start, start + whole, state.st_size, state.st_ino)


class _Log:
    """An open log. ``state`` is None where there is none: no plain file, not the owner's, gone, or unreadable."""

    def __init__(self, path: Path, owner: int):
        self.state: os.stat_result | None = None
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            state = os.fstat(self._fd)
        except (OSError, ValueError):
            return
        if stat.S_ISREG(state.st_mode) and state.st_uid == owner:
            self.state = state

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, start: int, size: int) -> bytes:
        """So many bytes from there, or fewer. Empty where that fails."""
        try:
            return os.pread(self._fd, size, start)
        except OSError:
            return b""
