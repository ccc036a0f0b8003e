"""``Ledger``: reads what all users' recorders have written, each use once.

Nothing here is changed, and no file can stop a reader: what is no record is passed over and counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from gpuherd.gpus.machine_dir import machine_dir, why_unsafe
from gpuherd.ledger.files import MOST_OF_OWNER, LogReader, OpenFile, logs_in, open_files_in
from gpuherd.ledger.records import Kind, Recorded, use_of

NAME = "ledger"
_EVER = 7_258_118_400.0


def nothing(_done: float, _total: float) -> None:
    """Progress that no one looks at."""


class Ledger:
    """A ledger's folder, for reading.

    Attributes:
        folder: where the files lie.
        shared: all users of the machine write there; else it is the reader's own.
        skipped: by owner, the lines that were no records at the last ``read``.
    """

    def __init__(self, folder: Path, *, shared: bool, reader_uid: int | None = None) -> None:
        self.folder = folder
        self.shared = shared
        self.reader_uid = os.geteuid() if reader_uid is None else reader_uid
        self.skipped: Counter[int] = Counter()

    @staticmethod
    def existing() -> Ledger | None:
        """The ledger of this machine that is in use here and now; None while there is none, or none that is safe."""
        try:
            place = machine_dir()
        except RuntimeError:  # a user without a home folder
            return None
        folder = place.path / NAME
        try:
            state = folder.lstat()
        except OSError:
            return None
        return None if why_unsafe(state) is not None else Ledger(folder, shared=place.shared)

    def read(
        self, since: float = 0.0, until: float = _EVER, progress: Callable[[float, float], None] = nothing
    ) -> Iterator[Recorded]:
        """Every use that overlaps the time from ``since`` to ``until`` (wall-clock seconds), whole, once for each
        writer, those that go on too.

        Which writers are to be believed is for the caller to decide (``Recorded.is_believed_by``, ``believed``).
        ``progress`` is called with bytes read and bytes in all.
        """
        found: dict[tuple[int, str], Recorded] = {}
        self.skipped = Counter()
        # First what is open: a use that ends meanwhile is then in both, and never in neither.
        opened = tuple(self._open_records())
        for record in (*self._logged(since, progress), *opened):
            if record.use.until < since or record.use.since > until:
                continue
            key = (record.observer_uid, record.use.id)
            before = found.get(key)
            if before is None or record.outweighs(before):
                found[key] = record
        yield from sorted(found.values(), key=lambda record: record.use.since)

    def open_uses(self) -> tuple[Recorded, ...]:
        """The uses that go on now, by all writers: cheap, for what is looked at often."""
        return tuple(record for record in self._open_records() if record.is_open)

    def _open_records(self) -> Iterator[Recorded]:
        for file in open_files_in(self.folder):
            yield from records_of(file, self.skipped)

    def _logged(self, since: float, progress: Callable[[float, float], None]) -> Iterator[Recorded]:
        logs = logs_in(self.folder, since)
        total = float(sum(_size(log.path) for log in logs))
        of_owner: Counter[int] = Counter()
        done = 0.0
        for log in logs:
            reader = LogReader(log.path)
            owner = _owner(log.path)
            for line in reader.lines(MOST_OF_OWNER - of_owner[owner]):
                use = use_of(line)
                if use is not None:
                    yield Recorded(use, reader.owner or 0)
                else:
                    self.skipped[owner] += 1
            self.skipped[owner] += reader.skipped
            of_owner[owner] += reader.offset
            done += _size(log.path)
            progress(done, total)


def records_of(file: OpenFile, skipped: Counter[int] | None = None) -> Iterator[Recorded]:
    """The uses of an open file."""
    is_live = file.is_live
    for line in file.lines:
        use = use_of(line)
        if use is not None:
            yield Recorded(use, file.owner, is_open=is_live)
        elif skipped is not None:
            skipped[file.owner] += 1


def believed(records: Iterable[Recorded], reader_uid: int, *, others: bool = False) -> Iterator[Recorded]:
    """Of all records those that count for this reader, and of each moment of a use only one.

    Several may have watched one process (its uses' ids begin alike), one after the other or at the same time: what a
    later record has in common with earlier ones is taken off. With ``others`` also what only third persons report,
    where no one else does.
    """
    # By user as well: no one's records can displace those of another by their ids.
    by_id: dict[tuple[int, str], list[Recorded]] = {}
    for record in records:
        use = record.use
        name = use.id.rpartition("/")[0] if use.kind is Kind.OTHER else use.id
        by_id.setdefault((use.uid, name), []).append(record)
    for same in by_id.values():
        trusted = [record for record in same if record.is_believed_by(reader_uid)]
        if not trusted and others:
            trusted = [max(same, key=lambda record: record.use.span_s)]
        trusted.sort(key=lambda record: record.use.since)
        covered = 0.0
        for record in trusted:
            part = record.use if record.use.since >= covered else record.use.within(covered, _EVER)
            if part is not None:
                yield record if part is record.use else replace(record, use=part)
                covered = max(covered, part.until)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except OSError:
        return 0
