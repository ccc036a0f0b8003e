"""The queue's file: its tables, how it is opened, and how a file that is no good is told apart and left alone.

Plain CHECKs stand in place of STRICT tables and RETURNING, which need an SQLite newer than what the Python of some
clusters is built with (RHEL 8: 3.26): a queue must be readable wherever its folder is mounted.
"""

from __future__ import annotations

import sqlite3
import uuid
from pathlib import Path

from gpuherd.errors import QueueUnreadable

VERSION = 1
APPLICATION = 0x67706864  # "gphd": tells our file from any other SQLite file

# blocked: how many of a job's needs have not succeeded yet; kept with every transition, so that the head of the queue
# is one index lookup however long the queue is.
# *_mono columns are seconds of CLOCK_BOOTTIME: one clock for the whole machine, that nobody sets back; comparable
# between users and processes within one boot. *_at columns are wall-clock seconds since 1970, for people.
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    pid INTEGER NOT NULL,
    boot TEXT NOT NULL,
    started_at REAL NOT NULL,
    started_mono REAL NOT NULL,
    ended_at REAL
);
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    spec TEXT NOT NULL,
    gpus INTEGER NOT NULL CHECK (typeof(gpus) = 'integer' AND gpus >= 0),
    priority INTEGER NOT NULL CHECK (typeof(priority) = 'integer'),
    submission INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'running', 'done', 'failed', 'cancelled')),
    blocked INTEGER NOT NULL DEFAULT 0 CHECK (blocked >= 0),
    tries INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0,
    avoid TEXT NOT NULL DEFAULT '[]',
    ready_at REAL NOT NULL,
    reason TEXT
);
CREATE INDEX jobs_ready ON jobs ((gpus > 0), priority DESC, id) WHERE state = 'waiting' AND blocked = 0;
CREATE INDEX jobs_later ON jobs (not_before) WHERE state = 'waiting' AND blocked = 0;
CREATE INDEX jobs_count ON jobs (submission, state);
CREATE TABLE needs (
    job INTEGER NOT NULL REFERENCES jobs (id),
    needed INTEGER NOT NULL REFERENCES jobs (id),
    PRIMARY KEY (job, needed)
) WITHOUT ROWID;
CREATE INDEX needs_needed ON needs (needed);
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY,
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    run INTEGER NOT NULL REFERENCES runs (id),
    state TEXT NOT NULL CHECK (state IN ('running', 'done', 'failed', 'requeued')),
    gpus TEXT NOT NULL,
    labels TEXT NOT NULL,
    pid INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL,
    boot TEXT NOT NULL,
    log TEXT NOT NULL,
    wait_s REAL NOT NULL,
    leased_mono REAL,
    started_at REAL NOT NULL,
    started_mono REAL NOT NULL,
    ended_at REAL,
    ended_mono REAL,
    exit_code INTEGER,
    signal INTEGER,
    class TEXT,
    reason TEXT
);
CREATE UNIQUE INDEX attempts_running ON attempts (job) WHERE state = 'running';
CREATE INDEX attempts_job ON attempts (job);
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    job TEXT,
    attempt INTEGER,
    text TEXT NOT NULL
);
"""


def connect(path: Path) -> sqlite3.Connection:
    """Opens the queue's file, making it if there is none. Raises QueueUnreadable; never changes a file it can't use."""
    try:
        connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, cached_statements=256)
    except sqlite3.Error as problem:
        raise QueueUnreadable(f"can't open the queue {path}: {problem}") from problem
    try:
        connection.row_factory = sqlite3.Row
        _prepare(connection, path)
    except sqlite3.OperationalError as problem:
        # Locked by another program, read-only, no space: nothing that says anything against the file itself.
        connection.close()
        raise QueueUnreadable(f"can't open the queue {path}: {problem}; it was left as it is") from problem
    except sqlite3.DatabaseError as problem:
        connection.close()
        raise QueueUnreadable(
            f"the queue {path} is damaged ({problem}); it was left as it is: move it away to start a new one"
        ) from problem
    except QueueUnreadable:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if tables and application != APPLICATION:
        raise QueueUnreadable(f"{path} is an SQLite file, but no gpuherd queue; it was left as it is")
    if version > VERSION:
        raise QueueUnreadable(
            f"the queue {path} is of a newer gpuherd (its version is {version}, this one reads up to {VERSION}); "
            "it was left as it is: use that gpuherd, or another output folder"
        )
    if tables:
        check = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if check != "ok":
            raise sqlite3.DatabaseError(str(check))
    connection.execute("PRAGMA journal_mode = WAL")
    # NORMAL: a commit is in the kernel's hands at once and so survives the death of any process; only a power cut can
    # take the last commits back (it never damages the file), and then a job that had ended runs once more. FULL would
    # cost a sync (3 ms and more) at every start and every end of a job.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if not tables:
        _create(connection)


def _create(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have made the tables between our look and our lock.
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(
                "INSERT INTO meta VALUES ('queue', ?), ('submission', '0'), ('inode', '')", (uuid.uuid4().hex[:12],)
            )
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
