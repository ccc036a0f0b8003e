"""Jobs that an engine beyond this machine has before what they need has succeeded: it keeps the order itself. SQL only.

Such a job is running in the queue while its ``blocked`` still counts what it needs. What it follows are the attempts
that were open when it was handed over: they have lower numbers than its own. When one of those ends and not well, or
another attempt takes its place, the follower can't begin any more: it is *stranded*, and must be taken back.
"""

from __future__ import annotations

import sqlite3

from gpuherd.jobs.records import Predecessor

# The need m of a job is in the engine's hands, and nobody wants it to end.
_IN_HAND = (
    "m.cancelled_by IS NULL AND EXISTS (SELECT 1 FROM attempts b WHERE b.job = m.id AND b.state = 'running'"
    " AND b.engine = ? AND b.handle IS NOT NULL)"
)
# An open attempt a, and attempts b that it may have been handed over to follow.
_FOLLOWED = (
    "attempts a JOIN needs n ON n.job = a.job JOIN attempts b ON b.job = n.needed"
    " WHERE a.state = 'running' AND a.batch IS NOT NULL AND b.batch IS NOT NULL AND b.id < a.id"
    " AND b.state IN ('running', 'done')"
)
_NOT_YET = "SELECT 1 FROM needs n JOIN jobs m ON m.id = n.needed WHERE n.job = j.id AND m.state <> 'done'"


def followers(
    db: sqlite3.Connection, engine: str, round_: int, now: float, latest: float, limit: int
) -> list[sqlite3.Row]:
    """Waiting jobs of this round that need others, of which all that have not succeeded are in the engine's hands.

    It is looked for among those that need what the engine has, so that a long queue costs no more than a short one.
    """
    return db.execute(
        "SELECT j.* FROM jobs j WHERE j.id IN (SELECT needs.job FROM attempts a JOIN needs ON needs.needed = a.job"  # noqa: S608
        " WHERE a.state = 'running' AND a.engine = ? AND a.handle IS NOT NULL)"
        " AND j.state = 'waiting' AND j.blocked > 0 AND j.held = 0 AND j.round = ?"
        f" AND (j.not_before <= ? OR j.not_before > ?) AND NOT EXISTS ({_NOT_YET} AND NOT ({_IN_HAND}))"
        " ORDER BY j.priority DESC, j.id LIMIT ?",
        (engine, round_, now, latest, engine, limit),
    ).fetchall()


def predecessors(db: sqlite3.Connection, job: int, engine: str) -> tuple[Predecessor, ...]:
    """The attempts of what a job needs that has not succeeded, oldest first."""
    rows = db.execute(
        "SELECT a.id, a.handle FROM needs n JOIN jobs m ON m.id = n.needed JOIN attempts a ON a.job = m.id"
        " WHERE n.job = ? AND m.state <> 'done' AND a.state = 'running' AND a.engine = ? ORDER BY a.id",
        (job, engine),
    )
    return tuple(Predecessor(row["id"], row["handle"]) for row in rows)


def follows(db: sqlite3.Connection, job: int, engine: str) -> bool:
    """Whether all that this job needs and that has not succeeded is in the engine's hands."""
    found = db.execute(
        f"SELECT 1 FROM jobs j WHERE j.id = ? AND EXISTS ({_NOT_YET} AND NOT ({_IN_HAND}))",  # noqa: S608
        (job, engine),
    ).fetchone()
    return found is None


def stranded(db: sqlite3.Connection) -> frozenset[int]:
    """Open attempts that are to follow one which is open no more and did not succeed, or was begun anew since."""
    rows = db.execute(
        "SELECT a.id FROM attempts a JOIN jobs j ON j.id = a.job WHERE a.state = 'running' AND j.blocked > 0"  # noqa: S608
        f" AND EXISTS ({_NOT_YET}"
        " AND NOT EXISTS (SELECT 1 FROM attempts b WHERE b.job = m.id AND b.state = 'running' AND b.id < a.id))"
    )
    return frozenset(row["id"] for row in rows)


def followed(db: sqlite3.Connection) -> dict[str, frozenset[int]]:
    """By batch with an open attempt the attempts that one of its own may have been handed over to follow."""
    found: dict[str, set[int]] = {}
    for row in db.execute(f"SELECT a.batch, b.id FROM {_FOLLOWED}"):  # noqa: S608
        found.setdefault(row["batch"], set()).add(row["id"])
    return {batch: frozenset(numbers) for batch, numbers in found.items()}


def batches(db: sqlite3.Connection) -> list[sqlite3.Row]:
    """Name and number of all attempts of each batch with an open one, or with one that an open one may follow."""
    return db.execute(
        "SELECT batch, id FROM attempts WHERE batch IN (SELECT batch FROM attempts WHERE state = 'running'"  # noqa: S608
        f" UNION SELECT b.batch FROM {_FOLLOWED}) ORDER BY batch, place"
    ).fetchall()


def unblock(db: sqlite3.Connection, job: int, now: float) -> None:
    """A job has succeeded: those that follow it in an engine need one less. When that was the last, they begin to wait
    for a place, and for nothing else; the time before counts for no wait, also where it was heard first that one has
    begun and only then what it followed."""
    running = "state = 'running' AND blocked > 0 AND id IN (SELECT job FROM needs WHERE needed = ?)"
    freed = f"state = 'running' AND job IN (SELECT id FROM jobs WHERE blocked = 1 AND {running})"  # noqa: S608
    db.execute(
        "UPDATE attempts SET started_mono = started_mono + max(0, ? - started_at), started_at = max(?, started_at)"  # noqa: S608
        f" WHERE node IS NULL AND {freed}",
        (now, now, job),
    )
    db.execute(
        f"UPDATE attempts SET wait_s = min(wait_s, max(0, started_at - ?)) WHERE node IS NOT NULL AND {freed}",  # noqa: S608
        (now, job),
    )
    db.execute(f"UPDATE jobs SET blocked = blocked - 1 WHERE {running}", (job,))  # noqa: S608


def ended_badly(db: sqlite3.Connection) -> list[sqlite3.Row]:
    """Jobs that have failed or were cancelled, and that waiting ones need; before those that were cancelled for need of
    another stands that other."""
    return db.execute(
        "WITH RECURSIVE bad (id) AS (SELECT n.id FROM needs JOIN jobs n ON n.id = needs.needed"
        " JOIN jobs j ON j.id = needs.job WHERE j.state = 'waiting' AND n.state IN ('failed', 'cancelled')"
        " UNION SELECT n.id FROM bad JOIN jobs b ON b.id = bad.id AND b.doomed = 1 JOIN needs ON needs.job = b.id"
        " JOIN jobs n ON n.id = needs.needed WHERE n.state IN ('failed', 'cancelled'))"
        " SELECT id, name, state FROM jobs WHERE id IN (SELECT id FROM bad) ORDER BY doomed, id"
    ).fetchall()
