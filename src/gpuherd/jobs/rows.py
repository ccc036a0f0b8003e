"""How jobs and attempts stand in the queue's rows, and how they come back from there."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

from gpuherd.engines.options import LOCAL
from gpuherd.engines.processes import ProcessId
from gpuherd.jobs.job import Job
from gpuherd.jobs.learning import FamilyMemory
from gpuherd.jobs.records import AttemptRecord, AttemptRow, AttemptState, Handed, PauseReason, QueuedJob, Request

# name and default of each field; the rest of a spec is what a job says beyond these.
_DEFAULTS = tuple(
    (each.name, each.default if each.default_factory is MISSING else each.default_factory()) for each in fields(Job)
)
# Rows for ``family_memory``; a WHERE may follow.
FAMILIES = (
    "SELECT name, peak_mb, coalesce(measured, 0) AS measured, ran_out_mb"
    " FROM families LEFT JOIN family_ends USING (name)"
)
_encode = json.JSONEncoder(separators=(",", ":")).encode


def spec_of(job: Job) -> str:
    """The job as JSON, without what is as by default."""
    values = {name: value for name, default in _DEFAULTS if (value := getattr(job, name)) != default}
    if job.env:
        values["env"] = dict(job.env)
    return _encode(values)


@lru_cache(maxsize=1024)
def job_of(spec: str) -> Job:
    """The job that ``spec_of`` was given."""
    values: dict[str, Any] = json.loads(spec)
    return Job(**{**values, "argv": tuple(values["argv"]), "needs": tuple(values.get("needs", ()))})


@lru_cache(maxsize=256)
def queued(row: sqlite3.Row) -> QueuedJob:
    """A job from a row of ``jobs``. The head of a queue is read again at every decision, and most of it is the same."""
    job = job_of(row["spec"])
    request = Request(row["gpus"], row["memory_mb"], bool(row["share"]))
    return QueuedJob(
        id=row["id"],
        job=job,
        tries=row["tries"],
        attempts=row["attempts"],
        not_before=row["not_before"],
        avoid=gpus_of(row["avoid"]),
        ready_at=row["ready_at"],
        adapted=None if request == Request(job.gpus, job.memory_mb, job.share) else request,
        cancelled_by=row["cancelled_by"],
        rank=row["rank"],
    )


def gpus_of(text: str) -> frozenset[str]:
    """A set of UUIDs from JSON."""
    return frozenset() if text == "[]" else frozenset(json.loads(text))


def process_of(attempt: sqlite3.Row) -> ProcessId | None:
    """The process of a row of ``attempts``, None for one that was handed over."""
    if "engine" in attempt.keys() and attempt["engine"] != LOCAL:  # noqa: SIM118 - a Row is no mapping
        return None
    return ProcessId(attempt["pid"], attempt["start_ticks"], attempt["boot"])


def handed_of(attempt: sqlite3.Row) -> Handed | None:
    """How an attempt is found in its engine, from a row of ``attempts``; None for one on this machine, as in a queue
    older than engines."""
    if "engine" not in attempt.keys() or attempt["engine"] == LOCAL:  # noqa: SIM118
        return None
    return Handed(attempt["engine"], attempt["batch"], attempt["place"], attempt["handle"], attempt["node"])


def round_opened(text: str | None) -> tuple[int | None, float]:
    """A round and since when it is open, from the value of ``round`` in ``meta``; (None, 0.0) where there is none."""
    number, _, at = (text or "").partition(" ")
    return (int(number), float(at)) if at else (None, 0.0)


def family_memory(row: sqlite3.Row) -> FamilyMemory:
    """What was seen of a family, from a row of ``FAMILIES``."""
    return FamilyMemory(row["peak_mb"] or None, row["measured"], row["ran_out_mb"])


def attempt(row: sqlite3.Row, job: sqlite3.Row) -> AttemptRecord:
    """An attempt from a row of ``attempts`` and its job's row."""
    return AttemptRecord(
        id=row["id"],
        queued=queued(job),
        number=row["number"],
        gpus=tuple(json.loads(row["gpus"])),
        labels=tuple(json.loads(row["labels"])),
        process=process_of(row),
        handed=handed_of(row),
        log=row["log"],
        started_at=row["started_at"],
        started_mono=row["started_mono"],
        shared_mb=row["shared_mb"],
        paused=pause_reasons(row["paused"]),
        paused_mono=row["paused_mono"],
        paused_s=row["paused_s"],
    )


def attempt_row(row: sqlite3.Row) -> AttemptRow:
    """An attempt as the metrics see it, from a row of ``attempts`` with its job's name."""
    return AttemptRow(
        job=row["name"],
        number=row["number"],
        run=row["run"],
        state=AttemptState(row["state"]),
        gpus=tuple(json.loads(row["gpus"])),
        labels=tuple(json.loads(row["labels"])),
        wait_s=row["wait_s"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        run_s=None if row["ended_mono"] is None else max(0.0, row["ended_mono"] - row["started_mono"]),
        failure_class=row["class"],
        paused_s=row["paused_s"],
        peak_mb=row["peak_mb"],
        shared_mb=row["shared_mb"],
        engine=row["engine"],
        node=row["node"],
    )


def pause_reasons(text: str) -> frozenset[PauseReason]:
    """The words of ``attempts.paused``."""
    return frozenset(PauseReason(word) for word in text.split())
