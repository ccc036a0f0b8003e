"""The queue's file: its tables, how it is opened, which files are refused, and SQLite's errors in words for users.

A file of another version and a damaged one are left as they are: the message says how to keep them aside.

Plain CHECKs stand in place of STRICT tables and RETURNING, which need an SQLite newer than what the Python of some
clusters is built with (RHEL 8: 3.26): a queue must be readable wherever its folder is mounted.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from gpuherd.errors import CannotOpenQueue, CannotWrite, QueueUnreadable
from gpuherd.jobs.run_dir import RunDirectory

VERSION = 5
APPLICATION = 0x67706864  # "gphd": tells our file from any other SQLite file
# Constants of time of this room. How long an opened queue waits for another process's lock; a reader; a dispatcher at
# work (about as long as adding a hundred thousand jobs takes).
_LOCK_WITHIN_S = 30.0
READER_LOCK_WITHIN_S = 5.0
DISPATCHER_WAITS_MS = 2_000
# How often a reader checks that no other machine works on the queue.
ELSEWHERE_EVERY_S = 5.0
# A back-off further in the future was set before the clock was set back, and counts as passed.
LONGEST_BACK_OFF_S = 120.0
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# A process writes the first page a few milliseconds after it made the empty file.
_FIRST_PAGE_WITHIN_S = 1.0
# Pages that a scan of the whole file keeps in memory.
_PASSING_PAGES = 64

# blocked: how many of a job's needs have not succeeded yet; kept with every transition, so that the head of the queue
# is one index lookup however long the queue is. held: 1 while a waiting job is paused.
# gpus, memory_mb, share: what the job requests now; a retry may have raised it above its spec.
# rank: place in the order 'longest' (``ordering.rank``), stored once: all jobs age alike.
# cancelled_by: who cancelled a running job; stored so that it ends also when its dispatcher dies.
# doomed: 1 for a job that was cancelled because one that it needs failed or was cancelled; it comes back with that one.
# attempts.paused: why its processes are stopped (words of PauseReason), '' while they are not; paused_mono since when,
# paused_s how long before that.
# *_mono columns are seconds of CLOCK_BOOTTIME: one clock for the whole machine, which can't be set back; comparable
# between users and processes within one boot. *_at columns are wall-clock seconds since 1970, for people.
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    pid INTEGER NOT NULL,
    boot TEXT NOT NULL,
    started_at REAL NOT NULL,
    started_mono REAL NOT NULL,
    ended_at REAL,
    host TEXT NOT NULL DEFAULT '',
    engine TEXT NOT NULL DEFAULT 'local'
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
    reason TEXT,
    held INTEGER NOT NULL DEFAULT 0,
    memory_mb INTEGER,
    share INTEGER NOT NULL DEFAULT 0,
    cost REAL,
    round INTEGER NOT NULL DEFAULT 0,
    cancelled_by TEXT,
    doomed INTEGER NOT NULL DEFAULT 0,
    rank REAL NOT NULL DEFAULT 0
);
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
    reason TEXT,
    peak_mb INTEGER,
    shared_mb INTEGER,
    paused TEXT NOT NULL DEFAULT '',
    paused_mono REAL,
    paused_s REAL NOT NULL DEFAULT 0,
    engine TEXT NOT NULL DEFAULT 'local',
    batch TEXT,
    place INTEGER,
    handle TEXT,
    node TEXT
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
CREATE INDEX jobs_by_age ON jobs ((gpus > 0), round, priority DESC, id)
    WHERE state = 'waiting' AND blocked = 0 AND held = 0;
CREATE INDEX jobs_later ON jobs (not_before) WHERE state = 'waiting' AND blocked = 0 AND held = 0;
CREATE INDEX jobs_held ON jobs (id) WHERE held = 1;
CREATE INDEX jobs_unfinished ON jobs (round) WHERE state IN ('waiting', 'running');
CREATE TABLE controls (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    jobs TEXT NOT NULL,
    settings TEXT NOT NULL,
    by TEXT NOT NULL,
    applied_at REAL,
    applied_by TEXT,
    ok INTEGER,
    answer TEXT,
    changed TEXT
);
CREATE INDEX controls_open ON controls (id) WHERE applied_at IS NULL;
CREATE TABLE gpu_health (uuid TEXT PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE families (name TEXT PRIMARY KEY, peak_mb INTEGER NOT NULL);
CREATE INDEX jobs_count ON jobs (submission, state, cost);
CREATE INDEX jobs_by_rank ON jobs ((gpus > 0), round, priority DESC, rank DESC, id)
    WHERE state = 'waiting' AND blocked = 0 AND held = 0;
CREATE INDEX jobs_of_kind ON jobs (round, gpus, share, coalesce(memory_mb, 0), priority DESC, id)
    WHERE state = 'waiting' AND blocked = 0 AND held = 0;
CREATE INDEX jobs_of_kind_by_rank ON jobs (round, gpus, share, coalesce(memory_mb, 0), priority DESC, rank DESC, id)
    WHERE state = 'waiting' AND blocked = 0 AND held = 0;
CREATE TABLE family_ends (name TEXT PRIMARY KEY, measured INTEGER NOT NULL, ran_out_mb INTEGER);
"""


def connect(path: Path, *, check: bool = True) -> sqlite3.Connection:
    """Opens the queue's file, which ``make`` has made or checked.

    ``check`` scans the whole file for damage, which takes a second for a million jobs. Raises QueueUnreadable; never
    changes a file it can't use.
    """
    try:
        connection = sqlite3.connect(path, timeout=_LOCK_WITHIN_S, isolation_level=None, cached_statements=256)
    except (sqlite3.Error, OSError) as problem:
        raise CannotOpenQueue(f"can't open the queue {path}: {_denied(path)}{problem}") from problem
    try:
        connection.row_factory = sqlite3.Row
        _prepare(connection, path, check)
    except sqlite3.OperationalError as problem:
        # Locked by another program, read-only, no space: the file itself may be sound.
        connection.close()
        raise CannotOpenQueue(
            f"can't open the queue {path}: {_denied(path)}{sqlite_message(problem)}; it was left as it is"
        ) from problem
    except sqlite3.DatabaseError as problem:
        connection.close()
        raise damaged(path, sqlite_message(problem)) from problem
    except QueueUnreadable:
        connection.close()
        raise
    return connection


def make(path: Path) -> None:
    """Makes an empty file for a queue if there is none, for its owner alone: commands may hold secrets.

    Raises QueueUnreadable for what is there and can't be a queue (``refuse_no_queue``).
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        refuse_no_queue(path)
    except OSError as problem:
        raise CannotOpenQueue(f"can't open the queue {path}: {problem}") from problem


def may(access: int, path: Path) -> bool:
    """Whether this user may do this with the file (``os.R_OK``, ``os.W_OK``)."""
    return os.access(path, access, effective_ids=os.access in os.supports_effective_ids)


def owner(path: Path) -> str:
    """The name of the user whose file this is, or whose folder hides it."""
    from gpuherd.gpus.lease_files import user_name  # only imported for a message

    for each in (path, *path.parents):
        with suppress(OSError):
            return user_name(each.stat().st_uid)
    return "another user"


def _denied(path: Path) -> str:
    """Start of a message where this user may not read and write the file; "" where that is not the reason."""
    return "" if may(os.R_OK | os.W_OK, path) else f"permission denied, it is {owner(path)}'s: "


def refuse_no_queue(path: Path) -> None:
    """Raises QueueUnreadable for a file that can't be a queue: a folder, a FIFO, or an empty file where jobs have run.

    An empty file is a new queue elsewhere; here it is the rest of one, and all its jobs would run again.
    """
    deadline = time.monotonic() + _FIRST_PAGE_WITHIN_S
    while True:
        try:
            state = path.stat()
        except OSError as problem:
            raise CannotOpenQueue(f"can't open the queue {path}: {problem}") from problem
        if not stat.S_ISREG(state.st_mode):
            kind = "a folder" if stat.S_ISDIR(state.st_mode) else "no plain file"
            raise QueueUnreadable(f"the queue {path} is {kind}; move it away, or name another folder")
        run = RunDirectory(path.parent)
        if state.st_size or path.absolute() != run.queue or not run.has_run():
            return
        if time.monotonic() > deadline:
            raise damaged(path, "it is empty, and the files next to it show that jobs have run here")
        time.sleep(0.02)


def refuse_other_version(path: Path, version: int) -> None:
    """Raises QueueUnreadable for a queue's file of another version of the tables (``PRAGMA user_version``)."""
    if version != VERSION:
        age = "a newer" if version > VERSION else "an older"
        raise QueueUnreadable(
            f"the queue {path} was written by {age} gpuherd (its version is {version}, this one reads {VERSION}); it "
            f"was left as it is. Use that gpuherd, name another folder, or keep it aside: {keep_aside_command(path)}"
        )


def damaged(path: Path, what: str) -> QueueUnreadable:
    """The error to raise for a queue's file that is damaged."""
    return QueueUnreadable(
        f"the queue {path} is damaged ({what}); it was left as it is. To keep it aside and start a new one:"
        f" {keep_aside_command(path)}"
    )


def damage_behind(path: Path, problem: Exception) -> QueueUnreadable | None:
    """The error to raise in place of one from a queue in use, if damage to its file explains that."""
    if isinstance(problem, sqlite3.OperationalError) and may_pass(problem):
        return None
    try:
        with closing(sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True)) as connection:
            found = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as worse:
        return damaged(path, sqlite_message(worse))
    if found != "ok":
        return damaged(path, found)
    # A text that is no UTF-8 passes that check.
    is_reported = isinstance(problem, sqlite3.Error) and (
        code_of(problem) & 0xFF in _DAMAGE or not hasattr(problem, "sqlite_errorcode")
    )
    return damaged(path, sqlite_message(problem)) if is_reported else None


def sqlite_message(problem: Exception) -> str:
    """SQLite's message: its last line, after the cause where that is known."""
    words = str(problem).splitlines()[-1]
    full = isinstance(problem, sqlite3.OperationalError) and is_full(problem)
    return f"the disk is full ({words})" if full else words


def keep_aside_command(path: Path) -> str:
    """A shell command that moves a queue's file aside, with its journal, which must not meet a new queue.

    >>> keep_aside_command(Path("results/queue.sqlite"))
    'mkdir results/damaged && mv results/queue.sqlite* results/damaged/'
    """
    folder = shlex.quote(str(path.parent / "damaged"))
    return f"mkdir {folder} && mv {shlex.quote(str(path))}* {folder}/"


def _prepare(connection: sqlite3.Connection, path: Path, check: bool) -> None:
    # In one transaction: another process may be making the tables at this moment.
    connection.execute("BEGIN")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    connection.execute("COMMIT")
    if tables and application != APPLICATION:
        raise QueueUnreadable(f"{path} is an SQLite file, but no gpuherd queue; it was left as it is")
    if tables:
        refuse_other_version(path, version)
    if tables and check:
        with passing_through(connection):
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(str(found))
    _keep_a_journal(connection)
    # NORMAL: a commit is in the kernel's hands at once and so survives the death of any process; only a power cut can
    # take the last commits back (it never damages the file), and then a job that had ended runs once more. FULL would
    # cost a sync (3 ms and more) at every start and every end of a job. (Jobs of an engine don't end with this machine,
    # and go over and end many at once: ``Queue.begin_run``.)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if not tables:
        _make_tables(connection)


@contextmanager
def passing_through(connection: sqlite3.Connection) -> Iterator[None]:
    """For a scan of a long file: keeps few pages in memory, since the default of 2 MB would stay allocated for as long
    as the dispatcher waits."""
    pages = int(connection.execute("PRAGMA cache_size").fetchone()[0])
    connection.execute(f"PRAGMA cache_size = {_PASSING_PAGES}")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA cache_size = {pages}")


def _keep_a_journal(connection: sqlite3.Connection) -> None:
    """Switches the file to a write-ahead log. SQLite does not wait for a lock here, whatever the time-out: of several
    processes that open a new queue at once, all but one would fail because it is locked."""
    deadline = time.monotonic() + _LOCK_WITHIN_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as problem:
            if "locked" not in str(problem) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have made them before we had the lock.
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _SCHEMA.split(";"):  # not executescript, which would end the transaction
                connection.execute(statement)
            connection.execute(
                "INSERT INTO meta VALUES ('queue', ?), ('submission', '0'), ('inode', '')", (os.urandom(6).hex(),)
            )
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


# What SQLite reports for a full disk and for a queue that another program keeps locked. Both may pass, and a dispatcher
# waits for that.

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
    """Whether a write failed for lack of space, which may be freed.

    SQLite has two messages for it: "database or disk is full", and "disk I/O error" where a file that it shares
    between processes can't grow.
    """
    code = code_of(problem)
    return code & 0xFF == sqlite3.SQLITE_FULL or (_is_io(code) and code not in _NOT_FOR_SPACE)


def code_of(problem: sqlite3.Error) -> int:
    """SQLite's extended code. Errors that Python's module makes by itself (a text that is no UTF-8) carry none."""
    return getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR)


def _is_io(code: int) -> bool:
    return code & 0xFF == sqlite3.SQLITE_IOERR


def may_pass(problem: sqlite3.OperationalError) -> bool:
    """Whether the same write may succeed later: the disk is full, or another process holds the lock (one that was
    stopped with Ctrl-Z in the middle of a submit holds it until it continues)."""
    code = code_of(problem)
    return is_full(problem) or _is_io(code) or code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def why(problem: sqlite3.OperationalError) -> str:
    """Why the queue can't be written now, in a few words."""
    return "the disk is full" if is_full(problem) else f"the queue can't be written ({problem})"


def cannot_write(path: Path, problem: sqlite3.OperationalError, remedy: str) -> CannotWrite:
    """The error to raise when a queue's file can't be written: what was recorded stays, the rest was rolled back."""
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
    """The error for a transaction that SQLite rolled back by itself, after the failure of a statement was ignored."""
    problem = sqlite3.OperationalError("database or disk is full; the transaction was taken back")
    problem.sqlite_errorcode = sqlite3.SQLITE_FULL
    return problem
