"""The status of jobs, attempts and dispatchers as frozen data; pages of jobs; rows become these."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from gpuherd.engines.progress import Progress
from gpuherd.engines.progress import read as read_progress
from gpuherd.jobs import clock
from gpuherd.jobs.dispatcher_state import InEngine, Standing, why_in_line
from gpuherd.jobs.job import JobState
from gpuherd.jobs.monitor.format import WaitFacts, job_time_left, why_it_waits
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.queue.submission import FAMILIES, family_memory, handed_of, pause_reasons, process_of, queued
from gpuherd.jobs.records import AttemptState, Counts, Handed, PauseReason
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.scheduler.memory import Ask, FamilyMemory, asks_for

# How a run stands, as plain frozen data: what ``status`` reads, and what it can be asked for.

# What people look for first comes first.
SHOWN_FIRST = (JobState.RUNNING, JobState.FAILED, JobState.WAITING, JobState.CANCELLED, JobState.DONE)
PAGE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStatus:
    """A job's latest attempt. Seconds; MB of 2^20 bytes.

    ``run_s`` goes on while it runs, and is None when its process has ended and nobody has recorded how.
    ``paused``: why its processes are stopped now, () while they run; ``paused_s``: how long they were, in all.
    ``handed``: how an engine beyond this machine has it, None for one on this machine; else ``pid`` is None. While it
    is in the engine's line (``in_line``), ``run_s`` is None, and ``wait_s`` goes on.
    ``progress`` and ``eta_s`` are None unless it runs and has told something; ``peak_mb`` where nobody measured it.
    """

    id: int
    number: int
    state: AttemptState
    gpus: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    pid: int | None
    log: str
    started_at: float
    ended_at: float | None
    run_s: float | None
    wait_s: float
    exit_code: int | None
    signal: int | None
    failure_class: str | None
    peak_mb: int | None
    paused: tuple[PauseReason, ...]
    paused_s: float
    progress: Progress | None = None
    eta_s: float | None = None
    handed: Handed | None = None

    @property
    def in_line(self) -> bool:
        """Whether an engine beyond this machine has it, and has not begun it yet."""
        return self.state is AttemptState.RUNNING and self.handed is not None and self.handed.node is None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """A job and how it stands. ``reason``: why it waits, also in an engine's line, or how it failed, or why it was
    cancelled.

    ``gpus`` is how many it asks for now, ``memory_mb`` how much on each, ``learned`` why that is not what it declared,
    ``paused`` that it was told to wait (or stands still while running).
    ``ready_at``: of a waiting job, the wall-clock second since which it could have run; None while it can't.
    """

    id: int
    name: str
    title: str
    state: JobState
    paused: bool
    reason: str | None
    gpus: int
    memory_mb: int | None
    learned: str | None
    priority: int
    tries: int
    attempts: int
    ready_at: float | None
    command: tuple[str, ...]
    attempt: AttemptStatus | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherStatus:
    """The gpuherd that works on the queue. ``standing`` is None while it has told nothing of itself."""

    pid: int
    since: float
    standing: Standing | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run at one moment.

    Attributes:
        folder: the run folder.
        at: wall-clock second of the look.
        counts: jobs of the latest submission by state; ``paused`` of them were told to wait.
        held: names of waiting jobs that are paused, the first few: they come last, and may not be on the page.
        dispatcher: who works on it, None for nobody.
        in_engine: what of the running jobs an engine beyond this machine has; None for none.
        jobs: the page that was asked for, running first, then failed, waiting, cancelled, done.
        matching: how many jobs the page is taken from.
        eta_s: seconds until all is done by the mean length of jobs so far, None while nothing can be said.
        left_out: GPUs that are left out for a while, by label, each with a sentence on how long and why.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Which jobs to tell of: those in these states (all if empty), with ``text`` in their name, after ``offset``.

    ``each``: of every state but the running at most so many, so that one long state does not hide the others.
    """

    states: Collection[JobState] = ()
    text: str = ""
    names: Collection[str] = ()
    limit: int = PAGE
    offset: int = 0
    each: int | None = None


EVERYTHING = Page(limit=2**31)


# Which jobs of a queue stand on a page, and in which order: read from the indexes, however long the queue is.

# Those that can't run yet come last.
_LAST = "blocked > 0 OR held, "


def rows_of(
    reader: QueueReader, page: Page, submission: int, counts: Counts, longest_first: bool, columns: str = "*"
) -> tuple[Iterator[sqlite3.Row], int]:
    """The rows of the page, to be read one after the other within one snapshot, and how many rows match in all. Of a
    long queue no more is read than the page holds, unless the page is a search.

    ``columns``: what to read of each row, but of those that wait.
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
        # What runs is never many: as much as there are GPUs.
        most = min(room, here if page.each is None or state is JobState.RUNNING else page.each)
        if most > 0 and skip < here:
            if state is JobState.WAITING and not searches:
                parts.append(_waiting(reader, submission, longest_first, most, skip))
            else:
                # Sorted are the numbers alone, from an index, and not the rows.
                order = _order(reader, state, longest_first)
                chosen = f"SELECT id FROM jobs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608
                query = f"SELECT {columns} FROM jobs WHERE id IN ({chosen}) ORDER BY {order}"  # noqa: S608
                parts.append(reader.each(query, (*values, most, skip)))
            room -= min(most, here - skip)
        skip = max(0, skip - here)
    return itertools.chain.from_iterable(parts), matching


def places(page: Page) -> Iterator[int | None]:
    """For each waiting job of the page how many go before it; None where others than the page's may do."""
    if page.text or page.names or (page.offset and set(page.states) != {JobState.WAITING}):
        return itertools.repeat(None)
    return itertools.count(page.offset)


def _count(reader: QueueReader, where: str, values: tuple[object, ...]) -> int:
    found = reader.one(f"SELECT count(*) FROM jobs WHERE {where}", values)  # noqa: S608 - our own words
    return 0 if found is None else int(found[0])


def _waiting(reader: QueueReader, submission: int, longest_first: bool, most: int, skip: int) -> Iterator[sqlite3.Row]:
    """Waiting jobs in the order of ``_order``: those that could run from the indexes that the dispatcher goes by, which
    hold those with GPUs and those without apart."""
    order, where = _order(reader, JobState.WAITING, longest_first), "submission = ? AND state = 'waiting'"
    values: tuple[object, ...] = (submission,)
    could_run = "blocked = 0 AND held = 0"
    if reader.has("jobs", "held") and reader.has("jobs", "round"):
        by_index = order.removeprefix(_LAST)
        of_each = " UNION ALL ".join(
            f"SELECT * FROM (SELECT * FROM jobs WHERE {where} AND {could_run} AND (gpus > 0) = {on_gpus}"  # noqa: S608
            f" ORDER BY {by_index} LIMIT ?)"
            for on_gpus in (1, 0)
        )
        one = (*values, skip + most)
        for row in reader.each(f"{of_each} ORDER BY {by_index} LIMIT ? OFFSET ?", (*one, *one, most, skip)):
            most -= 1
            yield row
        if not most:
            return
        skip = max(0, skip - _count(reader, f"{where} AND {could_run}", values))
        where += f" AND NOT ({could_run})"
    query = f"SELECT * FROM jobs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608 - our own words
    yield from reader.each(query, (*values, most, skip))


def _order(reader: QueueReader, state: JobState, longest_first: bool) -> str:
    """The waiting in the order in which they will run, those that can't run yet last; of the ended the latest first."""
    if state is JobState.RUNNING:
        return "id"
    if state is not JobState.WAITING:
        return "id DESC"
    if reader.has("jobs", "held") and reader.has("jobs", "round"):
        longest = "rank DESC, " if longest_first and reader.has("jobs", "rank") else ""
        return f"{_LAST}round, priority DESC, {longest}id"
    return "blocked > 0, priority DESC, id"


def _where(page: Page, submission: int, state: JobState) -> tuple[str, tuple[object, ...]]:
    where, values = "submission = ? AND state = ?", [submission, state.value]
    if page.text:
        where += " AND instr(lower(name), lower(?)) > 0"
        values.append(page.text)
    if page.names:
        where += f" AND name IN ({','.join('?' * len(page.names))})"
        values += page.names
    return where, tuple(values)


# A job and an attempt as they stand, from their rows in the queue. Why a job waits is told by its dispatcher
# (``dispatcher_state``) or follows from the queue (``format``); a figure that is not known is None.

_NEEDS_NAMED = 3
# Jobs whose latest attempts one query reads: each value is a variable, and some SQLite builds take 999.
_AT_ONCE = 500
_FAMILIES_KEPT = 1000
_PAUSED_FOR = {
    PauseReason.USER: "paused",
    PauseReason.DISK: "paused: there is too little disk space",
    PauseReason.STRANGER: "paused: someone else uses its GPU",
}


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
            attempt = None if last is None else attempt_status(last, run)
            place = next(places) if row["state"] == JobState.WAITING else None
            yield _job_status(reader, row, attempt, facts, now, place, families)


def _latest_attempts(reader: QueueReader, jobs: Sequence[int]) -> dict[int, sqlite3.Row]:
    query = "SELECT * FROM attempts WHERE id IN (SELECT max(id) FROM attempts WHERE job IN ({}) GROUP BY job)"
    return {row["job"]: row for row in reader.each(query.format(",".join("?" * len(jobs))), tuple(jobs))}


def _family(reader: QueueReader, name: str) -> FamilyMemory | None:
    known = reader.one(f"{FAMILIES} WHERE name = ?", (name,))
    return None if known is None else family_memory(known)


def _job_status(
    reader: QueueReader,
    row: sqlite3.Row,
    attempt: AttemptStatus | None,
    facts: WaitFacts,
    now: float,
    place: int | None,
    families: Callable[[str], FamilyMemory | None],
) -> JobStatus:
    spec = json.loads(row["spec"])
    state = JobState(row["state"])
    held = bool(row["held"]) if reader.has("jobs", "held") else False
    reason = row["reason"]
    if state is JobState.RUNNING and attempt is not None:
        reason = "; ".join(_PAUSED_FOR[why] for why in attempt.paused) or None
        if attempt.handed is not None and attempt.in_line:
            reason = why_in_line(attempt.handed, attempt.id, facts.standing)
        elif not facts.dispatcher and attempt.run_s is None:
            reason = "has ended; how is told when a gpuherd works on it again"
        if reader.has("jobs", "cancelled_by") and row["cancelled_by"]:
            reason = f"is being cancelled by {row['cancelled_by']}"
    if state is JobState.WAITING:
        unmet = _unmet_needs(reader, row["id"]) if row["blocked"] else ()
        reason = why_it_waits(
            facts,
            job=row["id"],
            paused=held,
            unmet=unmet,
            not_before=row["not_before"],
            last_failure=row["reason"],
            round_=row["round"] if reader.has("jobs", "round") else 0,
            place=place,
            now=now,
        )
    ask = _ask(reader, row, spec, facts, families)
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


def _ask(
    reader: QueueReader,
    row: sqlite3.Row,
    spec: dict[str, Any],
    facts: WaitFacts,
    families: Callable[[str], FamilyMemory | None],
) -> Ask:
    """What the job asks for now, with what was learned of its family while it waits."""
    declared_mb = row["memory_mb"] if reader.has("jobs", "memory_mb") else spec.get("memory_mb")
    if spec.get("family") is None or row["state"] != JobState.WAITING or not reader.has("family_ends", "measured"):
        return Ask(declared_mb)
    job = queued(row)
    seen = None if job.family is None else families(job.family)
    most_mb = None if facts.standing is None else facts.standing.most_mb(row["gpus"])
    return asks_for(declared_mb, seen, most_mb, less=job.may_ask_less)


def _ready_at(row: sqlite3.Row, facts: WaitFacts) -> float | None:
    """Since when a job that waits could have run: when its needs were met, and its round was opened."""
    if row["blocked"] or (facts.lowest_round is not None and row["round"] != facts.lowest_round):
        return None
    return max(float(row["ready_at"]), facts.round_opened_at)


def _unmet_needs(reader: QueueReader, job: int) -> tuple[str, ...]:
    rows = reader.rows(
        "SELECT n.name FROM needs JOIN jobs n ON n.id = needs.needed WHERE needs.job = ? AND n.state <> 'done'"
        " ORDER BY n.id LIMIT ?",
        (job, _NEEDS_NAMED + 1),
    )
    return tuple(row["name"] for row in rows)


def attempt_status(row: sqlite3.Row, run: RunDirectory | None) -> AttemptStatus:
    """How an attempt stands; with what it tells of its progress only where ``run`` is given."""
    state = AttemptState(row["state"])
    running = state is AttemptState.RUNNING
    handed, wait_s = handed_of(row), row["wait_s"]
    run_s = None if row["ended_mono"] is None else max(0.0, row["ended_mono"] - row["started_mono"])
    if running and handed is None:
        process = process_of(row)
        if process is not None and process.is_alive():
            run_s = max(0.0, clock.mono() - row["started_mono"])
    elif running and handed is not None:
        # By the wall clock: it goes on while this machine is started anew, whose own clock then begins again.
        since_s = max(0.0, clock.wall() - row["started_at"])
        run_s, wait_s = (None, wait_s + since_s) if handed.node is None else (since_s, wait_s)
    elif handed is not None and handed.node is None and state is not AttemptState.DONE:
        run_s = None  # it ended in the engine's line
    known = row.keys()
    paused: tuple[PauseReason, ...] = ()
    paused_s = 0.0
    if "paused_s" in known:
        paused_s = row["paused_s"]
        if row["paused"]:
            paused = tuple(sorted(pause_reasons(row["paused"])))
        if running and row["paused_mono"] is not None:
            paused_s += max(0.0, clock.mono() - row["paused_mono"])
    progress = read_progress(run.attempt_progress(row["id"])) if running and run is not None else None
    return AttemptStatus(
        id=row["id"],
        number=row["number"],
        state=state,
        gpus=_words(row["labels"]),
        gpu_uuids=_words(row["gpus"]),
        pid=None if handed is not None else row["pid"],
        log=row["log"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        run_s=run_s,
        wait_s=wait_s,
        exit_code=row["exit_code"],
        signal=row["signal"],
        failure_class=row["class"],
        peak_mb=row["peak_mb"] if "peak_mb" in known else None,
        paused=paused,
        paused_s=paused_s,
        progress=progress,
        eta_s=None if run_s is None else job_time_left(progress, run_s - paused_s),
        handed=handed,
    )


@lru_cache(maxsize=1024)
def _words(text: str) -> tuple[str, ...]:
    """Words from JSON: GPUs, which are the same for many attempts."""
    return tuple(json.loads(text))
