"""How a run stands: read from its queue, by anybody who may read it, while a dispatcher works on it or after.

Nothing is changed and nobody is held up. A long queue is read by the page: counts come from an index, and only the
jobs that are asked for (``pages``) are taken apart (``jobstatus``). Here is the whole: counts, who works on it, and how
long it will take; a figure that is not known is None.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuherd.engines.options import LOCAL
from gpuherd.engines.processes import boot_id, identify
from gpuherd.jobs import clock, standing
from gpuherd.jobs.eta import Pace, Running, Waiting, time_left
from gpuherd.jobs.job import JobState
from gpuherd.jobs.jobstatus import attempt_status, job_status
from gpuherd.jobs.pages import places, rows_of
from gpuherd.jobs.queuefile import COSTS_WAITING
from gpuherd.jobs.reader import QueueReader
from gpuherd.jobs.records import Counts
from gpuherd.jobs.rows import handed_of, round_opened
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.runstatus import AttemptStatus, DispatcherStatus, Page, RunStatus
from gpuherd.jobs.waitreason import WaitFacts
from gpuherd.jobs.whereabouts import InEngine

# The mean length of jobs is taken over so many of the latest.
_LATEST = 1000
_HELD_NAMED = 5


@contextmanager
def opened(run: RunDirectory) -> Iterator[QueueReader]:
    """The run's queue, for reading while the context lasts. Raises UsageError and QueueUnreadable."""
    reader = QueueReader(run.queue)
    try:
        yield reader
    finally:
        reader.close()


def read_status(run: RunDirectory, page: Page | None = None) -> RunStatus:
    """How the run stands, with a page of its jobs. Raises UsageError without a queue, and QueueUnreadable."""
    with opened(run) as reader:
        return status_of(run, reader, page or Page())


def status_of(run: RunDirectory, reader: QueueReader, page: Page) -> RunStatus:
    """The same from a queue that is open already: for those who look again and again."""
    with reader.snapshot():
        return _status_of(run, reader, page)


def _status_of(run: RunDirectory, reader: QueueReader, page: Page) -> RunStatus:
    now = clock.wall()
    submission = _submission(reader)
    counts = read_counts(reader)
    dispatcher = _dispatcher(run, reader)
    rows, matching = rows_of(reader, page, submission, counts, _longest_first(dispatcher))
    facts = _wait_facts(reader, dispatcher)
    place = places(page)
    jobs = tuple(
        job_status(run, reader, row, facts, now, next(place) if row["state"] == JobState.WAITING else None)
        for row in rows
    )
    return RunStatus(
        folder=run.root,
        at=now,
        counts=counts,
        paused=_paused(reader, submission),
        held=_held(reader, submission),
        dispatcher=dispatcher,
        in_engine=_in_engine(reader),
        jobs=jobs,
        matching=matching,
        eta_s=_time_left(reader, counts, dispatcher),
    )


def read_counts(reader: QueueReader) -> Counts:
    """Jobs of the latest submission by state."""
    rows = reader.rows(
        "SELECT state, count(*) AS n FROM jobs WHERE submission = ? GROUP BY state", (_submission(reader),)
    )
    return Counts.of({row["state"]: row["n"] for row in rows})


def job_names(reader: QueueReader) -> list[str]:
    """The names of all jobs of the queue, oldest first."""
    return [row["name"] for row in reader.rows("SELECT name FROM jobs ORDER BY id")]


def attempts_of(reader: QueueReader, job: str) -> tuple[AttemptStatus, ...]:
    """All attempts of the job with this name, in order; without progress."""
    rows = reader.rows(
        "SELECT a.* FROM attempts a JOIN jobs j ON j.id = a.job WHERE j.name = ? ORDER BY a.number", (job,)
    )
    return tuple(attempt_status(row, None) for row in rows)


def _submission(reader: QueueReader) -> int:
    row = reader.one("SELECT value FROM meta WHERE key = 'submission'")
    return 0 if row is None else int(row["value"])


def _paused(reader: QueueReader, submission: int) -> int:
    """Waiting jobs that are held, and running ones whose processes are stopped."""
    if not (reader.has("jobs", "held") and reader.has("attempts", "paused")):
        return 0
    row = reader.one(
        # The plus: by the index of those that are held, which are few, and not by that of all of a submission.
        "SELECT (SELECT count(*) FROM jobs WHERE held = 1 AND +submission = ?)"
        " + (SELECT count(*) FROM attempts WHERE state = 'running' AND paused <> '')",
        (submission,),
    )
    return 0 if row is None else int(row[0])


def _held(reader: QueueReader, submission: int) -> tuple[str, ...]:
    """The first waiting jobs that are held, by name."""
    if not reader.has("jobs", "held"):
        return ()
    query = "SELECT name FROM jobs WHERE held = 1 AND +submission = ? ORDER BY id LIMIT ?"
    return tuple(row["name"] for row in reader.rows(query, (submission, _HELD_NAMED)))


def _dispatcher(run: RunDirectory, reader: QueueReader) -> DispatcherStatus | None:
    """The process of the last run in the queue, if it is there still: the same pid, and older than that run.

    The lock itself is not tried: to hold it for a moment would send a dispatcher away that begins just then. What its
    holder wrote into it is read: who gave it back, though the process lives on, is at work no more.
    """
    row = reader.one("SELECT pid, boot, started_at, started_mono, ended_at FROM runs ORDER BY id DESC LIMIT 1")
    if row is None or row["ended_at"] is not None or row["boot"] != boot_id():
        return None
    inode = reader.one("SELECT value FROM meta WHERE key = 'inode'")
    try:
        here = reader.path.stat().st_ino
    except OSError:
        return None  # the folder was removed or moved under our eyes
    if inode is None or inode["value"] != str(here):
        return None  # a copied folder: the original's dispatcher works on the original
    process = identify(row["pid"])
    if process is None or process.start_ticks / os.sysconf("SC_CLK_TCK") > row["started_mono"] + 1:
        return None
    if not _is_in_lock(run.lock, row["pid"]):
        return None
    return DispatcherStatus(pid=row["pid"], since=row["started_at"], standing=standing.read(run.standing, row["pid"]))


def _is_in_lock(lock: Path, pid: int) -> bool:
    """Whether the lock file names this process; a lock that can't be read, or names nobody in words, is no evidence."""
    try:
        words = lock.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return True
    return bool(words) and words[0] == str(pid)


def _in_engine(reader: QueueReader) -> InEngine | None:
    """What an engine beyond this machine has: never more than one at a time."""
    if not reader.has("attempts", "engine"):
        return None
    row = reader.one(
        "SELECT max(engine), count(*), count(*) - count(node) FROM attempts WHERE state = 'running' AND engine <> ?",
        (LOCAL,),
    )
    return InEngine(*row) if row is not None and row[1] else None


def _longest_first(dispatcher: DispatcherStatus | None) -> bool:
    """Whether the one at work takes the longest first, as far as it has told."""
    told = None if dispatcher is None else dispatcher.standing
    return told is not None and told.settings.get("order") == "longest"


def _wait_facts(reader: QueueReader, dispatcher: DispatcherStatus | None) -> WaitFacts:
    lowest, opened_at = None, 0.0
    if reader.has("jobs", "round"):
        row = reader.one("SELECT min(round) FROM jobs WHERE state IN ('waiting', 'running')")
        lowest = None if row is None else row[0]
        row = reader.one("SELECT value FROM meta WHERE key = 'round'")
        number, at = round_opened(None if row is None else row["value"])
        opened_at = at if number == lowest else 0.0
    return WaitFacts(
        dispatcher=dispatcher is not None,
        standing=None if dispatcher is None else dispatcher.standing,
        lowest_round=lowest,
        round_opened_at=opened_at,
    )


def _time_left(reader: QueueReader, counts: Counts, dispatcher: DispatcherStatus | None) -> float | None:
    """By the latest jobs that are done, and as many side by side as the dispatcher says, or else as run now."""
    if dispatcher is None or not counts.waiting + counts.running:
        return None
    cost = reader.column("jobs", "cost", "j")
    row = reader.one(
        "SELECT count(*), total(run_s), total(CASE WHEN cost > 0 THEN run_s END), total(cost) FROM"  # noqa: S608
        f" (SELECT a.ended_mono - a.started_mono AS run_s, {cost} FROM attempts a JOIN jobs j ON j.id = a.job"
        " WHERE a.state = 'done' AND a.ended_mono IS NOT NULL ORDER BY a.id DESC LIMIT ?)",
        (_LATEST,),
    )
    if row is None or not row[0]:
        return None
    pace = Pace(*row)
    there = reader.rows(
        f"SELECT a.*, {cost} FROM attempts a JOIN jobs j ON j.id = a.job WHERE a.state = 'running'"  # noqa: S608
    )
    running = [Running(_elapsed_s(each), each["cost"]) for each in there]
    costs = reader.one(COSTS_WAITING, (_submission(reader),)) if pace.cost else None
    waiting = Waiting(counts.waiting) if costs is None else Waiting(*costs)
    told = None if dispatcher.standing is None else dispatcher.standing.at_once
    return time_left(pace, waiting, running, told or max(1, len(running)))


def _elapsed_s(attempt: sqlite3.Row) -> float:
    """How long a running attempt has run by now, as far as its row tells; 0 in an engine's line."""
    handed = handed_of(attempt)
    if handed is None:
        return max(0.0, clock.mono() - float(attempt["started_mono"]))
    return 0.0 if handed.node is None else max(0.0, clock.wall() - float(attempt["started_at"]))
