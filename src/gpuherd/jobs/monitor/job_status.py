"""Jobs of a queue as ``JobStatus``: which jobs are on a page, in which order, and why each waits.

Pages are read from the indexes, so that a long queue costs no more than the page. The reason why a job waits comes from
its dispatcher's last decision (``dispatcher_state``) or follows from the queue.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gpuherd.engines.progress import Progress
from gpuherd.engines.progress import read as read_progress
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import clean
from gpuherd.jobs import clock
from gpuherd.jobs.dispatcher_state import DispatcherState, engine_name
from gpuherd.jobs.job import ENDED, JobState
from gpuherd.jobs.queue.reader import (
    FAMILIES,
    QueueReader,
    attempt_row,
    family_memory,
    process_of,
    queued,
    round_opened,
)
from gpuherd.jobs.records import AttemptRow, AttemptState, Counts, JobStatus, PauseReason
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.scheduler.memory import Ask, FamilyMemory, asks_for
from gpuherd.units import duration

# The order of states on a page.
SHOWN_FIRST = (JobState.RUNNING, JobState.FAILED, JobState.WAITING, JobState.CANCELLED, JobState.DONE)
PAGE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSelection:
    """Which jobs to read: those in these states (all if empty), with ``text`` in their name, after ``offset``.

    ``each``: at most so many of every state but running, so that one long state does not hide the others. ``begun``:
    without the jobs that an engine beyond this machine has and has not begun.
    """

    states: Collection[JobState] = ()
    text: str = ""
    names: Collection[str] = ()
    limit: int = PAGE
    offset: int = 0
    each: int | None = None
    begun: bool = False

    @property
    def searches(self) -> bool:
        """Whether it is not known from the counts how many jobs match."""
        return bool(self.text or self.names or self.begun)


EVERYTHING = JobSelection(limit=2**31)


# --- the rows of a page -------------------------------------------------------------------------------------------


def matching(reader: QueueReader, page: JobSelection, submission: int, counts: Counts) -> int:
    """How many jobs the page is taken from."""
    return sum(_matching(reader, page, submission, counts, state) for state in _states(page))


def rows_of(
    reader: QueueReader,
    page: JobSelection,
    submission: int,
    counts: Counts,
    longest_first: bool,
    columns: str = "*",
    of_ended: str | None = None,
) -> Iterator[sqlite3.Row]:
    """The rows of the page, to be read one after the other within one snapshot. Of a long queue no more is read than
    the page holds, unless the page is a search.

    ``columns``: what to read of each row; of waiting jobs all is read. ``of_ended``: of jobs that have ended, where
    that is something else.
    """
    skip, room = page.offset, page.limit
    for state in _states(page):
        here = _matching(reader, page, submission, counts, state)
        # Running jobs are never many: at most as many as there are GPUs or CPU slots.
        most = min(room, here if page.each is None or state is JobState.RUNNING else page.each)
        if most > 0 and skip < here:
            if state is JobState.WAITING and not page.searches:
                yield from _waiting(reader, submission, longest_first, most, skip)
            else:
                # Only the numbers are sorted, from an index, and not the rows.
                where, values = _where(page, submission, state)
                order = _order(state, longest_first)
                chosen = f"SELECT id FROM jobs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608
                wanted = columns if of_ended is None or state not in ENDED else of_ended
                query = f"SELECT {wanted} FROM jobs WHERE id IN ({chosen}) ORDER BY {order}"  # noqa: S608
                yield from reader.each(query, (*values, most, skip))
            room -= min(most, here - skip)
        skip = max(0, skip - here)


def _states(page: JobSelection) -> list[JobState]:
    return [state for state in SHOWN_FIRST if not page.states or state in page.states]


def _matching(reader: QueueReader, page: JobSelection, submission: int, counts: Counts, state: JobState) -> int:
    if page.searches:
        return _count(reader, *_where(page, submission, state))
    return int(getattr(counts, state.value))


def places(page: JobSelection) -> Iterator[int | None]:
    """For each waiting job of the page how many waiting jobs are ahead of it; None where the page does not say."""
    if page.searches or (page.offset and set(page.states) != {JobState.WAITING}):
        return itertools.repeat(None)
    return itertools.count(page.offset)


def _count(reader: QueueReader, where: str, values: tuple[object, ...]) -> int:
    return int(reader.value(f"SELECT count(*) FROM jobs WHERE {where}", values))  # noqa: S608 - our own words


def _waiting(reader: QueueReader, submission: int, longest_first: bool, most: int, skip: int) -> Iterator[sqlite3.Row]:
    """Waiting jobs in the order of ``_order``. Jobs that could run come from the dispatcher's indexes, one for jobs on
    GPUs and one for jobs on the CPU."""
    where, could_run = "submission = ? AND state = 'waiting'", "blocked = 0 AND held = 0"
    values: tuple[object, ...] = (submission,)
    order = _order(JobState.WAITING, longest_first)
    by_index = order.removeprefix(_CANNOT_RUN_LAST)
    of_each = " UNION ALL ".join(
        f"SELECT * FROM (SELECT * FROM jobs WHERE {where} AND {could_run} AND (gpus > 0) = {on_gpus}"  # noqa: S608
        f" ORDER BY {by_index} LIMIT ?)"
        for on_gpus in (1, 0)
    )
    one = (*values, skip + most)
    for row in reader.each(f"{of_each} ORDER BY {by_index} LIMIT ? OFFSET ?", (*one, *one, most, skip)):
        most -= 1
        yield row
    if most:
        skip = max(0, skip - _count(reader, f"{where} AND {could_run}", values))
        query = f"SELECT * FROM jobs WHERE {where} AND NOT ({could_run}) ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608
        yield from reader.each(query, (*values, most, skip))


_CANNOT_RUN_LAST = "blocked > 0 OR held, "


def _order(state: JobState, longest_first: bool) -> str:
    """Waiting jobs in the order in which they will run, jobs that can't run yet last; ended jobs the latest first."""
    if state is JobState.RUNNING:
        return "id"
    if state is not JobState.WAITING:
        return "id DESC"
    return f"{_CANNOT_RUN_LAST}round, priority DESC, {'rank DESC, ' if longest_first else ''}id"


def _where(page: JobSelection, submission: int, state: JobState) -> tuple[str, tuple[object, ...]]:
    where, values = "submission = ? AND state = ?", [submission, state.value]
    if page.text:
        where += " AND instr(lower(name), lower(?)) > 0"
        values.append(page.text)
    if page.names:
        where += f" AND name IN ({','.join('?' * len(page.names))})"
        values += page.names
    if page.begun:
        where += " AND id NOT IN (SELECT job FROM attempts WHERE state = 'running' AND engine <> ? AND node IS NULL)"
        values.append(LOCAL)
    return where, tuple(values)


# --- from rows to JobStatus ---------------------------------------------------------------------------------------

_NEEDS_NAMED = 3
# Jobs whose latest attempts one query reads: each is a variable, and some SQLite builds take 999.
_AT_ONCE = 500
_FAMILIES_KEPT = 1000
_PAUSED_FOR = {
    PauseReason.USER: "paused",
    PauseReason.DISK: "paused: there is too little disk space",
    PauseReason.STRANGER: "paused: someone else uses its GPU",
    PauseReason.IDLE: "paused: it did not use its GPU",
}


class JobStatuses:
    """The status of jobs of a queue.

    Args:
        page: the page of which the jobs are.
        working: a dispatcher works on the queue; ``state`` is the last state that it wrote.
    """

    def __init__(
        self,
        run: RunDirectory,
        reader: QueueReader,
        page: JobSelection,
        *,
        working: bool,
        state: DispatcherState | None,
    ):
        self._run, self._reader, self._working, self._state = run, reader, working, state
        self._places = places(page)
        self._family = lru_cache(maxsize=_FAMILIES_KEPT)(self._read_family)
        # The lowest unfinished round (None where no job waits or runs), since when it is open, and the time of reading.
        self._round: int | None = None
        self._round_opened_at = 0.0
        self._now = 0.0

    def of(self, rows: Iterable[sqlite3.Row]) -> Iterator[JobStatus]:
        """The status of the jobs of these rows, in their order, as the queue stands now; each row of the page once."""
        self._now = clock.wall()
        self._round = self._reader.value("SELECT min(round) FROM jobs WHERE state IN ('waiting', 'running')")
        number, at = round_opened(self._reader.value("SELECT value FROM meta WHERE key = 'round'"))
        self._round_opened_at = at if number == self._round else 0.0
        rest = iter(rows)
        while chunk := list(itertools.islice(rest, _AT_ONCE)):
            attempts = _latest_attempts(self._reader, [row["id"] for row in chunk])
            for row in chunk:
                last = attempts.get(row["id"])
                yield self._job(row, None if last is None else live_attempt(last, row["name"], self._run))

    def _job(self, row: sqlite3.Row, attempt: AttemptRow | None) -> JobStatus:
        spec = json.loads(row["spec"])
        state, held, reason = JobState(row["state"]), bool(row["held"]), row["reason"]
        if state is JobState.RUNNING and attempt is not None:
            reason = self._why_it_stands(row, attempt)
        elif state is JobState.WAITING:
            reason = self._why_it_waits(row, next(self._places))
        ask = self._ask(row, spec)
        return JobStatus(
            id=row["id"],
            name=row["name"],
            title=spec.get("title") or row["name"],
            state=state,
            paused=held or (state is JobState.RUNNING and attempt is not None and bool(attempt.paused)),
            reason=reason,
            gpus=row["gpus"],
            memory_mb=ask.memory_mb,
            learned=ask.because,
            priority=row["priority"],
            tries=row["tries"],
            attempts=row["attempts"],
            ready_at=self._ready_at(row) if state is JobState.WAITING and not held else None,
            command=tuple(spec["argv"]),
            attempt=attempt,
        )

    def _why_it_stands(self, row: sqlite3.Row, attempt: AttemptRow) -> str | None:
        """Why a job that counts as running does not run now; None where it does."""
        if row["cancelled_by"]:
            return f"is being cancelled by {row['cancelled_by']}"
        if attempt.in_line and attempt.handed is not None:
            there = engine_name(attempt.handed.engine)
            if attempt.handed.handle is None:
                return f"is being handed to {there}"
            why = None if self._state is None else self._state.handed.get(attempt.id)
            return f"waits in {there}" + (f": {clean(why)}" if why else "")
        if not self._working and attempt.run_s is None:
            return "has ended; how is told when a gpuherd works on it again"
        return "; ".join(_PAUSED_FOR[why] for why in attempt.paused) or None

    def _why_it_waits(self, row: sqlite3.Row, place: int | None) -> str:
        """The first thing that must change before the job can start. ``place``: how many waiting jobs are ahead of
        it, None where that is unknown."""
        last_failure = clean(row["reason"]) if row["reason"] else None  # or who paused it
        if row["held"]:
            return last_failure or "paused"
        unmet = self._unmet_needs(row["id"]) if row["blocked"] else ()
        if unmet:
            named = ", ".join(clean(name) for name in unmet[:_NEEDS_NAMED])
            return f"needs {named}" + (" and others" if len(unmet) > _NEEDS_NAMED else "")
        if not self._working:
            return "no gpuherd works on this queue"
        state = self._state
        if state is not None and state.mode != "working":
            return f"gpuherd is {state.mode}: nothing new is started"
        if row["not_before"] > self._now:
            after = f" after: {last_failure}" if last_failure else ""
            return f"next try in {duration(row['not_before'] - self._now)}{after}"
        if self._round is not None and row["round"] > self._round:
            return f"is of round {row['round']}; round {self._round} is not finished"
        if state is not None and state.closed is not None:
            return clean(state.closed)
        if state is not None and row["id"] in state.waits:
            return clean(state.waits[row["id"]])
        if not place:
            return "others are before it" if place is None else "is next"
        return f"{place} waiting jobs are before it" if place > 1 else "1 waiting job is before it"

    def _unmet_needs(self, job: int) -> tuple[str, ...]:
        """The names of the first jobs that this one needs and that have not succeeded."""
        rows = self._reader.rows(
            "SELECT n.name FROM needs JOIN jobs n ON n.id = needs.needed WHERE needs.job = ? AND n.state <> 'done'"
            " ORDER BY n.id LIMIT ?",
            (job, _NEEDS_NAMED + 1),
        )
        return tuple(row["name"] for row in rows)

    def _ask(self, row: sqlite3.Row, spec: dict[str, Any]) -> Ask:
        """The memory that the job asks for now; while it waits, with the estimate learned from its family."""
        if spec.get("family") is None or row["state"] != JobState.WAITING:
            return Ask(row["memory_mb"])
        job = queued(row)
        seen = None if job.family is None else self._family(job.family)
        most_mb = None if self._state is None else self._state.most_mb(row["gpus"])
        return asks_for(row["memory_mb"], seen, most_mb, less=job.may_ask_less)

    def _read_family(self, name: str) -> FamilyMemory | None:
        known = self._reader.one(f"{FAMILIES} WHERE name = ?", (name,))
        return None if known is None else family_memory(known)

    def _ready_at(self, row: sqlite3.Row) -> float | None:
        """Since when a waiting job could have run: its needs were met, and its round was open."""
        if row["blocked"] or (self._round is not None and row["round"] != self._round):
            return None
        return max(float(row["ready_at"]), self._round_opened_at)


def _latest_attempts(reader: QueueReader, jobs: Sequence[int]) -> dict[int, sqlite3.Row]:
    query = "SELECT * FROM attempts WHERE id IN (SELECT max(id) FROM attempts WHERE job IN ({}) GROUP BY job)"
    return {row["job"]: row for row in reader.each(query.format(",".join("?" * len(jobs))), tuple(jobs))}


def ran_s(row: sqlite3.Row) -> float | None:
    """How long the running attempt of this row has run by now; None where an engine has not begun it, and where its
    process is gone and its end not recorded yet."""
    process = process_of(row)
    if process is not None:
        return max(0.0, clock.mono() - row["started_mono"]) if process.is_alive() else None
    # By the wall clock: it goes on while this machine is started anew, whose own clock then begins again.
    return None if row["node"] is None else max(0.0, clock.wall() - row["started_at"])


def live_attempt(row: sqlite3.Row, job: str, run: RunDirectory) -> AttemptRow:
    """The attempt of this row; a running one with its times so far and its progress."""
    attempt = attempt_row(row, job)
    if attempt.state is not AttemptState.RUNNING:
        return attempt
    run_s, wait_s, paused_s = ran_s(row), attempt.wait_s, attempt.paused_s
    if attempt.in_line:
        wait_s += max(0.0, clock.wall() - attempt.started_at)
    if row["paused_mono"] is not None:
        paused_s += max(0.0, clock.mono() - row["paused_mono"])
    progress = read_progress(run.attempt_progress(attempt.id))
    eta_s = None if run_s is None else job_eta_s(progress, run_s - paused_s)
    return replace(attempt, run_s=run_s, wait_s=wait_s, paused_s=paused_s, progress=progress, eta_s=eta_s)


def job_eta_s(progress: Progress | None, elapsed_s: float) -> float | None:
    """Seconds until a running job is done, by its own progress; None while it has reported nothing to go by.

    >>> job_eta_s(Progress(25, 100), 10.0)
    30.0
    """
    if progress is None or not progress.total or not 0 < progress.done <= progress.total:
        return None
    return elapsed_s * (progress.total - progress.done) / progress.done
