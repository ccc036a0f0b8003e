"""How a run stands: read from its queue, by anybody who may read it, while a dispatcher works on it or after.

Nothing is changed and nobody is held up. A long queue is read by the page: counts come from an index, and only the
jobs that are asked for are taken apart. Why a job waits is told by its dispatcher (``standing``) or follows from the
queue (``waitreason``); a figure that is not known is None.
"""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuherd.engines.processes import boot_id, identify
from gpuherd.engines.progress import read as read_progress
from gpuherd.jobs import clock, standing
from gpuherd.jobs.eta import Pace, Running, Waiting, time_left
from gpuherd.jobs.job import JobState
from gpuherd.jobs.learning import Ask, asks_for
from gpuherd.jobs.queuefile import COSTS_WAITING
from gpuherd.jobs.reader import QueueReader
from gpuherd.jobs.records import AttemptState, Counts, PauseReason
from gpuherd.jobs.rows import FAMILIES, LOCAL, family_memory, handed_of, pause_reasons, process_of, queued, round_opened
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.runstatus import SHOWN_FIRST, AttemptStatus, DispatcherStatus, JobStatus, Page, RunStatus
from gpuherd.jobs.waitreason import WaitFacts, why_it_waits
from gpuherd.jobs.whereabouts import InEngine, why_in_line
from gpuherd.jobs.wording import time_left as job_time_left

# The mean length of jobs is taken over so many of the latest.
_LATEST = 1000
_NEEDS_NAMED = 3
_HELD_NAMED = 5
# Those that can't run yet come last.
_LAST = "blocked > 0 OR held, "
_PAUSED_FOR = {
    PauseReason.USER: "paused",
    PauseReason.DISK: "paused: there is too little disk space",
    PauseReason.STRANGER: "paused: someone else uses its GPU",
}


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
    rows, matching = _page(reader, page, submission, counts, _longest_first(dispatcher))
    facts = _wait_facts(reader, dispatcher)
    places = _places(page)
    jobs = tuple(
        _job(run, reader, row, facts, now, next(places) if row["state"] == JobState.WAITING else None) for row in rows
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


def _places(page: Page) -> Iterator[int | None]:
    """For each waiting job of the page how many go before it; None where others than the page's may do."""
    if page.text or page.names or (page.offset and set(page.states) != {JobState.WAITING}):
        return itertools.repeat(None)
    return itertools.count(page.offset)


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
    return tuple(_attempt(row, None) for row in rows)


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


# --- jobs -----------------------------------------------------------------------------------------------------


def _in_engine(reader: QueueReader) -> InEngine | None:
    """What an engine beyond this machine has: never more than one at a time."""
    if not reader.has("attempts", "engine"):
        return None
    row = reader.one(
        "SELECT max(engine), count(*), count(*) - count(node) FROM attempts WHERE state = 'running' AND engine <> ?",
        (LOCAL,),
    )
    return InEngine(*row) if row is not None and row[1] else None


def _page(
    reader: QueueReader, page: Page, submission: int, counts: Counts, longest_first: bool
) -> tuple[list[sqlite3.Row], int]:
    """The rows of the page, and how many there are in all. Of a long queue no more is read than the page holds, unless
    the page is a search."""
    searches = bool(page.text or page.names)
    rows: list[sqlite3.Row] = []
    matching, skip = 0, page.offset
    for state in SHOWN_FIRST:
        if page.states and state not in page.states:
            continue
        where, values = _where(page, submission, state)
        here = _count(reader, where, values) if searches else int(getattr(counts, state.value))
        matching += here
        # What runs is never many: as much as there are GPUs.
        most = min(page.limit - len(rows), here if page.each is None or state is JobState.RUNNING else page.each)
        if most > 0 and skip < here and state is JobState.WAITING and not searches:
            rows += _waiting(reader, submission, longest_first, most, skip)
        elif most > 0 and skip < here:
            query = f"SELECT * FROM jobs WHERE {where} ORDER BY {_order(reader, state, longest_first)} LIMIT ? OFFSET ?"  # noqa: S608
            rows += reader.rows(query, (*values, most, skip))
        skip = max(0, skip - here)
    return rows, matching


def _count(reader: QueueReader, where: str, values: tuple[object, ...]) -> int:
    found = reader.one(f"SELECT count(*) FROM jobs WHERE {where}", values)  # noqa: S608 - our own words
    return 0 if found is None else int(found[0])


def _waiting(reader: QueueReader, submission: int, longest_first: bool, most: int, skip: int) -> Sequence[sqlite3.Row]:
    """Waiting jobs in the order of ``_order``: those that could run from the indexes that the dispatcher goes by, which
    hold those with GPUs and those without apart."""
    order, where = _order(reader, JobState.WAITING, longest_first), "submission = ? AND state = 'waiting'"
    values: tuple[object, ...] = (submission,)
    could_run = "blocked = 0 AND held = 0"
    rows: list[sqlite3.Row] = []
    if reader.has("jobs", "held") and reader.has("jobs", "round"):
        by_index = order.removeprefix(_LAST)
        of_each = " UNION ALL ".join(
            f"SELECT * FROM (SELECT * FROM jobs WHERE {where} AND {could_run} AND (gpus > 0) = {on_gpus}"  # noqa: S608
            f" ORDER BY {by_index} LIMIT ?)"
            for on_gpus in (1, 0)
        )
        one = (*values, skip + most)
        rows += reader.rows(f"{of_each} ORDER BY {by_index} LIMIT ? OFFSET ?", (*one, *one, most, skip))
        if len(rows) == most:
            return rows
        skip = max(0, skip - _count(reader, f"{where} AND {could_run}", values))
        most -= len(rows)
        where += f" AND NOT ({could_run})"
    query = f"SELECT * FROM jobs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"  # noqa: S608 - our own words
    return [*rows, *reader.rows(query, (*values, most, skip))]


def _longest_first(dispatcher: DispatcherStatus | None) -> bool:
    """Whether the one at work takes the longest first, as far as it has told."""
    told = None if dispatcher is None else dispatcher.standing
    return told is not None and told.settings.get("order") == "longest"


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


def _job(
    run: RunDirectory, reader: QueueReader, row: sqlite3.Row, facts: WaitFacts, now: float, place: int | None
) -> JobStatus:
    spec = json.loads(row["spec"])
    state = JobState(row["state"])
    last = reader.one("SELECT * FROM attempts WHERE job = ? ORDER BY id DESC LIMIT 1", (row["id"],))
    attempt = None if last is None else _attempt(last, run)
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
    ask = _ask(reader, row, spec, facts)
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


def _ask(reader: QueueReader, row: sqlite3.Row, spec: dict[str, Any], facts: WaitFacts) -> Ask:
    """What the job asks for now, with what was learned of its family while it waits."""
    declared_mb = row["memory_mb"] if reader.has("jobs", "memory_mb") else spec.get("memory_mb")
    if spec.get("family") is None or row["state"] != JobState.WAITING or not reader.has("family_ends", "measured"):
        return Ask(declared_mb)
    job = queued(row)
    known = reader.one(f"{FAMILIES} WHERE name = ?", (job.family,))
    seen = None if known is None else family_memory(known)
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


def _attempt(row: sqlite3.Row, run: RunDirectory | None) -> AttemptStatus:
    known = row.keys()
    state = AttemptState(row["state"])
    running = state is AttemptState.RUNNING
    handed, wait_s = handed_of(row), row["wait_s"]
    run_s = None if row["ended_mono"] is None else max(0.0, row["ended_mono"] - row["started_mono"])
    process = process_of(row)
    if running and process is not None and process.is_alive():
        run_s = max(0.0, clock.mono() - row["started_mono"])
    if running and handed is not None:
        # By the wall clock: it goes on while this machine is started anew, whose own clock then begins again.
        since_s = max(0.0, clock.wall() - row["started_at"])
        run_s, wait_s = (None, wait_s + since_s) if handed.node is None else (since_s, wait_s)
    elif handed is not None and handed.node is None and state is not AttemptState.DONE:
        run_s = None  # it ended in the engine's line
    paused: tuple[PauseReason, ...] = ()
    paused_s = 0.0
    if "paused_s" in known:
        paused, paused_s = tuple(sorted(pause_reasons(row["paused"]))), row["paused_s"]
        if running and row["paused_mono"] is not None:
            paused_s += max(0.0, clock.mono() - row["paused_mono"])
    progress = read_progress(run.attempt_progress(row["id"])) if running and run is not None else None
    return AttemptStatus(
        id=row["id"],
        number=row["number"],
        state=state,
        gpus=tuple(json.loads(row["labels"])),
        gpu_uuids=tuple(json.loads(row["gpus"])),
        pid=None if process is None else process.pid,
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


# --- the whole ------------------------------------------------------------------------------------------------


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


def nearest_names(wanted: str, names: Sequence[str]) -> list[str]:
    """The names that someone who typed ``wanted`` may have meant, best first, at most three."""
    import difflib

    return difflib.get_close_matches(wanted, names, n=3)
