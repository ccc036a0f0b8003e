"""An attempt's log: its last lines, without reading all of it, and the lines added while it grows.

A log is untrusted text. For a terminal each line is sanitised: no escape, control or direction characters; of a
progress bar that redraws itself only the last state is kept.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from gpuherd.jobs.attempts.failures import clean, harmless

_TAIL_BYTES = 16_384
_BLOCK = 65_536
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


def size(path: Path) -> int:
    """Bytes in the log; 0 when it can't be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_lines(text: str, count: int = 20) -> list[str]:
    """The last lines that are not blank, each sanitised for a terminal."""
    return [line for line in (clean(raw) for raw in text.splitlines()[-4 * count :]) if line][-count:]


def shown(line: str) -> str:
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

        A line of over a megabyte comes in pieces. ``ended_line`` is False after one that goes on with the next.
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
