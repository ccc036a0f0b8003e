"""Jobs of a queue as ``JobStatus``: which jobs are on a page, in which order, and why each waits.

Pages are read from the indexes, so that a long queue costs no more than the page. The reason why a job waits comes from
its dispatcher's last decision (``dispatcher_state``) or follows from the queue.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from gpuherd.engines.progress import read as read_progress
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.dispatcher_state import DispatcherState, engine_name
from gpuherd.jobs.eta import job_eta_s
from gpuherd.jobs.job import JobState
from gpuherd.jobs.queue.reader import FAMILIES, QueueReader, attempt_row, family_memory, process_of, queued
from gpuherd.jobs.records import AttemptRow, AttemptState, Counts, Handed, JobStatus, PauseReason
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.scheduler.memory import Ask, FamilyMemory, asks_for
from gpuherd.units import duration

# The order of states on a page.
SHOWN_FIRST = (JobState.RUNNING, JobState.FAILED, JobState.WAITING, JobState.CANCELLED, JobState.DONE)
PAGE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Which jobs to read: those in these states (all if empty), with ``text`` in their name, after ``offset``.

    ``each``: at most so many of every state but running, so that one long state does not hide the others.
    """

    states: Collection[JobState] = ()
    text: str = ""
    names: Collection[str] = ()
    limit: int = PAGE
    offset: int = 0
    each: int | None = None


EVERYTHING = Page(limit=2**31)


# --- the rows of a page -------------------------------------------------------------------------------------------


def rows_of(
    reader: QueueReader, page: Page, submission: int, counts: Counts, longest_first: bool, columns: str = "*"
) -> tuple[Iterator[sqlite3.Row], int]:
    """The rows of the page, to be read one after the other within one snapshot, and how many rows match in all. Of a
    long queue no more is read than the page holds, unless the page is a search.

    ``columns``: what to read of each row; of waiting jobs all is read.
    """
    searches = bool(page.text or page.names)
    parts: list[Iterator[sqlite3.Row]] = []
    matching, skip, room = 0, page.offset, page.limit
    for state in SHOWN_FIRST:
        if page.states and state not in page.states:
            continue
        where, values = _where(page, submission, state)
        here = _count(reader, where, values) if searches else int(getattr(counts, state.value))
        matching += here
        # Running jobs are never many: at most as many as there are GPUs or CPU slots.
        most = min(room, here if page.each is None or state is JobState.RUNNING else page.each)
        if most > 0 and skip < here:
            if state is JobState.WAITING and not searches:
                parts.append(_waiting(reader, submission, longest_first, most, skip))
            else:
                # Only the numbers are sorted, from an index, and not the rows.
                order = _order(state, longest_first)
                chosen = f"SELECT id FROM jobs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608
                query = f"SELECT {columns} FROM jobs WHERE id IN ({chosen}) ORDER BY {order}"  # noqa: S608
                parts.append(reader.each(query, (*values, most, skip)))
            room -= min(most, here - skip)
        skip = max(0, skip - here)
    return itertools.chain.from_iterable(parts), matching


def places(page: Page) -> Iterator[int | None]:
    """For each waiting job of the page how many waiting jobs are ahead of it; None where the page does not say."""
    if page.text or page.names or (page.offset and set(page.states) != {JobState.WAITING}):
        return itertools.repeat(None)
    return itertools.count(page.offset)


def _count(reader: QueueReader, where: str, values: tuple[object, ...]) -> int:
    found = reader.one(f"SELECT count(*) FROM jobs WHERE {where}", values)  # noqa: S608 - our own words
    return 0 if found is None else int(found[0])


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


def _where(page: Page, submission: int, state: JobState) -> tuple[str, tuple[object, ...]]:
    where, values = "submission = ? AND state = ?", [submission, state.value]
    if page.text:
        where += " AND instr(lower(name), lower(?)) > 0"
        values.append(page.text)
    if page.names:
        where += f" AND name IN ({','.join('?' * len(page.names))})"
        values += page.names
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
}


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """Facts about a queue that decide why its jobs wait.

    Attributes:
        dispatcher: one works on it.
        state: the last state that it wrote.
        lowest_round: the lowest unfinished round; None where no job waits or runs.
        round_opened_at: the wall-clock second since which that round is open, 0.0 where not recorded.
    """

    dispatcher: bool
    state: DispatcherState | None = None
    lowest_round: int | None = None
    round_opened_at: float = 0.0


def job_statuses(
    run: RunDirectory,
    reader: QueueReader,
    facts: WaitFacts,
    now: float,
    rows: Iterable[sqlite3.Row],
    places: Iterator[int | None],
) -> Iterator[JobStatus]:
    """The status of the jobs of these rows, in their order. ``places``: for each waiting job how many are ahead of it,
    None where that is unknown."""
    families = lru_cache(maxsize=_FAMILIES_KEPT)(partial(_family, reader))
    rest = iter(rows)
    while chunk := list(itertools.islice(rest, _AT_ONCE)):
        attempts = _latest_attempts(reader, [row["id"] for row in chunk])
        for row in chunk:
            last = attempts.get(row["id"])
            attempt = None if last is None else _live(last, attempt_row(last, row["name"]), run)
            place = next(places) if row["state"] == JobState.WAITING else None
            yield _job_status(reader, row, attempt, facts, now, place, families)


def _latest_attempts(reader: QueueReader, jobs: Sequence[int]) -> dict[int, sqlite3.Row]:
    query = "SELECT * FROM attempts WHERE id IN (SELECT max(id) FROM attempts WHERE job IN ({}) GROUP BY job)"
    return {row["job"]: row for row in reader.each(query.format(",".join("?" * len(jobs))), tuple(jobs))}


def _live(row: sqlite3.Row, attempt: AttemptRow, run: RunDirectory) -> AttemptRow:
    """A running attempt with its times so far and its progress; another one as it is."""
    if attempt.state is not AttemptState.RUNNING:
        return attempt
    run_s, wait_s, paused_s = None, attempt.wait_s, attempt.paused_s
    process = process_of(row)
    if process is None:
        # By the wall clock: it goes on while this machine is started anew, whose own clock then begins again.
        since_s = max(0.0, clock.wall() - attempt.started_at)
        run_s, wait_s = (None, wait_s + since_s) if attempt.in_line else (since_s, wait_s)
    elif process.is_alive():
        run_s = max(0.0, clock.mono() - row["started_mono"])
    if row["paused_mono"] is not None:
        paused_s += max(0.0, clock.mono() - row["paused_mono"])
    progress = read_progress(run.attempt_progress(attempt.id))
    eta_s = None if run_s is None else job_eta_s(progress, run_s - paused_s)
    return replace(attempt, run_s=run_s, wait_s=wait_s, paused_s=paused_s, progress=progress, eta_s=eta_s)


def _family(reader: QueueReader, name: str) -> FamilyMemory | None:
    known = reader.one(f"{FAMILIES} WHERE name = ?", (name,))
    return None if known is None else family_memory(known)


def _job_status(
    reader: QueueReader,
    row: sqlite3.Row,
    attempt: AttemptRow | None,
    facts: WaitFacts,
    now: float,
    place: int | None,
    families: Callable[[str], FamilyMemory | None],
) -> JobStatus:
    spec = json.loads(row["spec"])
    state, held, reason = JobState(row["state"]), bool(row["held"]), row["reason"]
    if state is JobState.RUNNING and attempt is not None:
        reason = _why_it_stands(row, attempt, facts)
    elif state is JobState.WAITING:
        reason = _why_it_waits(reader, row, facts, place, now)
    ask = _ask(row, spec, facts, families)
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
        ready_at=_ready_at(row, facts) if state is JobState.WAITING and not held else None,
        command=tuple(spec["argv"]),
        attempt=attempt,
    )


def _why_it_stands(row: sqlite3.Row, attempt: AttemptRow, facts: WaitFacts) -> str | None:
    """Why a job that counts as running does not run now; None where it does."""
    if row["cancelled_by"]:
        return f"is being cancelled by {row['cancelled_by']}"
    if attempt.in_line and attempt.handed is not None:
        return _why_in_line(attempt.handed, attempt.id, facts.state)
    if not facts.dispatcher and attempt.run_s is None:
        return "has ended; how is told when a gpuherd works on it again"
    return "; ".join(_PAUSED_FOR[why] for why in attempt.paused) or None


def _why_in_line(handed: Handed, attempt: int, state: DispatcherState | None) -> str:
    """Why an attempt that was handed over to an engine has not begun."""
    there = engine_name(handed.engine)
    if handed.handle is None:
        return f"is being handed to {there}"
    reason = None if state is None else state.handed.get(attempt)
    return f"waits in {there}" + (f": {clean(reason)}" if reason else "")


def _why_it_waits(reader: QueueReader, row: sqlite3.Row, facts: WaitFacts, place: int | None, now: float) -> str:
    """The first thing that must change before the job can start. ``place``: how many waiting jobs are ahead of it."""
    last_failure = clean(row["reason"]) if row["reason"] else None  # or who paused it
    if row["held"]:
        return last_failure or "paused"
    unmet = _unmet_needs(reader, row["id"]) if row["blocked"] else ()
    if unmet:
        named = ", ".join(clean(name) for name in unmet[:_NEEDS_NAMED])
        return f"needs {named}" + (" and others" if len(unmet) > _NEEDS_NAMED else "")
    if not facts.dispatcher:
        return "no gpuherd works on this queue"
    state = facts.state
    if state is not None and state.mode != "working":
        return f"gpuherd is {state.mode}: nothing new is started"
    if row["not_before"] > now:
        after = f" after: {last_failure}" if last_failure else ""
        return f"next try in {duration(row['not_before'] - now)}{after}"
    if facts.lowest_round is not None and row["round"] > facts.lowest_round:
        return f"is of round {row['round']}; round {facts.lowest_round} is not finished"
    if state is not None and state.closed is not None:
        return clean(state.closed)
    if state is not None and row["id"] in state.waits:
        return clean(state.waits[row["id"]])
    if not place:
        return "others are before it" if place is None else "is next"
    return f"{place} waiting jobs are before it" if place > 1 else "1 waiting job is before it"


def _unmet_needs(reader: QueueReader, job: int) -> tuple[str, ...]:
    """The names of the first jobs that this one needs and that have not succeeded."""
    rows = reader.rows(
        "SELECT n.name FROM needs JOIN jobs n ON n.id = needs.needed WHERE needs.job = ? AND n.state <> 'done'"
        " ORDER BY n.id LIMIT ?",
        (job, _NEEDS_NAMED + 1),
    )
    return tuple(row["name"] for row in rows)


def _ask(
    row: sqlite3.Row, spec: dict[str, Any], facts: WaitFacts, families: Callable[[str], FamilyMemory | None]
) -> Ask:
    """The memory that the job asks for now; while it waits, with the estimate learned from its family."""
    if spec.get("family") is None or row["state"] != JobState.WAITING:
        return Ask(row["memory_mb"])
    job = queued(row)
    seen = None if job.family is None else families(job.family)
    most_mb = None if facts.state is None else facts.state.most_mb(row["gpus"])
    return asks_for(row["memory_mb"], seen, most_mb, less=job.may_ask_less)


def _ready_at(row: sqlite3.Row, facts: WaitFacts) -> float | None:
    """Since when a waiting job could have run: its needs were met, and its round was open."""
    if row["blocked"] or (facts.lowest_round is not None and row["round"] != facts.lowest_round):
        return None
    return max(float(row["ready_at"]), facts.round_opened_at)
