"""Changes that users request: cancel, retry, pause, resume, priority; the table of requests; dependent jobs that are
in an engine's hands. SQL only, in a transaction of the caller.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from gpuherd.engines.registry import LOCAL
from gpuherd.jobs.control.messages import Request, Response
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.job import JobState, job_of, spec_of
from gpuherd.jobs.queue.submission import COUNT_BLOCKED, ENDED_BADLY, pause_reasons
from gpuherd.jobs.records import PauseReason, Predecessor

# Each function changes rows and returns the changes; running jobs are only marked (``cancelled_by``,
# ``attempts.paused``). The dispatcher of their processes then acts on the marks, and its successor does so again after
# a kill: the marks are the truth.


@dataclass(frozen=True, slots=True)
class Changed:
    """The result of a change.

    Attributes:
        jobs: names of the jobs that were changed.
        along: names of those that were changed with them, because of their needs.
        refused: for each other job a sentence why it was not changed.
        remarks: further sentences for the user.
    """

    jobs: tuple[str, ...] = ()
    along: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def cancel(db: sqlite3.Connection, rows: Iterable[sqlite3.Row], by: str) -> Changed:
    """Waiting jobs are cancelled now, with all that need them; running ones are marked."""
    changed: list[str] = []
    along: list[str] = []
    refused: list[str] = []
    for row in rows:
        state = JobState(db.execute("SELECT state FROM jobs WHERE id = ?", (row["id"],)).fetchone()[0])
        if state is JobState.WAITING:
            db.execute(
                "UPDATE jobs SET state = 'cancelled', held = 0, cancelled_by = ?, reason = ? WHERE id = ?",
                (by, f"cancelled by {by}", row["id"]),
            )
            along += cascade(db, row["id"], "was cancelled")
        elif state is JobState.RUNNING:
            db.execute("UPDATE jobs SET cancelled_by = ? WHERE id = ?", (by, row["id"]))
        else:
            if row["name"] not in along:
                refused.append(f"{row['name']} is {state} already")
            continue
        changed.append(row["name"])
    return Changed(tuple(changed), tuple(along), tuple(refused))


def retry(db: sqlite3.Connection, rows: Sequence[sqlite3.Row], now: float) -> Changed:
    """Failed and cancelled jobs wait again with fresh tries, and so do those that were cancelled because of them."""
    wanted = {row["id"]: row["name"] for row in rows if row["state"] in ENDED_BADLY}
    refused = [
        f"{row['name']} is {row['state']}; only failed and cancelled jobs can be tried again"
        for row in rows
        if row["id"] not in wanted
    ]
    stuck = _stuck(db, wanted)
    refused += [
        f"{wanted[job]} needs {need}, which is {state}: retry that one too" for job, (need, state) in stuck.items()
    ]
    wanted = {job: name for job, name in wanted.items() if job not in stuck}
    back = wanted | _cascaded_from(db, wanted)
    for job in back:
        spec = job_of(db.execute("SELECT spec FROM jobs WHERE id = ?", (job,)).fetchone()[0])
        db.execute(
            "UPDATE jobs SET state = 'waiting', tries = 0, not_before = 0, avoid = '[]', reason = NULL, held = 0,"
            " doomed = 0, cancelled_by = NULL, gpus = ?, memory_mb = ?, share = ?, ready_at = ?,"
            " submission = (SELECT value FROM meta WHERE key = 'submission') WHERE id = ?",
            (spec.gpus, spec.memory_mb, spec.share, now, job),
        )
    db.executemany(COUNT_BLOCKED, ((job,) for job in back))
    return Changed(tuple(wanted.values()), tuple(back[job] for job in back if job not in wanted), tuple(refused))


def pause(db: sqlite3.Connection, rows: Iterable[sqlite3.Row], by: str, mono: float) -> Changed:
    """Holds waiting jobs and marks running ones. Jobs in the hands of an engine can't be paused."""
    changed, refused = [], []
    for row in rows:
        engine = _engine_of(db, row["id"]) if row["state"] == JobState.RUNNING else LOCAL
        if engine != LOCAL:
            refused.append(f"{row['name']} is in the hands of {engine_name(engine)} and goes on there")
            continue
        if row["state"] == JobState.WAITING:
            db.execute("UPDATE jobs SET held = 1, reason = ? WHERE id = ?", (f"paused by {by}", row["id"]))
        elif row["state"] == JobState.RUNNING:
            mark_paused(db, _running_attempt(db, row["id"]), PauseReason.USER, mono)
        else:
            refused.append(f"{row['name']} is {row['state']}; only what waits or runs can be paused")
            continue
        changed.append(row["name"])
    return Changed(tuple(changed), refused=tuple(refused))


def resume(db: sqlite3.Connection, rows: Iterable[sqlite3.Row], mono: float, now: float) -> Changed:
    """Undoes ``pause``."""
    changed, refused = [], []
    for row in rows:
        if row["state"] == JobState.WAITING and row["held"]:
            db.execute("UPDATE jobs SET held = 0, reason = NULL, ready_at = ? WHERE id = ?", (now, row["id"]))
            changed.append(row["name"])
        elif row["state"] == JobState.RUNNING and mark_resumed(
            db, _running_attempt(db, row["id"]), PauseReason.USER, mono
        ):
            changed.append(row["name"])
        else:
            refused.append(f"{row['name']} is not paused")
    return Changed(tuple(changed), refused=tuple(refused))


def set_priority(db: sqlite3.Connection, rows: Iterable[sqlite3.Row], priority: int) -> Changed:
    """Gives jobs that have not ended another priority."""
    changed, refused = [], []
    for row in rows:
        if row["state"] not in (JobState.WAITING, JobState.RUNNING):
            refused.append(f"{row['name']} is {row['state']}")
            continue
        spec = spec_of(replace(job_of(row["spec"]), priority=priority))
        db.execute("UPDATE jobs SET priority = ?, spec = ? WHERE id = ?", (priority, spec, row["id"]))
        changed.append(row["name"])
    return Changed(tuple(changed), refused=tuple(refused))


def cascade(db: sqlite3.Connection, job: int, fate: str) -> tuple[str, ...]:
    """Cancels the waiting jobs that need this one, also by way of others; returns their names."""
    name = str(db.execute("SELECT name FROM jobs WHERE id = ?", (job,)).fetchone()[0])
    cascaded = db.execute(
        "WITH RECURSIVE doomed (id) AS (SELECT job FROM needs WHERE needed = ?"
        " UNION SELECT needs.job FROM needs JOIN doomed ON needs.needed = doomed.id)"
        " SELECT jobs.id, jobs.name FROM doomed JOIN jobs ON jobs.id = doomed.id WHERE jobs.state = 'waiting'",
        (job,),
    ).fetchall()
    db.executemany(
        "UPDATE jobs SET state = 'cancelled', held = 0, doomed = 1, reason = ? WHERE id = ?",
        ((f"needs {name}, which {fate}", row["id"]) for row in cascaded),
    )
    return tuple(row["name"] for row in cascaded)


def mark_paused(db: sqlite3.Connection, attempt: int, why: PauseReason, mono: float) -> bool:
    """Adds a reason to a running attempt; returns whether it is new."""
    row = db.execute("SELECT paused FROM attempts WHERE id = ?", (attempt,)).fetchone()
    reasons = pause_reasons(row["paused"])
    if why in reasons:
        return False
    db.execute(
        "UPDATE attempts SET paused = ?, paused_mono = coalesce(paused_mono, ?) WHERE id = ?",
        (" ".join(sorted(reasons | {why})), mono, attempt),
    )
    return True


def mark_resumed(db: sqlite3.Connection, attempt: int, why: PauseReason, mono: float) -> bool:
    """Removes a reason of a running attempt; with the last one its pause ends. Returns whether it was there."""
    row = db.execute("SELECT paused, paused_mono, paused_s FROM attempts WHERE id = ?", (attempt,)).fetchone()
    reasons = pause_reasons(row["paused"])
    if why not in reasons:
        return False
    left = reasons - {why}
    since = row["paused_mono"]
    over = max(0.0, mono - since) if not left and since is not None else 0.0
    db.execute(
        "UPDATE attempts SET paused = ?, paused_mono = ?, paused_s = paused_s + ? WHERE id = ?",
        (" ".join(sorted(left)), since if left else None, over, attempt),
    )
    return True


def _engine_of(db: sqlite3.Connection, job: int) -> str:
    """Which engine has a running job."""
    row = db.execute("SELECT engine FROM attempts WHERE job = ? AND state = 'running'", (job,)).fetchone()
    return str(row["engine"])


def _running_attempt(db: sqlite3.Connection, job: int) -> int:
    return int(db.execute("SELECT id FROM attempts WHERE job = ? AND state = 'running'", (job,)).fetchone()[0])


def _stuck(db: sqlite3.Connection, wanted: Collection[int]) -> dict[int, tuple[str, str]]:
    """Jobs that can't run again: they need a failed or cancelled one that is not retried, or one that is stuck itself.
    By number, with the needed job's name and state.
    """
    stuck: dict[int, tuple[str, str]] = {}
    for job in wanted:
        needed = db.execute(
            "SELECT n.id, n.name, n.state FROM needs JOIN jobs n ON n.id = needs.needed WHERE needs.job = ?", (job,)
        )
        for row in needed.fetchall():
            if row["state"] in ENDED_BADLY and row["id"] not in wanted:
                stuck[job] = row["name"], row["state"]
                break
    front = list(stuck)
    while front:
        needed = db.execute(
            "SELECT needs.job, n.name, n.state FROM needs JOIN jobs n ON n.id = needs.needed WHERE n.id = ?",
            (front.pop(),),
        )
        for row in needed.fetchall():
            if row["job"] in wanted and row["job"] not in stuck:
                stuck[row["job"]] = row["name"], row["state"]
                front.append(row["job"])
    return stuck


def _cascaded_from(db: sqlite3.Connection, back: dict[int, str]) -> dict[int, str]:
    """Jobs that were cancelled because of those that are retried, and need no other that stays failed or cancelled."""
    found: dict[int, str] = {}
    front = list(back)
    while front:
        for row in db.execute(
            "SELECT j.id, j.name FROM needs JOIN jobs j ON j.id = needs.job WHERE needs.needed = ? AND j.doomed = 1"
            " AND j.state = 'cancelled'",
            (front.pop(),),
        ).fetchall():
            if row["id"] not in found and row["id"] not in back:
                found[row["id"]] = row["name"]
                front.append(row["id"])
    stuck = _stuck(db, back.keys() | found.keys())
    return {job: name for job, name in found.items() if job not in stuck}


# The table ``controls``: requests to the queue and their responses. Carrying a request out and writing its response are
# one transaction, so that a kill at any instant leaves it open or done, never done twice.


def add_request(db: sqlite3.Connection, request: Request) -> int:
    """Writes a request into the table (its ``id`` is ignored); returns its number."""
    cursor = db.execute(
        "INSERT INTO controls (at, kind, jobs, settings, by) VALUES (?,?,?,?,?)",
        (request.at, request.kind, json.dumps(request.jobs), json.dumps(dict(request.settings)), request.by),
    )
    return int(cursor.lastrowid or 0)


def open_requests(db: sqlite3.Connection) -> tuple[Request, ...]:
    """The requests without a response, oldest first."""
    rows = db.execute("SELECT * FROM controls WHERE applied_at IS NULL ORDER BY id").fetchall()
    return tuple(
        Request(
            row["kind"], tuple(json.loads(row["jobs"])), json.loads(row["settings"]), row["by"], row["at"], row["id"]
        )
        for row in rows
    )


def answer(db: sqlite3.Connection, request: int, response: Response, now: float) -> None:
    """Writes the response to a request, which closes it."""
    db.execute(
        "UPDATE controls SET applied_at = ?, applied_by = ?, ok = ?, answer = ?, changed = ? WHERE id = ?",
        (now, response.applied_by, response.ok, response.text, json.dumps(response.changed), request),
    )


def response(db: sqlite3.Connection, request: int) -> Response | None:
    """The response to a request, None while it is open."""
    row = db.execute("SELECT * FROM controls WHERE id = ?", (request,)).fetchone()
    if row is None or row["applied_at"] is None:
        return None
    return Response(bool(row["ok"]), row["answer"], row["applied_by"], tuple(json.loads(row["changed"])))


# Dependencies in an engine's hands: jobs that an engine has before the jobs that they need have succeeded; it keeps the
# order itself. Such a job is running in the queue while its ``blocked`` still counts its needs. It follows the attempts
# that were open when it was handed over: they have lower numbers than its own. When one of those fails, or another
# attempt takes its place, the follower can't start any more: it is *orphaned*, and must be taken back.

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


def orphaned(db: sqlite3.Connection) -> frozenset[int]:
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
