"""Reads a queue's file without ever changing it or holding its dispatcher up.

For those who only look: ``gpuherd status``, ``top``, ``logs``, and Prometheus. The connection is read-only, so that no
defect here can harm a run; in WAL mode a reader never waits for the writer nor the writer for it. Files of an older
gpuherd are read as they are, with what they don't hold yet as NULL. What the rows mean is the business of the callers.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gpuherd.errors import GpuherdError, QueueUnreadable, UsageError
from gpuherd.jobs.onehost import refuse_elsewhere
from gpuherd.jobs.schema import APPLICATION, VERSION, keep_aside_command, told

_PATIENCE_S = 5.0
_ELSEWHERE_EVERY_S = 5.0


class QueueReader:
    """A read-only view of a queue's file. Each query sees the queue as it stands at that moment.

    Raises:
        UsageError: there is no queue at this path.
        QueueUnreadable: the file is damaged, no queue, of a newer gpuherd, or this user may not read it.
        QueueElsewhere: another machine works on it (``onehost``); also raised by queries.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.exists():
            raise _none(path)
        self._looks_next = 0.0
        self._refuse_elsewhere()
        try:
            self._db = _open(path)
        except sqlite3.Error as problem:
            raise _unreadable(path, problem) from problem
        try:
            self._refuse_strangers()
            self._columns = {table: self._columns_of(table) for table in ("jobs", "attempts", "family_ends")}
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
        self._refuse_elsewhere()
        try:
            return self._db.execute(query, values).fetchall()
        except UnicodeEncodeError:
            return []  # somebody asks for a name that is no text, which no row has
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

    def has(self, table: str, column: str) -> bool:
        """Whether the file knows this column of ``jobs`` or ``attempts``; files of an older gpuherd lack some."""
        return column in self._columns[table]

    def column(self, table: str, name: str, alias: str = "") -> str:
        """The column for a SELECT, or NULL under its name where the file has none."""
        prefix = f"{alias}." if alias else ""
        return f"{prefix}{name}" if self.has(table, name) else f"NULL AS {name}"

    def _refuse_elsewhere(self) -> None:
        """Again and again: somebody may begin on another machine while a log is followed on this one."""
        if time.monotonic() >= self._looks_next:
            self._looks_next = time.monotonic() + _ELSEWHERE_EVERY_S
            refuse_elsewhere(self.path)

    def _refuse_strangers(self) -> None:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise _none(self.path)  # a dispatcher is about to make it
        if int(self._db.execute("PRAGMA application_id").fetchone()[0]) != APPLICATION:
            raise QueueUnreadable(f"{self.path} is no gpuherd queue")
        if version > VERSION:
            raise QueueUnreadable(
                f"the queue {self.path} is of a newer gpuherd (its version is {version}, this one reads up to "
                f"{VERSION}); use that gpuherd"
            )

    def _columns_of(self, table: str) -> frozenset[str]:
        return frozenset(row["name"] for row in self._db.execute(f"PRAGMA table_info({table})"))


def _unreadable(path: Path, problem: sqlite3.Error) -> QueueUnreadable:
    if isinstance(problem, sqlite3.OperationalError):
        return QueueUnreadable(f"can't read the queue {path}: {told(problem)}")
    return QueueUnreadable(
        f"the queue {path} is damaged ({told(problem)}); to keep it aside and start a new one:"
        f" {keep_aside_command(path)}"
    )


def _none(path: Path) -> UsageError:
    return UsageError(f"there is no queue in {path.parent} yet; name the folder of a run")


def _open(path: Path) -> sqlite3.Connection:
    """A read-only connection. In a folder that this user can't write, SQLite can't make the small file by which
    readers and writers agree; when no writer is there, the file is read as one that does not change.
    """
    address = path.absolute().as_uri() + "?mode=ro"
    try:
        return _connect(address)
    except sqlite3.OperationalError:
        if path.with_name(path.name + "-wal").exists():
            raise
        return _connect(address + "&immutable=1")


def _connect(address: str) -> sqlite3.Connection:
    # A page that is drawn in one thread may be read in another (top): the caller takes care of one at a time.
    connection = sqlite3.connect(address, uri=True, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    try:
        with closing(connection.execute("SELECT count(*) FROM sqlite_master")) as cursor:
            cursor.fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection
