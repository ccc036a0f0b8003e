"""Adds jobs to the queue, and converts jobs and attempts to rows and back. SQL only."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from gpuherd.engines.process_tree import ProcessId
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError, clean
from gpuherd.jobs.job import Job, JobState, check_needs, job_of, spec_of
from gpuherd.jobs.records import (
    AttemptRecord,
    AttemptRow,
    AttemptState,
    Handed,
    PauseReason,
    QueuedJob,
    ResourceRequest,
)
from gpuherd.jobs.scheduler.memory import FamilyMemory
from gpuherd.jobs.scheduler.ordering import rank

# How jobs and attempts stand in the queue's rows, and how they come back from there.

# Rows for ``family_memory``; a WHERE may follow.
FAMILIES = (
    "SELECT name, peak_mb, coalesce(measured, 0) AS measured, ran_out_mb"
    " FROM families LEFT JOIN family_ends USING (name)"
)


@lru_cache(maxsize=256)
def queued(row: sqlite3.Row) -> QueuedJob:
    """A job from a row of ``jobs``. The head of a queue is read again at every decision, and most of it is the same."""
    job = job_of(row["spec"])
    request = ResourceRequest(row["gpus"], row["memory_mb"], bool(row["share"]))
    return QueuedJob(
        id=row["id"],
        job=job,
        tries=row["tries"],
        attempts=row["attempts"],
        not_before=row["not_before"],
        avoid=gpus_of(row["avoid"]),
        ready_at=row["ready_at"],
        adapted=None if request == ResourceRequest(job.gpus, job.memory_mb, job.share) else request,
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


def attempt_row(row: sqlite3.Row, job: str) -> AttemptRow:
    """An attempt as recorded, from a row of ``attempts`` and its job's name."""
    handed, state = handed_of(row), AttemptState(row["state"])
    run_s = None if row["ended_mono"] is None else max(0.0, row["ended_mono"] - row["started_mono"])
    if handed is not None and handed.node is None and state is not AttemptState.DONE:
        run_s = None  # it ended, or still waits, in the engine's queue
    return AttemptRow(
        id=row["id"],
        job=job,
        number=row["number"],
        state=state,
        gpus=_words(row["labels"]),
        gpu_uuids=_words(row["gpus"]),
        log=row["log"],
        started_at=row["started_at"],
        pid=None if handed is not None else row["pid"],
        ended_at=row["ended_at"],
        run_s=run_s,
        wait_s=row["wait_s"],
        exit_code=row["exit_code"],
        signal=row["signal"],
        failure_class=row["class"],
        peak_mb=row["peak_mb"],
        paused=tuple(sorted(pause_reasons(row["paused"]))) if row["paused"] else (),
        paused_s=row["paused_s"],
        shared_mb=row["shared_mb"],
        handed=handed,
    )


@lru_cache(maxsize=1024)
def _words(text: str) -> tuple[str, ...]:
    """Words from JSON: GPUs, which are the same for many attempts."""
    return tuple(json.loads(text))


def pause_reasons(text: str) -> frozenset[PauseReason]:
    """The words of ``attempts.paused``."""
    return frozenset(PauseReason(word) for word in text.split())


# Jobs come into a queue: what is new waits, what is known goes on by its name. SQL only; called in a transaction.

# More need not be named: jobs of a remark, circles of needs.
_MOST_NAMES = 8
_MOST_CIRCULAR = 10
ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED)
_INSERT = (
    "INSERT INTO jobs (name, spec, gpus, memory_mb, share, cost, round, priority, rank, submission, state, ready_at)"
    " VALUES (?,?,?,?,?,?,?,?,?,?,'waiting',?)"
)


@dataclass(frozen=True, slots=True)
class SubmissionChanges:
    """How a submission changed jobs that were in the queue. ``revived``: names of jobs that had failed or were
    cancelled and wait again; ``kept``: names of jobs that stay failed, cancelled or paused, by that state.
    """

    revived: tuple[str, ...] = ()
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about these changes for users.

        >>> SubmissionChanges(("a",), {"failed": ("b", "c"), "paused": ("d",)}).remarks[0]
        'the last run was cut off and is continued: failed stay b, c; paused stay d (see gpuherd retry, gpuherd resume)'
        >>> SubmissionChanges(("a",)).remarks
        ('1 job that had failed or was cancelled waits again, with fresh tries: a',)
        """
        found = []
        if self.kept:
            told = "; ".join(f"{how} stay {_some(names)}" for how, names in self.kept.items())
            found.append(f"the last run was cut off and is continued: {told} (see gpuherd retry, gpuherd resume)")
        if self.revived:
            many = len(self.revived)
            how = "1 job that had failed or was cancelled waits"
            if many > 1:
                how = f"{many} jobs that had failed or were cancelled wait"
            found.append(f"{how} again, with fresh tries: {_some(self.revived)}")
        return tuple(found)


def enter(
    db: sqlite3.Connection,
    jobs: Sequence[Job],
    again: Collection[str],
    submission: int,
    now: float,
    *,
    continued: int | None = None,
) -> SubmissionChanges:
    """Puts the jobs into the table, or changes what is there of the same name, and links their needs.

    Args:
        again: names of jobs that are to run once more though they are done.
        continued: the submission that never ended and is continued: what was decided of its jobs stays so, unless the
            job itself is another now.

    Raises UsageError for needs that can't be met; the caller then takes the transaction back.
    """
    known = _known(db, jobs)
    fresh = (job for job in jobs if job.name not in known)
    db.executemany(_INSERT, (_row(_anchored(job), submission, now) for job in fresh))
    revived: list[str] = []
    kept: dict[str, list[str]] = {}
    for job in jobs:
        row = known.get(job.name)
        if row is None:
            continue
        anchored, repeated = _anchored(job), job.name in again
        if row["submission"] == continued and not repeated and _stands(row, anchored):
            _leave(db, row, submission)
            if row["held"] or row["state"] in ENDED_BADLY:
                kept.setdefault("paused" if row["held"] else row["state"], []).append(job.name)
            continue
        if row["state"] in ENDED_BADLY and not row["doomed"]:
            revived.append(job.name)
        _go_on(db, anchored, row, repeated, submission, now)
    _link_needs(db, jobs, bool(known))
    _check_rounds(db)
    return SubmissionChanges(tuple(revived), {how: tuple(names) for how, names in kept.items()})


def check_added(db: sqlite3.Connection, jobs: Sequence[Job]) -> None:
    """Checks names and needs of jobs that are added to those of the queue. Raises UsageError."""
    needed = {need for job in jobs for need in job.needs}
    rows = (db.execute("SELECT name, round FROM jobs WHERE name = ?", (need,)).fetchone() for need in needed)
    known = {row["name"]: row["round"] for row in rows if row is not None}
    if needed - known.keys() - {job.name for job in jobs}:
        # One is missing: so that the nearest can be named.
        newest = db.execute("SELECT name, round FROM jobs ORDER BY id DESC LIMIT 1000")
        known |= {row["name"]: row["round"] for row in newest}
    check_needs(jobs, known)


def check_circles(db: sqlite3.Connection, jobs: Iterable[Job]) -> None:
    """Raises UsageError when any of these jobs, linked by now, needs itself by way of others in the queue."""
    circular = [
        job.name
        for job in jobs
        if job.needs
        and db.execute(
            "WITH RECURSIVE needed (id) AS"
            " (SELECT n.needed FROM needs n JOIN jobs j ON j.id = n.job WHERE j.name = ?"
            " UNION SELECT n.needed FROM needs n JOIN needed ON n.job = needed.id)"
            " SELECT 1 FROM needed JOIN jobs j ON j.id = needed.id WHERE j.name = ?",
            (job.name, job.name),
        ).fetchone()
    ]
    if circular:
        told = [f"job {name!r} would need itself, by way of jobs that are in the queue" for name in circular]
        raise UsageError("; ".join(told[:_MOST_CIRCULAR]))


def lost_needs(db: sqlite3.Connection, job: Job) -> Sequence[sqlite3.Row]:
    """What the job, which is in the queue by now and waits, needs and can't get any more: id and state of each."""
    if not job.needs:
        return ()
    return db.execute(
        "SELECT n.id, n.state FROM jobs j CROSS JOIN needs ON needs.job = j.id CROSS JOIN jobs n ON n.id = needs.needed"
        " WHERE j.name = ? AND j.state = 'waiting' AND n.state IN ('failed', 'cancelled')",
        (job.name,),
    ).fetchall()


def _known(db: sqlite3.Connection, jobs: Sequence[Job]) -> Mapping[str, sqlite3.Row]:
    if db.execute("SELECT 1 FROM jobs LIMIT 1").fetchone() is None:
        return {}
    columns = "id, name, spec, state, submission, held, doomed"
    rows = (db.execute(f"SELECT {columns} FROM jobs WHERE name = ?", (job.name,)).fetchone() for job in jobs)  # noqa: S608
    return {row["name"]: row for row in rows if row is not None}


def _row(job: Job, submission: int, now: float) -> tuple[object, ...]:
    return (
        job.name,
        spec_of(job),
        job.gpus,
        job.memory_mb,
        job.share,
        job.cost,
        job.round,
        job.priority,
        rank(job.cost, now),
        submission,
        now,
    )


def _stands(row: sqlite3.Row, job: Job) -> bool:
    """Whether a job of a continued submission stays as it is. Not where it was cancelled because another failed, or is
    done: other rules decide then. A changed priority or cost does not count: users set the one, the other is an
    estimate."""
    if row["state"] == JobState.DONE or row["doomed"]:
        return False
    old = job_of(row["spec"])
    return replace(job, priority=old.priority, cost=old.cost) == old


def _leave(db: sqlite3.Connection, row: sqlite3.Row, submission: int) -> None:
    db.execute("UPDATE jobs SET submission = ? WHERE id = ?", (submission, row["id"]))
    if row["state"] == JobState.RUNNING:
        # Killed together with its dispatcher time and again, it must not fail for that. What an engine has is not.
        retries = job_of(row["spec"]).retries
        db.execute(
            "UPDATE jobs SET tries = max(0, min(tries, ?)) WHERE id = ?"
            " AND EXISTS (SELECT 1 FROM attempts WHERE job = jobs.id AND state = 'running' AND engine = ?)",
            (retries - 1, row["id"], LOCAL),
        )


def _go_on(db: sqlite3.Connection, job: Job, known: sqlite3.Row, again: bool, submission: int, now: float) -> None:
    if known["state"] == JobState.RUNNING:
        # Fresh tries for it too: killed together with its dispatcher time and again, it must not fail for that.
        db.execute("UPDATE jobs SET submission = ?, tries = 0 WHERE id = ?", (submission, known["id"]))
        return
    stays = known["state"] == JobState.DONE and not again and _same_work(job_of(known["spec"]), job)
    stays = stays and (job.result is None or Path(job.result).exists())
    state = JobState.DONE if stays else JobState.WAITING
    fresh = (
        ""
        if stays
        else ", tries = 0, not_before = 0, avoid = '[]', reason = NULL, held = 0, doomed = 0, cancelled_by = NULL"
    )
    ready = "" if stays or known["state"] == JobState.WAITING else f", ready_at = {now!r}"
    db.execute(
        "UPDATE jobs SET spec = ?, gpus = ?, memory_mb = ?, share = ?, cost = ?, round = ?, priority = ?, rank = ?,"  # noqa: S608
        f" submission = ?, state = ?{fresh}{ready} WHERE id = ?",
        (*_row(job, submission, now)[1:-1], state, known["id"]),
    )


def _link_needs(db: sqlite3.Connection, jobs: Sequence[Job], some_known: bool) -> None:
    ids = {}
    if some_known or any(job.needs for job in jobs):
        ids = {
            job.name: db.execute("SELECT id FROM jobs WHERE name = ? AND state = 'waiting'", (job.name,)).fetchone()
            for job in jobs
        }
    waiting = [(job, ids[job.name]["id"]) for job in jobs if ids.get(job.name) is not None]
    db.executemany("DELETE FROM needs WHERE job = ?", ((job_id,) for _, job_id in waiting))
    db.executemany(
        "INSERT OR IGNORE INTO needs SELECT ?, id FROM jobs WHERE name = ?",
        ((job_id, need) for job, job_id in waiting for need in job.needs),
    )
    db.executemany(COUNT_BLOCKED, ((job_id,) for _, job_id in waiting))


COUNT_BLOCKED = (
    "UPDATE jobs SET blocked = (SELECT count(*) FROM needs JOIN jobs n ON n.id = needs.needed"
    " WHERE needs.job = jobs.id AND n.state <> 'done') WHERE id = ?"
)


def _check_rounds(db: sqlite3.Connection) -> None:
    """A job that needs one of a later round could never run: its own round would never end."""
    found = db.execute(
        "SELECT a.name, a.round, b.name AS needed, b.round AS later FROM needs"
        " JOIN jobs a ON a.id = needs.job JOIN jobs b ON b.id = needs.needed"
        " WHERE a.state = 'waiting' AND b.state <> 'done' AND b.round > a.round LIMIT 1"
    ).fetchone()
    if found is not None:
        raise UsageError(
            f"job {found['name']!r} of round {found['round']} needs {found['needed']!r}, which is of the later round"
            f" {found['later']}"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(clean(name) for name in names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def _same_work(old: Job, new: Job) -> bool:
    """Whether two jobs give the same result: by what they say it depends on, else by command and place."""
    if new.identity is not None or old.identity is not None:
        return (old.identity, old.result) == (new.identity, new.result)
    return (old.argv, old.env, old.cwd, old.result) == (new.argv, new.env, new.cwd, new.result)


def _anchored(job: Job) -> Job:
    """The job with absolute paths: the next call may come from another folder."""
    if job.cwd is None and job.result is None:
        return job
    cwd = None if job.cwd is None else str(Path(job.cwd).absolute())
    return replace(job, cwd=cwd, result=None if job.result is None else str(Path(cwd or ".", job.result).absolute()))
