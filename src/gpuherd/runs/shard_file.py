"""The lines of a shard as they come: JSON lines, a batch synced as a whole, so that a kill at any instant loses at
most the batch that is under way.

Lines stand in the order of the shard's batches. So the number of whole lines says what is done, and what a killed
writer left of a batch is cut off when the file is opened again. With ``sealed`` each line carries a checksum behind a
tab, so that a line is whole only where no bit of it has changed; lines without one, of versions before, are whole
where they are JSON.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

from gpuherd.atomic import sync_folder
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError

logger = logging.getLogger(__name__)

_DIGITS = 8  # of a checksum: CRC-32 in hex


@dataclass(frozen=True, slots=True)
class Shard:
    """A job's items, in batches: processed and written in this order, each batch as a whole."""

    batches: tuple[tuple[int, ...], ...]

    @property
    def items(self) -> tuple[int, ...]:
        """All of them, in the order in which they are written."""
        return tuple(item for batch in self.batches for item in batch)


class ShardBusy(GpuherdError):
    """Another process writes this shard."""

    exit_code = ExitCode.BUSY


class ShardFile:
    """A shard's file, open for appending; this process is the only one that has it.

    Args:
        path: the file, made if it is not there.
        shard: its batches.
        sealed: lines are written with a checksum, for readers that take it off (``unsealed``).

    Raises:
        ShardBusy: another process writes it.
        CannotWrite: it can't be opened or written.
    """

    def __init__(self, path: Path, shard: Shard, *, sealed: bool = False):
        self._path, self._shard, self._sealed = path, shard, sealed
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as problem:
            raise CannotWrite(f"can't write {path}: {problem.strerror}") from None
        try:
            self._lock()
            self.done = self._cut_back()
            sync_folder(path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def todo(self) -> tuple[tuple[int, ...], ...]:
        """The batches that are not written yet, in order."""
        return self._shard.batches[self.done :]

    def append(self, lines: Sequence[str]) -> None:
        """Adds the lines of the next batch, one an item in the batch's order, and syncs. Raises CannotWrite."""
        batch = self._shard.batches[self.done]
        if len(lines) != len(batch) or any("\n" in line for line in lines):
            raise ValueError(f"{len(lines)} lines for {len(batch)} items; each is one line")
        written = (line.encode("utf-8") for line in lines)
        data = memoryview(b"".join((sealed(line) if self._sealed else line) + b"\n" for line in written))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as problem:
            raise CannotWrite(f"can't write {self._path}: {problem.strerror}") from None
        self.done += 1

    def close(self) -> None:
        """Closes the file, which releases its lock."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShardBusy(f"another process writes {self._path}; wait until it has ended") from None

    def _cut_back(self) -> int:
        """Cuts off what is not a whole batch. Returns the number of batches that stay."""
        ends = line_ends(self._path)
        if _has_line_behind(self._path, ends[-1] if ends else 0):
            message = "%s, line %d is damaged: it and all lines after it are made again"
            logger.warning(message, self._path, len(ends) + 1)
        done = _complete_batches(len(ends), self._shard)
        lines = sum(map(len, self._shard.batches[:done]))
        try:
            os.ftruncate(self._descriptor, ends[lines - 1] if lines else 0)
            os.fsync(self._descriptor)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as problem:
            raise CannotWrite(f"can't write {self._path}: {problem.strerror}") from None
        return done


def batches_done(path: Path, shard: Shard) -> int:
    """The number of whole batches in a shard's file; 0 if there is no file."""
    return _complete_batches(len(line_ends(path)), shard) if path.exists() else 0


def _complete_batches(lines: int, shard: Shard) -> int:
    return sum(whole <= lines for whole in accumulate(len(batch) for batch in shard.batches))


def line_ends(path: Path) -> list[int]:
    """The offset in bytes behind each line, up to the first line that is incomplete or damaged."""
    ends: list[int] = []
    place = 0
    with path.open("rb") as file:
        for line in file:
            if unsealed(line) is None:
                break
            place += len(line)
            ends.append(place)
    return ends


def sealed(line: bytes) -> bytes:
    """The line with its checksum, without a line break. Inside its texts JSON has no tab: it writes \\t."""
    return b"%s\t%08x" % (line, zlib.crc32(line))


def unsealed(line: bytes) -> bytes | None:
    """A line without its checksum, or a JSON object that has none; None where the line is incomplete or damaged."""
    if not line.endswith(b"\n"):
        return None
    content, tab, checksum = line[:-1].rpartition(b"\t")
    if tab and len(checksum) == _DIGITS:
        return content if checksum == b"%08x" % zlib.crc32(content) else None
    return line[:-1] if _is_object(line) else None


def _has_line_behind(path: Path, place: int) -> bool:
    """Whether a whole line begins at this offset: then it is damaged, and not what a killed writer left."""
    with path.open("rb") as file:
        file.seek(place)
        return file.readline().endswith(b"\n")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
