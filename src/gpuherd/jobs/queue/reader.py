"""Reads a queue's file without ever changing it or delaying its dispatcher.

For ``gpuherd status``, ``top``, ``logs`` and Prometheus. The connection is read-only, so that no defect here can harm a
run; in WAL mode a reader never waits for the writer nor the writer for it.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gpuherd.errors import CannotOpenQueue, GpuherdError, QueueUnreadable, UsageError
from gpuherd.gpus.state import SIMULATED
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

SIMULATED_GPUS = "GPUs were simulated: jobs ran on the CPU, and no time, memory or utilization here is that of a GPU."


def notes_on_gpus(queue: Path) -> list[str]:
    """Remarks on a run's GPUs for readers of its figures: a sentence where some were simulated. Empty where there is no
    readable queue."""
    if not queue.exists():
        return []
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
            self._db, self._sees_changes = _open(path)
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

    def version(self) -> int | None:
        """Another number when the file has been changed since the last call; None where this reader can't notice."""
        return int(self.rows("PRAGMA data_version")[0][0]) if self._sees_changes else None

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


def _open(path: Path) -> tuple[sqlite3.Connection, bool]:
    """A read-only connection, and whether it sees what others change. In a folder that this user can't write, SQLite
    can't make the small file by which readers and writers agree; when no writer is there, the file is read as one that
    does not change.
    """
    address = path.absolute().as_uri() + "?mode=ro"
    try:
        return _connect(address), True
    except sqlite3.OperationalError:
        if path.with_name(path.name + "-wal").exists():
            raise
        return _connect(address + "&immutable=1"), False


def _connect(address: str) -> sqlite3.Connection:
    # A page that is drawn in one thread may be read in another (top): the caller ensures one at a time.
    connection = sqlite3.connect(
        address, uri=True, timeout=READER_LOCK_WITHIN_S, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    try:
        with closing(connection.execute("SELECT count(*) FROM sqlite_master")) as cursor:
            cursor.fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
