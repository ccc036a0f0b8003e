"""What SQLite says when a disk is full, or another program keeps a queue locked: told from other failures, and said in
words that a user can act on. Both may pass, and a dispatcher at work waits for that."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from gpuherd.errors import CannotWrite


def is_full(problem: sqlite3.OperationalError) -> bool:
    """Whether a write failed for want of space, which may come again.

    SQLite has two words for it: "database or disk is full", and "disk I/O error" where a file that it shares between
    processes can't grow.
    """
    return problem.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def may_pass(problem: sqlite3.OperationalError) -> bool:
    """Whether the same write may do later: the disk is full, or another process holds the lock (one that was stopped
    with Ctrl-Z in the middle of a submit holds it for as long as it stands still)."""
    return is_full(problem) or problem.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def why(problem: sqlite3.OperationalError) -> str:
    """In a few words why the queue can't be written now."""
    return "the disk is full" if is_full(problem) else f"the queue can't be written ({problem})"


def cannot_write(path: Path, problem: sqlite3.OperationalError, remedy: str) -> CannotWrite:
    """The error to raise when a queue's file can't be written: what was recorded stays, the rest was taken back."""
    if is_full(problem):
        return CannotWrite(f"can't write {path}: the disk is full ({problem}); free some space and {remedy}")
    return CannotWrite(f"can't write {path}: {problem}; {remedy}")


def taken_back() -> sqlite3.OperationalError:
    """For a transaction that SQLite has ended by itself, in a statement whose failure somebody has passed over."""
    problem = sqlite3.OperationalError("database or disk is full; the transaction was taken back")
    problem.sqlite_errorcode = sqlite3.SQLITE_FULL
    return problem
