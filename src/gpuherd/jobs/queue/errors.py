"""What SQLite says when a disk is full, or another program keeps a queue locked: told from other failures, and said in
words that a user can act on. Both may pass, and a dispatcher at work waits for that.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuherd.errors import CannotWrite

# I/O errors with another cause than a full disk: reads, and damage that SQLite finds in the file.
_NOT_FOR_SPACE = frozenset(
    {
        sqlite3.SQLITE_IOERR_READ,
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_FSTAT,
        sqlite3.SQLITE_IOERR_ACCESS,
        sqlite3.SQLITE_IOERR_DATA,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    }
)


def is_full(problem: sqlite3.OperationalError) -> bool:
    """Whether a write failed for want of space, which may come again.

    SQLite has two words for it: "database or disk is full", and "disk I/O error" where a file that it shares between
    processes can't grow.
    """
    code = code_of(problem)
    return code & 0xFF == sqlite3.SQLITE_FULL or (_is_io(code) and code not in _NOT_FOR_SPACE)


def code_of(problem: sqlite3.Error) -> int:
    """SQLite's extended code. Errors that Python's module makes by itself (a text that is no UTF-8) carry none."""
    return getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR)


def _is_io(code: int) -> bool:
    return code & 0xFF == sqlite3.SQLITE_IOERR


def may_pass(problem: sqlite3.OperationalError) -> bool:
    """Whether the same write may do later: the disk is full, or another process holds the lock (one that was stopped
    with Ctrl-Z in the middle of a submit holds it for as long as it stands still)."""
    code = code_of(problem)
    return is_full(problem) or _is_io(code) or code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def why(problem: sqlite3.OperationalError) -> str:
    """In a few words why the queue can't be written now."""
    return "the disk is full" if is_full(problem) else f"the queue can't be written ({problem})"


def cannot_write(path: Path, problem: sqlite3.OperationalError, remedy: str) -> CannotWrite:
    """The error to raise when a queue's file can't be written: what was recorded stays, the rest was taken back."""
    if is_full(problem):
        return CannotWrite(f"can't write {path}: the disk is full ({problem}); free some space and {remedy}")
    return CannotWrite(f"can't write {path}: {problem}; {remedy}")


@contextmanager
def raising_cannot_write(path: Path, remedy: str) -> Iterator[None]:
    """Raises ``cannot_write`` where a queue's file can't be written in this block.

    Not for SQL that fails (no such table): the disk is not the cause of that, the file is damaged.
    """
    try:
        yield
    except sqlite3.OperationalError as problem:
        if code_of(problem) == sqlite3.SQLITE_ERROR:
            raise
        raise cannot_write(path, problem, remedy) from problem


def taken_back() -> sqlite3.OperationalError:
    """For a transaction that SQLite has ended by itself, in a statement whose failure somebody has passed over."""
    problem = sqlite3.OperationalError("database or disk is full; the transaction was taken back")
    problem.sqlite_errorcode = sqlite3.SQLITE_FULL
    return problem
