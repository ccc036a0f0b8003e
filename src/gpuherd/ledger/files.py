"""The files of a ledger: their names, and how those of others are read. Knows lines of bytes and nothing of uses.

In one folder for all users (sticky where it is shared):
- ``<uid>.<year>-<month>.<number>.jsonl``: a *log*, which is only ever appended to: a line for each use that has ended,
  in the month of its end (UTC). A further number where one is full, or belongs to somebody else.
- ``<uid>.<process>.<number>.open``: the uses that one live process records and that have not ended, replaced as a whole
  at every sample. Its first line says which process that is.

The uid in a name only sorts; the owner is whom the kernel names. Every reader limits how much it reads of each owner.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuherd.engines.process_tree import ProcessId
from gpuherd.gpus.machine_dir import read_owned
from gpuherd.ledger.records import LONGEST_LINE

LOG_ENDING, OPEN_ENDING = ".jsonl", ".open"
_LOG_NAME = re.compile(r"(\d{1,10})\.(\d{4}-\d\d)\.(\d{1,3})\.jsonl", re.ASCII)
_OPEN_NAME = re.compile(r"(\d{1,10})\.([0-9a-f-]{1,60})\.(\d{1,3})\.open", re.ASCII)
# A writer goes on in a further file after so many bytes: about 100,000 uses.
FULL_LOG = 32 << 20
# What is read of one file, and of all of one owner; an open file is that of one process.
_MOST_OF_LOG = FULL_LOG + (1 << 20)
MOST_OF_OWNER = 512 << 20
MOST_OF_OPEN = 4 << 20
_MOST_OPEN_OF_OWNER = 2000
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LogName:
    """A log's place and what its name says: whose it should be, of which month, which number."""

    path: Path
    uid: int
    month: str
    number: int


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file as it was read: owner by the kernel, the process that it names, its lines without the first."""

    path: Path
    owner: int
    process: ProcessId
    lines: tuple[bytes, ...]
    written_at: float

    @property
    def is_live(self) -> bool:
        """Whether the process that wrote it still runs here."""
        return self.process.is_alive()


def month_of(wall: float) -> str:
    """The name of the month (UTC) of this wall-clock second.

    >>> month_of(1_800_000_000.0)
    '2027-01'
    """
    return time.strftime("%Y-%m", time.gmtime(max(0.0, wall)))


def log_path(folder: Path, uid: int, month: str, number: int) -> Path:
    """Where the log of this name lies."""
    return folder / f"{uid}.{month}.{number}{LOG_ENDING}"


def open_path(folder: Path, uid: int, process: ProcessId, number: int) -> Path:
    """Where the open file of a process lies. Another one of its pid and start was there before a restart at most."""
    return folder / f"{uid}.{process.pid}-{process.start_ticks:x}-{process.boot[:8]}.{number}{OPEN_ENDING}"


def logs_in(folder: Path, since: float = 0.0) -> list[LogName]:
    """The logs that may hold uses which ended at or after this wall-clock second, by user and age."""
    found = []
    first = month_of(since)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = _LOG_NAME.fullmatch(entry.name)
            if name is not None and name[2] >= first:
                found.append(LogName(Path(entry.path), int(name[1]), name[2], int(name[3])))
    return sorted(found, key=lambda log: (log.uid, log.month, log.number))


def open_files_in(folder: Path, owner: int | None = None) -> Iterator[OpenFile]:
    """All open files that can be read as such; or those of one owner."""
    count: dict[int, int] = {}
    paths = []
    with suppress(OSError), os.scandir(folder) as entries:
        paths = sorted(entry.path for entry in entries if _OPEN_NAME.fullmatch(entry.name))
    for path in paths:
        with suppress(OSError):
            state = os.lstat(path)
            if owner is not None and state.st_uid != owner:
                continue
            count[state.st_uid] = count.get(state.st_uid, 0) + 1
            if count[state.st_uid] <= _MOST_OPEN_OF_OWNER and (read := _read_open(Path(path), state)) is not None:
                yield read


def _read_open(path: Path, state: os.stat_result) -> OpenFile | None:
    found = read_owned(path, MOST_OF_OPEN + 1) if stat.S_ISREG(state.st_mode) else None
    if found is None or len(found[1]) > MOST_OF_OPEN:
        return None
    head, *lines = found[1].splitlines() or [b""]
    try:
        values = json.loads(head[:LONGEST_LINE])
        process = ProcessId(int(values["pid"]), int(values["start"]), str(values["boot"])[:64])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    if not 0 < process.pid < 2**31:
        return None
    return OpenFile(path, found[0], process, tuple(lines), state.st_mtime)


def open_text(process: ProcessId, lines: Iterable[bytes]) -> bytes:
    """The content of an open file."""
    head = json.dumps({"pid": process.pid, "start": process.start_ticks, "boot": process.boot})
    return head.encode("ascii") + b"\n" + b"".join(lines)


class LogReader:
    """The whole lines of one log, from where the last ``lines`` ended.

    Attributes:
        offset: so many bytes have been read.
        owner: by the kernel, None before anything was read.
        skipped: lines that are too long to be records.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.owner: int | None = None
        self.skipped = 0
        self._in_long_line = False

    def lines(self, most_bytes: int = _MOST_OF_LOG) -> Iterator[bytes]:
        """The lines that are whole by now. A line that never ends is passed over, and takes no memory."""
        most_bytes = min(most_bytes, _MOST_OF_LOG - self.offset)
        while most_bytes > 0:
            found = read_owned(self.path, min(_CHUNK, most_bytes), self.offset)
            if found is None or not found[1] or self.owner not in (None, found[0]):
                return
            self.owner, data = found
            end = data.rfind(b"\n") + 1
            if end == 0:
                if len(data) <= LONGEST_LINE:
                    return  # its end is not written yet
                if not self._in_long_line:
                    self.skipped += 1
                self._in_long_line = True
                end = len(data)
                self.offset += end
                most_bytes -= end
                continue
            self.offset += end
            most_bytes -= end
            lines = data[:end].splitlines()
            if self._in_long_line:
                self._in_long_line = False
                lines = lines[1:]
            for line in lines:
                if len(line) > LONGEST_LINE:
                    self.skipped += 1
                elif line:
                    yield line
