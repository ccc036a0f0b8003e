"""The status of a run, read from its queue by every user who may read it, during the run or after.

Nothing is changed and no process is held up. A long queue is read by the page: counts come from an index, and only the
jobs of a page are read in full (``job_status``). A figure that is not known is None.
"""

from __future__ import annotations

import os
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuherd.atomic import without_waiting
from gpuherd.engines.process_tree import boot_id, identify
from gpuherd.engines.registry import LOCAL
from gpuherd.jobs import clock, dispatcher_state
from gpuherd.jobs.dispatcher_state import DispatcherState
from gpuherd.jobs.gpu import health
from gpuherd.jobs.monitor.job_status import (
    PAGE,
    JobSelection,
    JobStatuses,
    live_attempt,
    matching,
    rows_of,
)
from gpuherd.jobs.monitor.turns import Turn, turn_of
from gpuherd.jobs.queue.connection import COSTS_WAITING
from gpuherd.jobs.queue.reader import QueueReader, attempt_row, is_there
from gpuherd.jobs.queue.schema import damaged
from gpuherd.jobs.records import AttemptRow, Counts, JobStatus
from gpuherd.jobs.run_dir import RunDirectory

# The mean length of jobs is taken over so many of the latest.
_LATEST = 1000
_HELD_NAMED = 5
_LOCK_BYTES = 1000  # more than any lock file has


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A GPU that the queue in this folder leaves out until ``until`` (seconds since 1970), because jobs fail on it.
    ``sentence`` says for how long and why, ``reason`` only why.
    """

    queue: str
    until: float
    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class InEngine:
    """How many running jobs an engine beyond this machine has, and how many of them it has not begun."""

    engine: str
    jobs: int
    in_line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherStatus:
    """The gpuherd that works on the queue. ``state`` is None until it has written one."""

    pid: int
    since: float
    state: DispatcherState | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run at one moment.

    Attributes:
        folder: the run folder.
        at: wall-clock second at which it was read.
        counts: jobs of the latest submission by state; ``paused`` of them are paused.
        held: names of the first waiting jobs that are paused: they come last, and may not be on the page.
        dispatcher: the gpuherd that works on it, None for none.
        in_engine: the running jobs that an engine beyond this machine has; None for none.
        jobs: the page: running jobs first, then failed, waiting, cancelled, done.
        matching: how many jobs the page is taken from.
        eta_s: seconds until all is done by the mean length of jobs so far, None while unknown.
        left_out: GPUs that are left out for a while, by label, each with a sentence on how long and why.
        turn: where its gpuherd stands among the users who wait for this machine's GPUs; None where no other waits.
    """

    folder: Path
    at: float
    counts: Counts
    paused: int
    dispatcher: DispatcherStatus | None
    jobs: tuple[JobStatus, ...]
    matching: int
    eta_s: float | None
    held: tuple[str, ...] = ()
    in_engine: InEngine | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    turn: Turn | None = None


def read_status(run: RunDirectory, page: JobSelection | None = None) -> RunStatus:
    """The status of a run, with a page of its jobs. Raises UsageError without a queue, and QueueUnreadable."""
    with opened(run) as reader:
        return status_of(run, reader, page or JobSelection())


@contextmanager
def opened(run: RunDirectory) -> Iterator[QueueReader]:
    """The run's queue, for reading while the context lasts. Raises UsageError and QueueUnreadable."""
    with closing(QueueReader(run.queue)) as reader:
        yield reader


def status_of(run: RunDirectory, reader: QueueReader, page: JobSelection) -> RunStatus:
    """The status from a queue that is open already, for repeated reading."""
    with snapshot(run, reader, page) as taken:
        return replace(taken.status, jobs=tuple(taken.jobs(taken.rows())))


def by_pages(run: RunDirectory, page: JobSelection, each: int = PAGE) -> tuple[RunStatus, Iterator[list[JobStatus]]]:
    """The status without its jobs, and the jobs of the page in chunks of ``each``: the first chunk is there before the
    last is read, and no more than one is in memory.

    One snapshot fixes which jobs there are; each chunk has a snapshot of its own, so that no writer waits long. Raises
    UsageError without a queue, and QueueUnreadable, also from the iterator.
    """
    chunks = _by_pages(run, page, each)
    return next(chunks)[0], (jobs for _, jobs in chunks)


def _by_pages(run: RunDirectory, page: JobSelection, each: int) -> Iterator[tuple[RunStatus, list[JobStatus]]]:
    with opened(run) as reader:
        with snapshot(run, reader, page) as taken:
            numbers = array("q", (row["id"] for row in taken.rows("id")))
        yield taken.status, []
        for first in range(0, len(numbers), each):
            chunk = numbers[first : first + each]
            query = f"SELECT * FROM jobs WHERE id IN ({','.join('?' * len(chunk))})"  # noqa: S608 - our own words
            with reader.snapshot():
                rows = {row["id"]: row for row in reader.each(query, tuple(chunk))}
                jobs = list(taken.jobs(rows[number] for number in chunk if number in rows))
            yield taken.status, jobs


@contextmanager
def snapshot(run: RunDirectory, reader: QueueReader, page: JobSelection) -> Iterator[StatusSnapshot]:
    """The run at one moment, which lasts as long as the context: for pages that are too long to keep in memory. Keep it
    short, as every ``QueueReader.snapshot``."""
    with reader.snapshot():
        yield StatusSnapshot(run, reader, page)


class StatusSnapshot:
    """A run at one moment. Made by ``snapshot``.

    Attributes:
        status: without its jobs.
    """

    def __init__(self, run: RunDirectory, reader: QueueReader, page: JobSelection):
        self._reader, self._page = reader, page
        at = clock.wall()
        self._submission = _submission(reader)
        counts = read_counts(reader)
        dispatcher = _dispatcher(run, reader)
        state = None if dispatcher is None else dispatcher.state
        labels = {} if state is None else {gpu.uuid: gpu.label for gpu in state.gpus}
        out = _left_out(run, reader, at) if labels else {}
        out = {uuid: each for uuid, each in out.items() if uuid in labels}
        # As far as the dispatcher has written it down.
        self._longest_first = state is not None and state.settings.get("order") == "longest"
        self._jobs = JobStatuses(run, reader, page, working=dispatcher is not None, state=state)
        eta_s = None
        if dispatcher is not None and counts.waiting + counts.running:
            eta_s = _eta_s(run, reader, self._submission, counts, state, [each.until - at for each in out.values()])
        self.status = RunStatus(
            folder=run.root,
            at=at,
            counts=counts,
            paused=_paused(reader, self._submission),
            held=_held(reader, self._submission),
            dispatcher=dispatcher,
            in_engine=_in_engine(reader),
            jobs=(),
            matching=matching(reader, page, self._submission, counts),
            eta_s=eta_s,
            left_out={labels[uuid]: each.sentence for uuid, each in out.items()},
            turn=turn_of(dispatcher.pid, state) if dispatcher is not None and counts.waiting and labels else None,
        )

    def rows(self, columns: str = "*", of_ended: str | None = None) -> Iterator[sqlite3.Row]:
        """The rows of the page's jobs, in their order; ``of_ended``: other columns of jobs that have ended."""
        counts = self.status.counts
        return rows_of(self._reader, self._page, self._submission, counts, self._longest_first, columns, of_ended)

    def jobs(self, rows: Iterable[sqlite3.Row]) -> Iterator[JobStatus]:
        """The jobs of these rows of the page, each once and in their order; also in a later snapshot than this one."""
        return self._jobs.of(rows)


def left_out(run: RunDirectory, now: float) -> dict[str, LeftOut]:
    """The GPUs that this queue leaves out now, by UUID; none when there is no queue.

    Raises QueueUnreadable when there is one that can't be read.
    """
    if not is_there(run.queue):
        return {}
    with opened(run) as reader:
        return _left_out(run, reader, now)


def _left_out(run: RunDirectory, reader: QueueReader, now: float) -> dict[str, LeftOut]:
    known = {}
    for row in reader.rows("SELECT uuid, state FROM gpu_health"):
        with suppress(ValueError):
            known[row["uuid"]] = health.from_json(row["state"])
    return {
        uuid: LeftOut(str(run.root), known[uuid].until or now, known[uuid].reason or "", sentence)
        for uuid, sentence in health.excluded(known, now).items()
    }


def read_counts(reader: QueueReader) -> Counts:
    """Jobs of the latest submission by state."""
    rows = reader.rows(
        "SELECT state, count(*) AS n FROM jobs WHERE submission = ? GROUP BY state", (_submission(reader),)
    )
    return Counts.of({row["state"]: row["n"] for row in rows})


def job_names(reader: QueueReader) -> list[str]:
    """The names of all jobs of the queue, oldest first."""
    return [row["name"] for row in reader.rows("SELECT name FROM jobs ORDER BY id")]


def attempts_of(reader: QueueReader, job: str) -> tuple[AttemptRow, ...]:
    """All attempts of the job with this name, in order, as recorded."""
    rows = reader.rows(
        "SELECT a.* FROM attempts a JOIN jobs j ON j.id = a.job WHERE j.name = ? ORDER BY a.number", (job,)
    )
    return tuple(attempt_row(row, job) for row in rows)


def _submission(reader: QueueReader) -> int:
    number = reader.value("SELECT value FROM meta WHERE key = 'submission'")
    if number is None:
        raise damaged(reader.path, "its table meta has no submission")
    return int(number)


def _paused(reader: QueueReader, submission: int) -> int:
    """Waiting jobs that are held, and running ones whose processes are stopped."""
    number = reader.value(
        # The plus has SQLite use the index of held jobs, which are few, and not that of the submission.
        "SELECT (SELECT count(*) FROM jobs WHERE held = 1 AND +submission = ?)"
        " + (SELECT count(*) FROM attempts WHERE state = 'running' AND paused <> '')",
        (submission,),
    )
    return int(number)


def _held(reader: QueueReader, submission: int) -> tuple[str, ...]:
    """The names of the first waiting jobs that are held."""
    query = "SELECT name FROM jobs WHERE held = 1 AND +submission = ? ORDER BY id LIMIT ?"
    return tuple(row["name"] for row in reader.rows(query, (submission, _HELD_NAMED)))


def _dispatcher(run: RunDirectory, reader: QueueReader) -> DispatcherStatus | None:
    """The process of the last run in the queue, if it still exists: the same pid, and older than that run.

    The lock itself is not tried: holding it for a moment would turn away a dispatcher that begins just then. Its text
    is read: a process that gave the lock back works on the queue no more, though it lives on.
    """
    row = reader.one("SELECT pid, boot, started_at, started_mono, ended_at FROM runs ORDER BY id DESC LIMIT 1")
    if row is None or row["ended_at"] is not None or row["boot"] != boot_id():
        return None
    inode = reader.value("SELECT value FROM meta WHERE key = 'inode'")
    try:
        here = reader.path.stat().st_ino
    except OSError:
        return None  # the folder was removed or moved meanwhile
    if inode != str(here):
        return None  # a copied folder: the original's dispatcher works on the original
    process = identify(row["pid"])
    if process is None or process.start_ticks / os.sysconf("SC_CLK_TCK") > row["started_mono"] + 1:
        return None
    if not _is_in_lock(run.lock, row["pid"]):
        return None
    return DispatcherStatus(
        pid=row["pid"], since=row["started_at"], state=dispatcher_state.read(run.state_file, row["pid"])
    )


def _is_in_lock(lock: Path, pid: int) -> bool:
    """Whether the lock file names this process. True as well for a file that can't be read."""
    try:
        with open(lock, "rb", opener=without_waiting) as file:
            words = (file.read(_LOCK_BYTES) or b"").split()
    except OSError:
        return True
    return bool(words) and words[0] == str(pid).encode()


def _in_engine(reader: QueueReader) -> InEngine | None:
    """The jobs in an engine beyond this machine; a queue uses at most one at a time."""
    row = reader.one(
        "SELECT max(engine), count(*), count(*) - count(node) FROM attempts WHERE state = 'running' AND engine <> ?",
        (LOCAL,),
    )
    return InEngine(*row) if row is not None and row[1] else None


def _eta_s(
    run: RunDirectory,
    reader: QueueReader,
    submission: int,
    counts: Counts,
    state: DispatcherState | None,
    back_in_s: Sequence[float],
) -> float | None:
    """Seconds until all jobs are done, None while none is.

    A running job that reports its progress is expected to go on at its pace. Another job takes as long per unit of its
    cost as the latest jobs that are done, and without a cost their mean. As many run at a time as the dispatcher says,
    or else as run now.

    Args:
        back_in_s: after how many seconds each GPU that is left out for now comes back and takes one more job.
    """
    done, done_s, costed_s, cost = reader.rows(
        "SELECT count(*), total(run_s), total(CASE WHEN cost > 0 THEN run_s END), total(cost) FROM"
        " (SELECT a.ended_mono - a.started_mono - a.paused_s AS run_s, j.cost FROM attempts a"
        " JOIN jobs j ON j.id = a.job"
        " WHERE a.state = 'done' AND a.ended_mono IS NOT NULL ORDER BY a.id DESC LIMIT ?)",
        (_LATEST,),
    )[0]
    if not done:
        return None
    running = reader.rows("SELECT a.*, j.cost FROM attempts a JOIN jobs j ON j.id = a.job WHERE a.state = 'running'")
    waiting, costed, cost_waiting = counts.waiting, 0, 0.0
    if cost:
        waiting, costed, cost_waiting = reader.rows(COSTS_WAITING, (submission,))[0]
    per_cost, mean_s = costed_s / cost if cost else 0.0, done_s / done
    work_s = cost_waiting * per_cost + (waiting - costed) * mean_s
    for each in running:
        attempt = live_attempt(each, "", run)
        expected_s = mean_s if each["cost"] is None or not cost else each["cost"] * per_cost
        left_s = max(0.0, expected_s - (attempt.worked_s or 0.0))
        work_s += left_s if attempt.eta_s is None else attempt.eta_s
    at_once = max(1, len(running)) if state is None or state.at_once is None else state.at_once
    return _ends_in_s(work_s, min(max(at_once, 0 if back_in_s else 1), waiting + len(running)), back_in_s)


def _ends_in_s(work_s: float, places: int, back_in_s: Sequence[float]) -> float:
    """Seconds until so much work is done in so many places, with one more after each of ``back_in_s`` seconds: all
    places that exist by then end together.

    >>> _ends_in_s(100.0, 1, [40.0]), _ends_in_s(100.0, 0, [40.0])
    (70.0, 140.0)
    """
    begins = [*[0.0] * places, *sorted(back_in_s)]
    ends = work_s + begins[0] if begins else work_s
    for number, begin in enumerate(begins):
        if number and begin >= ends:
            break
        ends = (work_s + sum(begins[: number + 1])) / (number + 1)
    return ends
