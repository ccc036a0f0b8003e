"""Reads a queue's file without ever changing it or delaying its dispatcher; jobs and attempts from its rows.

For ``gpuherd status``, ``top``, ``logs`` and Prometheus. The connection is read-only, so that no defect here can harm a
run; in WAL mode a reader never waits for the writer nor the writer for it.
"""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpuherd.engines.process_tree import ProcessId
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import CannotOpenQueue, GpuherdError, QueueUnreadable, UsageError
from gpuherd.jobs.job import job_of
from gpuherd.jobs.lock import refuse_elsewhere
from gpuherd.jobs.queue.schema import (
    APPLICATION,
    ELSEWHERE_EVERY_S,
    READER_LOCK_WITHIN_S,
    damage_behind,
    may,
    owner,
    refuse_no_queue,
    refuse_other_version,
    sqlite_message,
)
from gpuherd.jobs.records import (
    AttemptRecord,
    AttemptRow,
    AttemptState,
    Handed,
    PauseReason,
    QueuedJob,
    ResourceRequest,
)
from gpuherd.jobs.scheduler.memory import FamilyMemory

SIMULATED_GPUS = "GPUs were simulated: jobs ran on the CPU, and no time, memory or utilization here is that of a GPU."
# Rows for ``family_memory``; a WHERE may follow.
FAMILIES = (
    "SELECT name, peak_mb, coalesce(measured, 0) AS measured, ran_out_mb"
    " FROM families LEFT JOIN family_ends USING (name)"
)
_NOT_OURS = "SELECT count(*) FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"


@lru_cache(maxsize=256)
def queued(row: sqlite3.Row) -> QueuedJob:
    """A job from a row of ``jobs``. The head of a queue is read again at every decision, and most of it is the same."""
    job = job_of(row["spec"])
    request = ResourceRequest(row["gpus"], row["memory_mb"], bool(row["share"]))
    return QueuedJob(
        id=row["id"],
        job=job,
        tries=row["tries"],
        attempts=row["attempts"],
        not_before=row["not_before"],
        avoid=gpus_of(row["avoid"]),
        ready_at=row["ready_at"],
        adapted=None if request == ResourceRequest(job.gpus, job.memory_mb, job.share) else request,
        cancelled_by=row["cancelled_by"],
        rank=row["rank"],
    )


def gpus_of(text: str) -> frozenset[str]:
    """A set of UUIDs from JSON."""
    return frozenset() if text == "[]" else frozenset(json.loads(text))


def process_of(attempt: sqlite3.Row) -> ProcessId | None:
    """The process of a row of ``attempts``, None for one that was submitted to an engine beyond this machine."""
    return ProcessId(attempt["pid"], attempt["start_ticks"], attempt["boot"]) if attempt["engine"] == LOCAL else None


def handed_of(attempt: sqlite3.Row) -> Handed | None:
    """How an attempt is found in its engine, from a row of ``attempts``; None for one on this machine."""
    if attempt["engine"] == LOCAL:
        return None
    return Handed(attempt["engine"], attempt["batch"], attempt["place"], attempt["handle"], attempt["node"])


def round_opened(text: str | None) -> tuple[int | None, float]:
    """A round and since when it is open, from the value of ``round`` in ``meta``; (None, 0.0) where there is none."""
    number, _, at = (text or "").partition(" ")
    return (int(number), float(at)) if at else (None, 0.0)


def family_memory(row: sqlite3.Row) -> FamilyMemory:
    """What was seen of a family, from a row of ``FAMILIES``."""
    return FamilyMemory(row["peak_mb"] or None, row["measured"], row["ran_out_mb"])


def attempt(row: sqlite3.Row, job: sqlite3.Row) -> AttemptRecord:
    """An attempt from a row of ``attempts`` and its job's row."""
    return AttemptRecord(
        id=row["id"],
        queued=queued(job),
        number=row["number"],
        gpus=tuple(json.loads(row["gpus"])),
        labels=tuple(json.loads(row["labels"])),
        process=process_of(row),
        handed=handed_of(row),
        log=row["log"],
        started_at=row["started_at"],
        started_mono=row["started_mono"],
        shared_mb=row["shared_mb"],
        paused=pause_reasons(row["paused"]),
        paused_mono=row["paused_mono"],
        paused_s=row["paused_s"],
    )


def attempt_row(row: sqlite3.Row, job: str) -> AttemptRow:
    """An attempt as recorded, from a row of ``attempts`` and its job's name."""
    handed, state = handed_of(row), AttemptState(row["state"])
    run_s = None if row["ended_mono"] is None else max(0.0, row["ended_mono"] - row["started_mono"])
    if handed is not None and handed.node is None and state is not AttemptState.DONE:
        run_s = None  # it ended, or still waits, in the engine's queue
    return AttemptRow(
        id=row["id"],
        job=job,
        number=row["number"],
        state=state,
        gpus=_words(row["labels"]),
        gpu_uuids=_words(row["gpus"]),
        log=row["log"],
        started_at=row["started_at"],
        pid=None if handed is not None else row["pid"],
        ended_at=row["ended_at"],
        run_s=run_s,
        wait_s=row["wait_s"],
        exit_code=row["exit_code"],
        signal=row["signal"],
        failure_class=row["class"],
        peak_mb=row["peak_mb"],
        paused=tuple(sorted(pause_reasons(row["paused"]))) if row["paused"] else (),
        paused_s=row["paused_s"],
        shared_mb=row["shared_mb"],
        handed=handed,
    )


@lru_cache(maxsize=1024)
def _words(text: str) -> tuple[str, ...]:
    """Words from JSON: GPUs, which are the same for many attempts."""
    return tuple(json.loads(text))


def pause_reasons(text: str) -> frozenset[PauseReason]:
    """The words of ``attempts.paused``."""
    return frozenset(PauseReason(word) for word in text.split())


def notes_on_gpus(queue: Path) -> list[str]:
    """Remarks on a run's GPUs for readers of its figures: a sentence where some were simulated. Empty where there is no
    readable queue."""
    if not queue.exists():
        return []
    from gpuherd.gpus.state import SIMULATED  # nothing of GPUs for ``gpuherd submit``

    try:
        with closing(QueueReader(queue)) as reader:
            found = reader.one("SELECT 1 FROM attempts WHERE gpus LIKE ?", (f"%{SIMULATED}%",))
    except (QueueUnreadable, UsageError):
        return []
    return [] if found is None else [SIMULATED_GPUS]


class QueueReader:
    """A read-only view of a queue's file. Each query sees the queue as it stands at that moment.

    Raises:
        UsageError: there is no queue at this path.
        QueueUnreadable: the file is damaged, no queue, of a newer gpuherd, or this user may not read it.
        QueueElsewhere: another machine works on it (``onehost``); also raised by queries.
    """

    def __init__(self, path: Path):
        self.path = path
        if not is_there(path):
            raise _none(path)
        refuse_no_queue(path)
        self._looks_next = 0.0
        self._refuse_elsewhere()
        try:
            self._db = _open(path)
        except sqlite3.Error as problem:
            raise _unreadable(path, problem) from problem
        try:
            self._refuse_strangers()
        except sqlite3.Error as problem:
            self._db.close()
            raise _unreadable(path, problem) from problem
        except GpuherdError:
            self._db.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def rows(self, query: str, values: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        """The rows of a query. Raises QueueUnreadable when the file turns out to be damaged."""
        return list(self.each(query, values))

    def each(self, query: str, values: tuple[object, ...] = ()) -> Iterator[sqlite3.Row]:
        """The same rows one after the other, for results that are too long to keep in memory."""
        self._refuse_elsewhere()
        try:
            yield from self._db.execute(query, values)
        except UnicodeEncodeError:
            return  # a name that is not valid text, which no row has
        except sqlite3.Error as problem:
            raise _unreadable(self.path, problem) from problem

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """While it lasts all queries see the queue as it stands at the first, however fast it changes. Keep it short:
        the file can't be tidied up meanwhile.
        """
        self.rows("BEGIN")
        try:
            yield
        finally:
            self.rows("COMMIT")

    def one(self, query: str, values: tuple[object, ...] = ()) -> sqlite3.Row | None:
        """The first row, or None."""
        found = self.rows(query, values)
        return found[0] if found else None

    def value(self, query: str, values: tuple[object, ...] = ()) -> Any:
        """The first column of the first row, or None."""
        found = self.one(query, values)
        return None if found is None else found[0]

    def _refuse_elsewhere(self) -> None:
        """Checks again and again: another machine may start on the queue while a log is followed on this one."""
        if time.monotonic() >= self._looks_next:
            self._looks_next = time.monotonic() + ELSEWHERE_EVERY_S
            refuse_elsewhere(self.path)

    def _refuse_strangers(self) -> None:
        if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise _none(self.path)  # a dispatcher is about to make it
        if int(self._db.execute("PRAGMA application_id").fetchone()[0]) != APPLICATION:
            raise QueueUnreadable(f"{self.path} is no gpuherd queue")
        refuse_other_version(self.path, int(self._db.execute("PRAGMA user_version").fetchone()[0]))
        # A view in place of a table could compute for ever.
        if self._db.execute(_NOT_OURS).fetchone()[0]:
            raise QueueUnreadable(f"{self.path} is no gpuherd queue: it has views, triggers or virtual tables")


def is_there(path: Path) -> bool:
    """Whether there is a queue's file at this path. Raises CannotOpenQueue where this user may not look."""
    try:
        path.stat()
    except PermissionError:
        raise _forbidden(path) from None
    except (OSError, ValueError):
        return False
    return True


def _forbidden(path: Path) -> CannotOpenQueue:
    return CannotOpenQueue(
        f"can't read the queue {path}: permission denied; it is {owner(path)}'s. Ask for read access to the folder and"
        f" its queue.sqlite, or for the output of: gpuherd status {shlex.quote(str(path.parent))}"
    )


def _unreadable(path: Path, problem: sqlite3.Error) -> QueueUnreadable:
    damage = damage_behind(path, problem)
    if damage is None and not may(os.R_OK, path):
        return _forbidden(path)
    return damage or CannotOpenQueue(f"can't read the queue {path}: {sqlite_message(problem)}")


def _none(path: Path) -> UsageError:
    return UsageError(f"there is no queue in {path.parent} yet; name the folder of a run")


def _open(path: Path) -> sqlite3.Connection:
    """A read-only connection. In a folder that this user can't write, SQLite can't make the small file by which readers
    and writers agree; when no writer is there, the file is read as one that does not change.
    """
    address = path.absolute().as_uri() + "?mode=ro"
    try:
        return _connect(address)
    except sqlite3.OperationalError:
        if path.with_name(path.name + "-wal").exists():
            raise
        return _connect(address + "&immutable=1")


def _connect(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, timeout=READER_LOCK_WITHIN_S, isolation_level=None)
    connection.row_factory = sqlite3.Row
    try:
        with closing(connection.execute("SELECT count(*) FROM sqlite_master")) as cursor:
            cursor.fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
