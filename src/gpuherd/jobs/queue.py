"""The durable queue: every job, every attempt, and every change of state as one transaction.

The database is the only truth about progress. Whatever the dispatcher holds in memory can be rebuilt from here after a
kill at any instant. Each method that changes something is one transaction and refuses a transition that can't be
(``ImpossibleTransition``). Any process may read a queue; one dispatcher at a time changes it (``DispatcherLock``).
What to run next is decided elsewhere; this module only hands out the head of the queue in order.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpuherd.engines.processes import ProcessId, boot_id
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.needs import check_needs
from gpuherd.jobs.records import AttemptEnd, AttemptRecord, AttemptRow, AttemptState, Counts, QueuedJob
from gpuherd.jobs.schema import connect

_LONGEST_BACK_OFF_S = 120.0


class ImpossibleTransition(RuntimeError):
    """A change of state that can't be: a defect in gpuherd. The transaction was taken back."""


class Queue:
    """The jobs of one run folder, in one SQLite file.

    Attributes:
        tag: names this queue in the environment of its jobs' processes.
        copied: the file is a copy of the queue that last ran, so that what runs there does not belong to this one.

    Raises QueueUnreadable when the file is damaged or of a newer gpuherd; it is then left as it is.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._db = connect(self.path)
        # A copied folder has the same queue in it, but the attempts and processes of the original are not its own.
        inode = str(self.path.stat().st_ino)
        self.copied = self._meta("inode") not in ("", inode)
        self.tag = f"{self._meta('queue')}.{inode}"

    def close(self) -> None:
        """Closes the file. What was changed is safe already."""
        self._db.close()

    # --- submitting -------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job], rerun: Collection[str] = ()) -> None:
        """Makes the queue hold exactly these jobs as work to do, going on from what is there by name.

        A job that is new waits. One that succeeded with the same command stays done while its ``result`` is there, and
        waits again when it is gone, when the command has changed, or when ``rerun`` names it. One that failed or was
        cancelled waits again. A running one goes on. All have fresh tries. Jobs of earlier submissions that still wait
        and are not named any more are cancelled. Raises UsageError for a name given twice and for ``needs`` that name
        no job or go in a circle; nothing is changed then.
        """
        check_needs(jobs)
        again = set(rerun)
        with self._transaction():
            submission = int(self._meta("submission")) + 1
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'submission'", (str(submission),))
            now = time.time()
            for job in jobs:
                self._submit_one(_anchored(job), job.name in again, submission, now)
            self._link_needs(jobs)
            self._db.execute(
                "UPDATE jobs SET state = 'cancelled', reason = 'no longer in the list'"
                " WHERE submission < ? AND state = 'waiting'",
                (submission,),
            )

    def _submit_one(self, job: Job, again: bool, submission: int, now: float) -> None:
        spec = _spec(job)
        known = self._db.execute("SELECT id, spec, state FROM jobs WHERE name = ?", (job.name,)).fetchone()
        if known is None:
            self._db.execute(
                "INSERT INTO jobs (name, spec, gpus, priority, submission, state, ready_at) VALUES (?,?,?,?,?,?,?)",
                (job.name, spec, job.gpus, job.priority, submission, JobState.WAITING, now),
            )
            return
        if known["state"] == JobState.RUNNING:
            # Fresh tries for it too: killed together with its dispatcher time and again, it must not fail for that.
            self._db.execute("UPDATE jobs SET submission = ?, tries = 0 WHERE id = ?", (submission, known["id"]))
            return
        stays = known["state"] == JobState.DONE and not again and _same_work(known["spec"], spec) and _has_result(job)
        state = JobState.DONE if stays else JobState.WAITING
        fresh = "" if stays else ", tries = 0, not_before = 0, avoid = '[]', reason = NULL"
        ready = "" if stays or known["state"] == JobState.WAITING else f", ready_at = {now!r}"
        self._db.execute(
            f"UPDATE jobs SET spec = ?, gpus = ?, priority = ?, submission = ?, state = ?{fresh}{ready} WHERE id = ?",  # noqa: S608
            (spec, job.gpus, job.priority, submission, state, known["id"]),
        )

    def _link_needs(self, jobs: Sequence[Job]) -> None:
        self._db.execute("DELETE FROM needs WHERE job IN (SELECT id FROM jobs WHERE state = 'waiting')")
        for job in jobs:
            for need in job.needs:
                self._db.execute(
                    "INSERT OR IGNORE INTO needs SELECT a.id, b.id FROM jobs a, jobs b WHERE a.name = ? AND b.name = ?",
                    (job.name, need),
                )
        self._db.execute(
            "UPDATE jobs SET blocked = (SELECT count(*) FROM needs JOIN jobs n ON n.id = needs.needed"
            " WHERE needs.job = jobs.id AND n.state <> 'done')"
            " WHERE state = 'waiting' AND (blocked > 0 OR id IN (SELECT job FROM needs))"
        )

    # --- reading ----------------------------------------------------------------------------------------------

    def head(self, limit: int, now: float) -> tuple[QueuedJob, ...]:
        """The first ``limit`` jobs that need GPUs and the first ``limit`` that need none, by priority, then age.

        Jobs whose needs have not succeeded, or whose back-off has not passed, are not among them. (A back-off that is
        far in the future is one from before the clock was set back, and counts as passed.)
        """
        rows: list[sqlite3.Row] = []
        for needs_gpu in (1, 0):
            rows += self._db.execute(
                "SELECT * FROM jobs WHERE state = 'waiting' AND blocked = 0 AND (gpus > 0) = ?"
                " AND (not_before <= ? OR not_before > ?) ORDER BY priority DESC, id LIMIT ?",
                (needs_gpu, now, now + _LONGEST_BACK_OFF_S, limit),
            ).fetchall()
        return tuple(_queued(row) for row in rows)

    def next_not_before(self, now: float) -> float | None:
        """The next wall-clock second at which a job's back-off ends, or None."""
        row = self._db.execute(
            "SELECT min(not_before) FROM jobs WHERE state = 'waiting' AND blocked = 0 AND not_before > ?"
            " AND not_before <= ?",
            (now, now + _LONGEST_BACK_OFF_S),
        ).fetchone()
        return None if row[0] is None else float(row[0])

    def counts(self) -> Counts:
        """Jobs of the latest submission by state."""
        latest = int(self._meta("submission"))
        rows = self._db.execute("SELECT state, count(*) AS n FROM jobs WHERE submission = ? GROUP BY state", (latest,))
        return Counts.of({row["state"]: row["n"] for row in rows})

    def states(self) -> dict[str, JobState]:
        """Every job's state, by name."""
        return {row["name"]: JobState(row["state"]) for row in self._db.execute("SELECT name, state FROM jobs")}

    def running(self) -> tuple[AttemptRecord, ...]:
        """The attempts that have no end yet: those of this dispatcher, or those that a dead one left."""
        rows = self._db.execute(
            "SELECT * FROM attempts WHERE state = 'running' ORDER BY id",
        ).fetchall()
        return tuple(self._attempt_record(row) for row in rows)

    def _attempt_record(self, row: sqlite3.Row) -> AttemptRecord:
        job = self._db.execute("SELECT * FROM jobs WHERE id = ?", (row["job"],)).fetchone()
        return AttemptRecord(
            id=row["id"],
            queued=_queued(job),
            number=row["number"],
            gpus=tuple(json.loads(row["gpus"])),
            labels=tuple(json.loads(row["labels"])),
            process=ProcessId(row["pid"], row["start_ticks"], row["boot"]),
            log=row["log"],
            started_at=row["started_at"],
            started_mono=row["started_mono"],
        )

    def attempts(self) -> Iterator[AttemptRow]:
        """Every attempt in order of start, with its length; None for the length of one that crossed a reboot."""
        rows = self._db.execute(
            "SELECT a.*, j.name FROM attempts a JOIN jobs j ON j.id = a.job ORDER BY a.id",
        )
        for row in rows:
            run_s = None if row["ended_mono"] is None else max(0.0, row["ended_mono"] - row["started_mono"])
            yield AttemptRow(
                job=row["name"],
                number=row["number"],
                run=row["run"],
                state=AttemptState(row["state"]),
                gpus=tuple(json.loads(row["gpus"])),
                labels=tuple(json.loads(row["labels"])),
                wait_s=row["wait_s"],
                started_at=row["started_at"],
                ended_at=row["ended_at"],
                run_s=run_s,
                failure_class=row["class"],
            )

    def runs(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each dispatcher's run in wall-clock seconds; a killed one ends with the last it wrote."""
        rows = self._db.execute(
            "SELECT r.started_at, coalesce(r.ended_at, max(a.ended_at), max(a.started_at), r.started_at) AS ended_at"
            " FROM runs r LEFT JOIN attempts a ON a.run = r.id GROUP BY r.id ORDER BY r.id"
        )
        return tuple((row["started_at"], max(row["started_at"], row["ended_at"])) for row in rows)

    # --- transitions ------------------------------------------------------------------------------------------

    def begin_run(self, now: float, mono: float) -> int:
        """Writes down that a dispatcher begins; returns the run's number."""
        with self._transaction():
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'inode'", (str(self.path.stat().st_ino),))
            cursor = self._db.execute(
                "INSERT INTO runs (pid, boot, started_at, started_mono) VALUES (?,?,?,?)",
                (os.getpid(), boot_id(), now, mono),
            )
        return int(cursor.lastrowid or 0)

    def end_run(self, run: int, now: float) -> None:
        """Writes down that the dispatcher has ended in order."""
        with self._transaction():
            self._db.execute("UPDATE runs SET ended_at = ? WHERE id = ?", (now, run))

    def last_attempt(self) -> int:
        """The highest attempt number used so far, 0 for none."""
        return int(self._db.execute("SELECT coalesce(max(id), 0) FROM attempts").fetchone()[0])

    def record_start(self, attempt: AttemptRecord, run: int, *, wait_s: float, leased_mono: float | None) -> None:
        """A waiting job runs. To be called when its process is there and before it gets its go-ahead.

        ``wait_s``: how long it could have run and did not. ``leased_mono``: when its GPUs were leased.
        """
        process = attempt.process
        with self._transaction():
            self._change(
                "UPDATE jobs SET state = 'running', attempts = ?, reason = NULL"
                " WHERE id = ? AND state = 'waiting' AND blocked = 0",
                (attempt.number, attempt.queued.id),
            )
            self._db.execute(
                "INSERT INTO attempts (id, job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
                " leased_mono, started_at, started_mono) VALUES (?,?,?,?,'running',?,?,?,?,?,?,?,?,?,?)",
                (
                    attempt.id,
                    attempt.queued.id,
                    attempt.number,
                    run,
                    json.dumps(attempt.gpus),
                    json.dumps(attempt.labels),
                    process.pid,
                    process.start_ticks,
                    process.boot,
                    attempt.log,
                    wait_s,
                    leased_mono,
                    attempt.started_at,
                    attempt.started_mono,
                ),
            )

    def record_end(self, end: AttemptEnd) -> tuple[str, ...]:
        """A running attempt has ended, and its job is done, failed for good, or waits again.

        Returns the names of jobs that can't run any more because they need this one; they are cancelled with it.
        """
        with self._transaction():
            self._change(
                "UPDATE attempts SET state = ?, ended_at = ?, ended_mono = ?, exit_code = ?, signal = ?, class = ?,"
                " reason = ? WHERE id = ? AND state = 'running'",
                (
                    end.state,
                    end.ended_at,
                    end.ended_mono,
                    end.exit_code,
                    end.signal,
                    end.failure_class,
                    end.reason,
                    end.attempt,
                ),
            )
            job = int(self._db.execute("SELECT job FROM attempts WHERE id = ?", (end.attempt,)).fetchone()[0])
            self._change(
                "UPDATE jobs SET state = ?, reason = ?, tries = tries + ?, not_before = ?, avoid = ?, ready_at = ?"
                " WHERE id = ? AND state = 'running'",
                (
                    end.job_state,
                    end.reason,
                    1 if end.state is AttemptState.FAILED else 0,
                    end.not_before,
                    json.dumps(sorted(end.avoid)),
                    max(end.ended_at, end.not_before),
                    job,
                ),
            )
            if end.job_state is JobState.DONE:
                self._unblock(job)
            return self._cancel_dependents(job) if end.job_state is JobState.FAILED else ()

    def fail_waiting(self, job: int, reason: str) -> tuple[str, ...]:
        """A waiting job is given up without having run. Returns the names of jobs cancelled with it."""
        with self._transaction():
            self._change(
                "UPDATE jobs SET state = 'failed', reason = ? WHERE id = ? AND state = 'waiting'",
                (reason, job),
            )
            return self._cancel_dependents(job)

    def note(self, at: float, kind: str, text: str, job: str | None = None, attempt: int | None = None) -> None:
        """Adds an event to the queue's own diary."""
        self._db.execute(
            "INSERT INTO events (at, kind, job, attempt, text) VALUES (?,?,?,?,?)", (at, kind, job, attempt, text)
        )

    def _unblock(self, job: int) -> None:
        self._db.execute(
            "UPDATE jobs SET blocked = blocked - 1 WHERE state = 'waiting' AND blocked > 0"
            " AND id IN (SELECT job FROM needs WHERE needed = ?)",
            (job,),
        )

    def _cancel_dependents(self, job: int) -> tuple[str, ...]:
        name = str(self._db.execute("SELECT name FROM jobs WHERE id = ?", (job,)).fetchone()[0])
        doomed = self._db.execute(
            "WITH RECURSIVE doomed (id) AS (SELECT job FROM needs WHERE needed = ?"
            " UNION SELECT needs.job FROM needs JOIN doomed ON needs.needed = doomed.id)"
            " SELECT jobs.id, jobs.name FROM doomed JOIN jobs ON jobs.id = doomed.id WHERE jobs.state = 'waiting'",
            (job,),
        ).fetchall()
        for row in doomed:
            reason = f"needs {name}, which failed"
            self._db.execute("UPDATE jobs SET state = 'cancelled', reason = ? WHERE id = ?", (reason, row["id"]))
        return tuple(row["name"] for row in doomed)

    # --- plumbing ---------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk makes SQLite roll back by itself; a second time would hide what went wrong.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        if self._db.execute(statement, values).rowcount != 1:
            raise ImpossibleTransition(f"refused: {statement} with {values}")

    def _meta(self, key: str) -> str:
        return str(self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])


def _spec(job: Job) -> str:
    # Not asdict, which copies deeply: a tenth of the time of queueing a long list.
    values = {each.name: getattr(job, each.name) for each in fields(job)}
    return json.dumps({**values, "env": dict(job.env)}, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=1024)
def _job(spec: str) -> Job:
    values: dict[str, Any] = json.loads(spec)
    return Job(**{**values, "argv": tuple(values["argv"]), "needs": tuple(values["needs"])})


def _same_work(old: str, new: str) -> bool:
    """Whether two specs give the same result: by what the jobs say it depends on, else by command and place."""

    def work(spec: Mapping[str, Any]) -> tuple[object, ...]:
        if spec.get("identity") is not None:
            return spec["identity"], spec["result"]
        return spec["argv"], spec["env"], spec["cwd"], spec["result"]

    return work(json.loads(old)) == work(json.loads(new))


def _anchored(job: Job) -> Job:
    """The job with absolute paths: the next call may come from another folder."""
    cwd = None if job.cwd is None else str(Path(job.cwd).absolute())
    return replace(job, cwd=cwd, result=None if job.result is None else str(Path(cwd or ".", job.result).absolute()))


def _has_result(job: Job) -> bool:
    return job.result is None or Path(job.result).exists()


def _queued(row: sqlite3.Row) -> QueuedJob:
    return QueuedJob(
        id=row["id"],
        job=_job(row["spec"]),
        tries=row["tries"],
        attempts=row["attempts"],
        not_before=row["not_before"],
        avoid=frozenset(json.loads(row["avoid"])),
        ready_at=row["ready_at"],
    )
