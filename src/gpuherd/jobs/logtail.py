"""The end of an attempt's log, read without reading the whole of it."""

from __future__ import annotations

import os
from pathlib import Path

from gpuherd.jobs.failures import clean

_TAIL_BYTES = 16_384


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
