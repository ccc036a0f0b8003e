"""``Fold``: sums over a ledger that are kept up to date: each call reads only what was appended since the last one, and
the open files, which are small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from gpuherd.ledger.files import LogReader, logs_in, open_files_in
from gpuherd.ledger.reader import Ledger, records_of
from gpuherd.ledger.records import Recorded, Use, use_of

Key = TypeVar("Key")
# A use that is written again (a kill between two steps, an attempt that is taken over) follows within so many records.
_MOST_IDS = 20_000


class Fold(Generic[Key]):
    """Sums of figures by key, over all uses that count for the reader, each of a writer's uses once.

    Args:
        ledger: the ledger.
        weigh: the key of a use and its figures, as many for each.
    """

    def __init__(self, ledger: Ledger, weigh: Callable[[Use], tuple[Key, tuple[float, ...]]]) -> None:
        self.ledger = ledger
        self._weigh = weigh
        self._logs: dict[Path, tuple[int, LogReader]] = {}
        # By owner and id of uses that have ended: length, key and figures.
        self._ended: dict[tuple[int, str], tuple[float, Key, tuple[float, ...]]] = {}
        self._sums: dict[Key, tuple[float, ...]] = {}

    def sums(self, since: float = 0.0) -> dict[Key, tuple[float, ...]]:
        """The sums by now, of uses that go on too. Logs of months before ``since`` are not read."""
        self._read_new(since)
        sums = dict(self._sums)
        for record in self.open_records():
            before = self._ended.get((record.observer_uid, record.use.id))
            if before is None or record.use.span_s > before[0]:
                if before is not None:
                    _add(sums, before[1], before[2], -1)
                _add(sums, *self._weigh(record.use))
        return sums

    def open_records(self) -> list[Recorded]:
        """What stands in open files, of live and dead recorders, the longest of each use."""
        longest: dict[tuple[int, str], Recorded] = {}
        for file in open_files_in(self.ledger.folder):
            for record in records_of(file):
                key = (record.observer_uid, record.use.id)
                counts = record.is_believed_by(self.ledger.reader_uid)
                if counts and (key not in longest or record.outweighs(longest[key])):
                    longest[key] = record
        return list(longest.values())

    def _read_new(self, since: float) -> None:
        for log in logs_in(self.ledger.folder, since):
            try:
                state = os.lstat(log.path)
            except OSError:
                continue
            inode, reader = self._logs.get(log.path, (0, None))
            if reader is None or inode != state.st_ino:
                # Another file in its place: only its owner can do that, and only to their own records.
                reader = LogReader(log.path)
                self._logs[log.path] = (state.st_ino, reader)
            if state.st_size > reader.offset:
                for line in reader.lines():
                    use = use_of(line)
                    if use is not None:
                        self._note(Recorded(use, state.st_uid if reader.owner is None else reader.owner))

    def _note(self, record: Recorded) -> None:
        if not record.is_believed_by(self.ledger.reader_uid):
            return
        name = (record.observer_uid, record.use.id)
        before = self._ended.pop(name, None)
        if before is not None and record.use.span_s < before[0]:
            self._ended[name] = before
            return
        if before is not None:
            _add(self._sums, before[1], before[2], -1)
        key, figures = self._weigh(record.use)
        _add(self._sums, key, figures)
        self._ended[name] = (record.use.span_s, key, figures)
        if len(self._ended) > _MOST_IDS:
            del self._ended[next(iter(self._ended))]


def _add(sums: dict[Key, tuple[float, ...]], key: Key, figures: tuple[float, ...], sign: int = 1) -> None:
    before = sums.get(key, (0.0,) * len(figures))
    sums[key] = tuple(max(0.0, one + sign * other) for one, other in zip(before, figures, strict=True))
