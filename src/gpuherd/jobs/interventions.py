"""What a person does to jobs of a queue: cancel, retry, pause, resume, another priority. SQL only, in a transaction.

Each function changes rows and returns what it changed; for jobs that run it only leaves a mark (``cancelled_by``,
``attempts.paused``). Whoever has their processes in hand then does what the marks say, and a successor does so again
after a kill: the marks are the truth.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from gpuherd.engines.options import LOCAL
from gpuherd.jobs.job import JobState
from gpuherd.jobs.records import PauseReason
from gpuherd.jobs.rows import job_of, pause_reasons, spec_of
from gpuherd.jobs.submission import COUNT_BLOCKED, ENDED_BADLY
from gpuherd.jobs.whereabouts import engine_name


@dataclass(frozen=True, slots=True)
class Changed:
    """Names of the jobs that were changed, of those that were changed along with them, and why others were not.
    ``remarks``: what should be known besides.
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
            along += doom(db, row["id"], "was cancelled")
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
    back = wanted | _doomed_by(db, wanted)
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
    """Waiting jobs are held; running ones are marked. What an engine beyond this machine has goes on there."""
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
    """What ``pause`` did is taken back."""
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


def doom(db: sqlite3.Connection, job: int, fate: str) -> tuple[str, ...]:
    """Cancels the waiting jobs that need this one, also by way of others; returns their names."""
    name = str(db.execute("SELECT name FROM jobs WHERE id = ?", (job,)).fetchone()[0])
    doomed = db.execute(
        "WITH RECURSIVE doomed (id) AS (SELECT job FROM needs WHERE needed = ?"
        " UNION SELECT needs.job FROM needs JOIN doomed ON needs.needed = doomed.id)"
        " SELECT jobs.id, jobs.name FROM doomed JOIN jobs ON jobs.id = doomed.id WHERE jobs.state = 'waiting'",
        (job,),
    ).fetchall()
    db.executemany(
        "UPDATE jobs SET state = 'cancelled', held = 0, doomed = 1, reason = ? WHERE id = ?",
        ((f"needs {name}, which {fate}", row["id"]) for row in doomed),
    )
    return tuple(row["name"] for row in doomed)


def mark_paused(db: sqlite3.Connection, attempt: int, why: PauseReason, mono: float) -> bool:
    """Adds a reason to a running attempt's; returns whether it is new."""
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
    """Takes a reason off a running attempt's; with the last one its pause is over. Returns whether it was there."""
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
    """Jobs that can't run again, though they are wanted: they need one that has ended badly and does not come back, or
    one that is stuck itself. By their number the needed one's name and state.
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


def _doomed_by(db: sqlite3.Connection, back: dict[int, str]) -> dict[int, str]:
    """Jobs that were cancelled for need of those that come back, and need no other that stays failed or cancelled."""
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
