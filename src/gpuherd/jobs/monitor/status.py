"""The status of a run: read from its queue by anybody who may read it, while a dispatcher works on it or after."""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpuherd.engines.process_tree import boot_id, identify
from gpuherd.engines.registry import LOCAL
from gpuherd.jobs import clock, dispatcher_state
from gpuherd.jobs.dispatcher_state import InEngine
from gpuherd.jobs.gpu import health
from gpuherd.jobs.job import JobState
from gpuherd.jobs.monitor.format import Pace, Running, WaitFacts, Waiting, time_left
from gpuherd.jobs.monitor.job_status import (
    PAGE,
    AttemptStatus,
    DispatcherStatus,
    JobStatus,
    Page,
    RunStatus,
    attempt_status,
    job_statuses,
    places,
    rows_of,
)
from gpuherd.jobs.queue.connection import COSTS_WAITING
from gpuherd.jobs.queue.reader import QueueReader, is_there
from gpuherd.jobs.queue.schema import damaged
from gpuherd.jobs.queue.submission import handed_of, round_opened
from gpuherd.jobs.records import Counts
from gpuherd.jobs.run_dir import RunDirectory

# Which GPUs a queue leaves out for a while because jobs failed on them, for those who only look at it.
#
# Reads the book that the dispatcher keeps (``health``); what is in it is decided by ``quarantine``.


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A GPU that the queue in this folder leaves out until ``until`` (seconds since 1970). ``sentence`` says for how
    long and why, ``reason`` only why.
    """

    queue: str
    until: float
    reason: str
    sentence: str


def left_out(run: RunDirectory, now: float) -> dict[str, LeftOut]:
    """The GPUs that this queue leaves out now, by UUID; none when there is no queue.

    Raises QueueUnreadable when there is one that can't be read.
    """
    if not is_there(run.queue):
        return {}
    with closing(QueueReader(run.queue)) as reader:
        return read_left_out(run, reader, now)


def read_left_out(run: RunDirectory, reader: QueueReader, now: float) -> dict[str, LeftOut]:
    """The same from a queue that is open already."""
    # A queue of an older gpuherd has no such table.
    if reader.one("SELECT 1 FROM sqlite_master WHERE name = 'gpu_health'") is None:
        return {}
    known = {}
    for row in reader.rows("SELECT uuid, state FROM gpu_health"):
        with suppress(ValueError):
            known[row["uuid"]] = health.from_json(row["state"])
    return {
        uuid: LeftOut(str(run.root), known[uuid].until or now, known[uuid].reason or "", sentence)
        for uuid, sentence in health.excluded(known, now).items()
    }


# How a run stands: read from its queue, by anybody who may read it, while a dispatcher works on it or after.
#
# Nothing is changed and nobody is held up. A long queue is read by the page: counts come from an index, and only the
# jobs that are asked for (``pages``) are taken apart (``jobstatus``). Here is the whole: counts, who works on it, and
# how long it will take; a figure that is not known is None.

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
    with looking(run, reader, page) as look:
        return replace(look.status, jobs=tuple(look.jobs()))


def by_pages(run: RunDirectory, page: Page, each: int = PAGE) -> tuple[RunStatus, Iterator[list[JobStatus]]]:
    """The status without its jobs, and all jobs of the page, so many at a time: the first are there before the last are
    read, and no more of them are in memory.

    One snapshot fixes which jobs there are; each chunk has a snapshot of its own, so that no writer waits long. Raises
    UsageError without a queue, and QueueUnreadable, also from the iterator.
    """
    chunks = _by_pages(run, page, each)
    return next(chunks)[0], (jobs for _, jobs in chunks)


def _by_pages(run: RunDirectory, page: Page, each: int) -> Iterator[tuple[RunStatus, list[JobStatus]]]:
    with opened(run) as reader:
        with looking(run, reader, page) as look:
            numbers = array("q", look.numbers())
        yield look.status, []
        for first in range(0, len(numbers), each):
            with reader.snapshot():
                jobs = look.those(numbers[first : first + each])
            yield look.status, jobs


@contextmanager
def looking(run: RunDirectory, reader: QueueReader, page: Page) -> Iterator[StatusSnapshot]:
    """A look at the run at one moment, which lasts as long as the context: for pages that are too long to keep in
    memory. Keep it short, as any ``snapshot``."""
    with reader.snapshot():
        yield StatusSnapshot(run, reader, page)


class StatusSnapshot:
    """A run as it stands at one moment. Made by ``looking``.

    Attributes:
        status: how it stands, without its jobs.
    """

    def __init__(self, run: RunDirectory, reader: QueueReader, page: Page):
        self._run, self._reader, self._page = run, reader, page
        at = clock.wall()
        self._submission = _submission(reader)
        counts = read_counts(reader)
        dispatcher = _dispatcher(run, reader)
        labels = {} if dispatcher is None else _labels(dispatcher)
        left_out = read_left_out(run, reader, at).items() if labels else ()
        out = {uuid: each for uuid, each in left_out if uuid in labels}
        self._longest_first = _longest_first(dispatcher)
        self._places = places(page)
        self._rows_of_page, matching = rows_of(reader, page, self._submission, counts, self._longest_first)
        self.status = RunStatus(
            folder=run.root,
            at=at,
            counts=counts,
            paused=_paused(reader, self._submission),
            held=_held(reader, self._submission),
            dispatcher=dispatcher,
            in_engine=_in_engine(reader),
            jobs=(),
            matching=matching,
            eta_s=_time_left(reader, counts, dispatcher, [each.until - at for each in out.values()]),
            left_out={labels[uuid]: each.sentence for uuid, each in out.items()},
        )

    def jobs(self, states: Collection[JobState] = ()) -> Iterator[JobStatus]:
        """The jobs of the page, once; or those of it in these states, where the page has no offset."""
        page = self._only(states) if states else self._page
        if page is None:
            return iter(())
        facts = _wait_facts(self._reader, self.status.dispatcher)
        rows = self._rows(page, "*") if states else self._rows_of_page
        return job_statuses(self._run, self._reader, facts, self.status.at, rows, places(page))

    def numbers(self) -> Iterator[int]:
        """The numbers of the page's jobs, in their order; in place of ``jobs``."""
        return (row["id"] for row in self._rows(self._page, "id"))

    def those(self, numbers: Sequence[int]) -> list[JobStatus]:
        """How the next jobs of ``numbers`` stand in a snapshot that is younger than this look."""
        query = f"SELECT * FROM jobs WHERE id IN ({','.join('?' * len(numbers))})"  # noqa: S608 - our own words
        rows = {row["id"]: row for row in self._reader.each(query, tuple(numbers))}
        there = [rows[number] for number in numbers if number in rows]
        facts = _wait_facts(self._reader, self.status.dispatcher)
        return list(job_statuses(self._run, self._reader, facts, clock.wall(), there, self._places))

    def columns(self, state: JobState, columns: str) -> Iterator[str]:
        """The first of these columns of the rows of the page's jobs in this state."""
        page = self._only((state,))
        return iter(()) if page is None else (row[0] for row in self._rows(page, columns))

    def _only(self, states: Collection[JobState]) -> Page | None:
        both = [state for state in states if not self._page.states or state in self._page.states]
        return replace(self._page, states=both) if both else None

    def _rows(self, page: Page, columns: str) -> Iterator[sqlite3.Row]:
        return rows_of(self._reader, page, self._submission, self.status.counts, self._longest_first, columns)[0]


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
    if row is None:
        raise damaged(reader.path, "its table meta has no submission")
    return int(row["value"])


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
    return DispatcherStatus(
        pid=row["pid"], since=row["started_at"], standing=dispatcher_state.read(run.standing, row["pid"])
    )


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


def _labels(dispatcher: DispatcherStatus) -> dict[str, str]:
    return {} if dispatcher.standing is None else {gpu.uuid: gpu.label for gpu in dispatcher.standing.gpus}


def _time_left(
    reader: QueueReader, counts: Counts, dispatcher: DispatcherStatus | None, back_in_s: Sequence[float]
) -> float | None:
    """By the latest jobs that are done, and as many side by side as the dispatcher says, or else as run now."""
    if dispatcher is None or not counts.waiting + counts.running:
        return None
    cost = reader.column("jobs", "cost", "j")
    paused = "a.paused_s" if reader.has("attempts", "paused_s") else "0"
    row = reader.one(
        "SELECT count(*), total(run_s), total(CASE WHEN cost > 0 THEN run_s END), total(cost) FROM"  # noqa: S608
        f" (SELECT a.ended_mono - a.started_mono - {paused} AS run_s, {cost} FROM attempts a"
        " JOIN jobs j ON j.id = a.job"
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
    at_once = max(1, len(running)) if told is None else told
    return time_left(pace, waiting, running, at_once, back_in_s)


def _elapsed_s(attempt: sqlite3.Row) -> float:
    """How long a running attempt has run by now, as far as its row tells; 0 in an engine's line."""
    handed = handed_of(attempt)
    if handed is None:
        # Without its pauses, in which it did nothing of what is left.
        known = attempt.keys()
        paused_s = float(attempt["paused_s"]) if "paused_s" in known else 0.0
        if "paused_mono" in known and attempt["paused_mono"] is not None:
            paused_s += clock.mono() - float(attempt["paused_mono"])
        return max(0.0, clock.mono() - float(attempt["started_mono"]) - paused_s)
    return 0.0 if handed.node is None else max(0.0, clock.wall() - float(attempt["started_at"]))
