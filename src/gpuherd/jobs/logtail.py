"""An attempt's log as people read it: its end, without reading the whole of it, and what is added to it as it grows.

A log is a stranger's text. For a terminal each line is made harmless: no escape, control or direction characters; of a
progress bar that draws itself over and over only the last state is left.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from gpuherd.jobs.failures import clean, harmless

_TAIL_BYTES = 16_384
_MOST_TAIL = 67_108_864
_MOST_AT_ONCE = 1_048_576
_LONGEST_LINE = 4096


def tail(path: Path, most_bytes: int = _TAIL_BYTES) -> str:
    """The last bytes of the log as text; "" when it can't be read. Undecodable bytes become replacement characters."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            return file.read(most_bytes).decode("utf-8", "replace")
    except OSError:
        return ""


def last_lines(text: str, count: int = 20) -> list[str]:
    """The last lines that say anything, each clean enough for a terminal."""
    return [line for line in (clean(raw) for raw in text.splitlines()[-4 * count :]) if line][-count:]


def shown(line: str) -> str:
    """A line of a log for a terminal: harmless, its indentation kept, at most 4096 characters.

    >>> shown("  10%|#   \\r  90%|### \\x1b[2J")
    '  90%|###'
    """
    drawn = [part for part in line.split("\r") if part.strip()]
    text = harmless(drawn[-1].expandtabs() if drawn else "").rstrip()
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"


def tail_lines(path: Path, count: int) -> list[str]:
    """The last ``count`` lines of the log as they stand there; fewer if it is shorter, none if it can't be read.

    Read from the end in ever larger parts, so that a log of gigabytes costs no more than what is asked for.
    """
    size = _TAIL_BYTES
    while True:
        lines = tail(path, size).split("\n")
        if not lines[-1]:
            lines.pop()
        if len(lines) > count or size >= _MOST_TAIL or _size(path) <= size:
            return lines[-count:] if count else []
        size *= 8


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Growing:
    """A log that is being written: each ``more`` gives the lines that were completed since the last one.

    Args:
        path: the log; it may not be there yet.
        offset: byte at which to begin, by default the first.
    """

    def __init__(self, path: Path, offset: int = 0):
        self.path = path
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def more(self) -> list[str]:
        """The new whole lines, without their ends; [] when there is none or the log can't be read."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset, self._rest = 0, ""  # somebody has emptied it
                file.seek(self._offset)
                data = file.read(_MOST_AT_ONCE)
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        return lines

    def rest(self) -> list[str]:
        """What stands after the last end of a line, once nothing more will come."""
        lines = self.more()
        rest, self._rest = self._rest, ""
        return [*lines, rest] if rest else lines
