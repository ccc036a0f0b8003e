"""Jobs come into a queue: what is new waits, what is known goes on by its name. SQL only; called in a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.needs import check_needs
from gpuherd.jobs.order import rank
from gpuherd.jobs.rows import job_of, spec_of

_INSERT = (
    "INSERT INTO jobs (name, spec, gpus, memory_mb, share, cost, round, priority, rank, submission, state, ready_at)"
    " VALUES (?,?,?,?,?,?,?,?,?,?,'waiting',?)"
)


def enter(db: sqlite3.Connection, jobs: Sequence[Job], again: Collection[str], submission: int, now: float) -> None:
    """Puts the jobs into the table, or changes what is there of the same name, and links their needs.

    ``again``: names of jobs that are to run once more though they are done. Raises UsageError for needs that can't be
    met; the caller then takes the transaction back.
    """
    known = _known(db, jobs)
    fresh = (job for job in jobs if job.name not in known)
    db.executemany(_INSERT, (_row(_anchored(job), submission, now) for job in fresh))
    for job in jobs:
        if job.name in known:
            _go_on(db, _anchored(job), known[job.name], job.name in again, submission, now)
    _link_needs(db, jobs, bool(known))
    _check_rounds(db)


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
    """Raises UsageError when one of these jobs, linked by now, needs itself by way of others in the queue."""
    for job in jobs:
        if (
            job.needs
            and db.execute(
                "WITH RECURSIVE needed (id) AS"
                " (SELECT n.needed FROM needs n JOIN jobs j ON j.id = n.job WHERE j.name = ?"
                " UNION SELECT n.needed FROM needs n JOIN needed ON n.job = needed.id)"
                " SELECT 1 FROM needed JOIN jobs j ON j.id = needed.id WHERE j.name = ?",
                (job.name, job.name),
            ).fetchone()
        ):
            raise UsageError(f"job {job.name!r} would need itself, by way of jobs that are in the queue")


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
    rows = (db.execute("SELECT id, name, spec, state FROM jobs WHERE name = ?", (job.name,)).fetchone() for job in jobs)
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
