"""A job and an attempt as they stand, from their rows in the queue. Why a job waits is told by its dispatcher
(``standing``) or follows from the queue (``waitreason``); a figure that is not known is None."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from gpuherd.engines.progress import read as read_progress
from gpuherd.jobs import clock
from gpuherd.jobs.job import JobState
from gpuherd.jobs.learning import Ask, FamilyMemory, asks_for
from gpuherd.jobs.reader import QueueReader
from gpuherd.jobs.records import AttemptState, PauseReason
from gpuherd.jobs.rows import FAMILIES, family_memory, handed_of, pause_reasons, process_of, queued
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.runstatus import AttemptStatus, JobStatus
from gpuherd.jobs.waitreason import WaitFacts, why_it_waits
from gpuherd.jobs.whereabouts import why_in_line
from gpuherd.jobs.wording import time_left

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
        eta_s=None if run_s is None else time_left(progress, run_s - paused_s),
        handed=handed,
    )


@lru_cache(maxsize=1024)
def _words(text: str) -> tuple[str, ...]:
    """Words from JSON: GPUs, which are the same for many attempts."""
    return tuple(json.loads(text))
