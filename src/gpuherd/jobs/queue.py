"""The durable queue: every job, every attempt, and every change of state as one transaction.

The database is the only truth about progress. Whatever the dispatcher holds in memory can be rebuilt from here after a
kill at any instant. Each method that changes something is one transaction (or part of the one that ``transaction``
opened) and refuses a transition that can't be (``ImpossibleTransition``). Any process may read a queue, add jobs and
post controls; only who holds its ``DispatcherLock`` starts, ends and changes jobs. What to run next is decided
elsewhere; this module only hands out the head of the queue in order.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from gpuherd.engines.processes import boot_id
from gpuherd.jobs import interventions, mailbox, rows, submission
from gpuherd.jobs.interventions import Changed
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.mailbox import Letter, Reply
from gpuherd.jobs.needs import check_needs
from gpuherd.jobs.options import Order
from gpuherd.jobs.records import (
    AttemptEnd,
    AttemptRecord,
    AttemptRow,
    AttemptState,
    Counts,
    PauseReason,
    QueuedJob,
    StartRecord,
)
from gpuherd.jobs.schema import connect

_LONGEST_BACK_OFF_S = 120.0
_FATE = {JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled"}
_ORDER: Mapping[Order, str] = {"age": "priority DESC, id", "longest": "priority DESC, cost DESC, id"}


class ImpossibleTransition(RuntimeError):
    """A change of state that can't be: a defect in gpuherd. The transaction was taken back."""


class Queue:
    """The jobs of one run folder, in one SQLite file.

    Args:
        path: the file; made, for its owner alone, if it is not there.
        check: look through the whole file for damage. Whoever only adds a job or asks something may save that time.

    Attributes:
        tag: names this queue in the environment of its jobs' processes.
        copied: the file is a copy of the queue that last ran, so that what runs there does not belong to this one.

    Raises QueueUnreadable when the file is damaged or of a newer gpuherd; it is then left as it is.
    """

    def __init__(self, path: str | Path, *, check: bool = True):
        self.path = Path(path)
        self._db = connect(self.path, check=check)
        self._depth = 0
        # A copied folder has the same queue in it, but the attempts and processes of the original are not its own.
        inode = str(self.path.stat().st_ino)
        self.copied = self._meta("inode") not in ("", inode)
        self.tag = f"{self._meta('queue')}.{inode}"

    def close(self) -> None:
        """Closes the file. What was changed is safe already."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is done meanwhile is done together or not at all. May be nested."""
        if self._depth:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk makes SQLite roll back by itself; a second time would hide what went wrong.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._depth = 0

    # --- submitting -------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job], rerun: Collection[str] = ()) -> None:
        """Makes the queue hold exactly these jobs as work to do, going on from what is there by name.

        A job that is new waits. One that succeeded with the same command stays done while its ``result`` is there, and
        waits again when it is gone, when the command has changed, or when ``rerun`` names it. One that failed or was
        cancelled waits again. A running one goes on. All have fresh tries. Jobs of earlier submissions that still wait
        and are not named any more are cancelled. Raises UsageError for a name given twice and for ``needs`` that name
        no job, a later round, or go in a circle; nothing is changed then.
        """
        check_needs(jobs)
        with self.transaction():
            latest = self._submission() + 1
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'submission'", (str(latest),))
            submission.enter(self._db, jobs, set(rerun), latest, time.time())
            self._db.execute(
                "UPDATE jobs SET state = 'cancelled', held = 0, reason = 'no longer in the list'"
                " WHERE submission < ? AND state = 'waiting'",
                (latest,),
            )

    def add(self, jobs: Sequence[Job], rerun: Collection[str] = ()) -> None:
        """Puts jobs into the queue beside those that are there, also while a dispatcher works it off (then ``poke``).

        By the rules of ``submit``, but nothing else is cancelled, and ``needs`` may name jobs that are in the queue. A
        job that needs one which has failed or was cancelled is cancelled at once, with the reason. Raises UsageError as
        ``submit`` does; nothing is changed then.
        """
        with self.transaction():
            submission.check_added(self._db, jobs)
            submission.enter(self._db, jobs, set(rerun), self._submission(), time.time())
            submission.check_circles(self._db, jobs)
            if any(job.needs for job in jobs):
                bad = self._db.execute(
                    "SELECT DISTINCT n.id, n.state FROM needs JOIN jobs n ON n.id = needs.needed"
                    " JOIN jobs j ON j.id = needs.job WHERE j.state = 'waiting' AND n.state IN ('failed', 'cancelled')"
                ).fetchall()
                for row in bad:
                    interventions.doom(self._db, row["id"], _FATE[JobState(row["state"])])

    # --- reading ----------------------------------------------------------------------------------------------

    def head(self, limit: int, now: float, order: Order = "age") -> tuple[QueuedJob, ...]:
        """The first ``limit`` jobs that need GPUs and the first ``limit`` that need none, of the lowest round that has
        not ended: by priority, then age, or then cost (the highest first, unknown ones last), then age.

        Jobs that are paused, whose needs have not succeeded, or whose back-off has not passed, are not among them. (A
        back-off that is far in the future is one from before the clock was set back, and counts as passed.)
        """
        unfinished = self.round()
        found: list[sqlite3.Row] = []
        for needs_gpu in (1, 0) if unfinished is not None else ():
            found += self._db.execute(
                "SELECT * FROM jobs WHERE state = 'waiting' AND blocked = 0 AND held = 0 AND (gpus > 0) = ?"  # noqa: S608
                f" AND round = ? AND (not_before <= ? OR not_before > ?) ORDER BY {_ORDER[order]} LIMIT ?",
                (needs_gpu, unfinished, now, now + _LONGEST_BACK_OFF_S, limit),
            ).fetchall()
        return tuple(rows.queued(row) for row in found)

    def round(self) -> int | None:
        """The lowest round of which a job waits or runs, None when none does."""
        row = self._db.execute("SELECT min(round) FROM jobs WHERE state IN ('waiting', 'running')").fetchone()
        return None if row[0] is None else int(row[0])

    def held(self) -> int:
        """How many waiting jobs are paused."""
        return int(self._db.execute("SELECT count(*) FROM jobs WHERE held = 1").fetchone()[0])

    def next_not_before(self, now: float) -> float | None:
        """The next wall-clock second at which a job's back-off ends, or None."""
        row = self._db.execute(
            "SELECT min(not_before) FROM jobs WHERE state = 'waiting' AND blocked = 0 AND held = 0"
            " AND not_before > ? AND not_before <= ?",
            (now, now + _LONGEST_BACK_OFF_S),
        ).fetchone()
        return None if row[0] is None else float(row[0])

    def counts(self) -> Counts:
        """Jobs of the latest submission by state."""
        found = self._db.execute(
            "SELECT state, count(*) AS n FROM jobs WHERE submission = ? GROUP BY state", (self._submission(),)
        )
        return Counts.of({row["state"]: row["n"] for row in found})

    def states(self) -> dict[str, JobState]:
        """Every job's state, by name."""
        return {row["name"]: JobState(row["state"]) for row in self._db.execute("SELECT name, state FROM jobs")}

    def job(self, name: str) -> tuple[QueuedJob, JobState] | None:
        """The job of this name and how it stands, None when there is none."""
        row = self._db.execute("SELECT * FROM jobs WHERE name = ?", (name,)).fetchone()
        return None if row is None else (rows.queued(row), JobState(row["state"]))

    def jobs(self) -> Iterator[Job]:
        """Every job as it was last submitted, in order of age."""
        return (rows.job_of(row["spec"]) for row in self._db.execute("SELECT spec FROM jobs ORDER BY id"))

    def running(self) -> tuple[AttemptRecord, ...]:
        """The attempts that have no end yet: those of this dispatcher, or those that a dead one left."""
        found = self._db.execute("SELECT * FROM attempts WHERE state = 'running' ORDER BY id").fetchall()
        return tuple(
            rows.attempt(row, self._db.execute("SELECT * FROM jobs WHERE id = ?", (row["job"],)).fetchone())
            for row in found
        )

    def kinds(self) -> tuple[tuple[int, int | None], ...]:
        """What the waiting jobs ask for, each once: how many GPUs, and MB on each."""
        found = self._db.execute("SELECT DISTINCT gpus, memory_mb FROM jobs WHERE state = 'waiting'")
        return tuple((row["gpus"], row["memory_mb"]) for row in found)

    def attempts(self) -> Iterator[AttemptRow]:
        """Every attempt in order of start, with its length; None for the length of one that crossed a reboot."""
        found = self._db.execute("SELECT a.*, j.name FROM attempts a JOIN jobs j ON j.id = a.job ORDER BY a.id")
        return (rows.attempt_row(row) for row in found)

    def runs(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each dispatcher's run in wall-clock seconds; a killed one ends with the last it wrote."""
        found = self._db.execute(
            "SELECT r.started_at, coalesce(r.ended_at, max(a.ended_at), max(a.started_at), r.started_at) AS ended_at"
            " FROM runs r LEFT JOIN attempts a ON a.run = r.id GROUP BY r.id ORDER BY r.id"
        )
        return tuple((row["started_at"], max(row["started_at"], row["ended_at"])) for row in found)

    # --- transitions ------------------------------------------------------------------------------------------

    def begin_run(self, now: float, mono: float) -> int:
        """Writes down that a dispatcher begins; returns the run's number."""
        with self.transaction():
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'inode'", (str(self.path.stat().st_ino),))
            cursor = self._db.execute(
                "INSERT INTO runs (pid, boot, started_at, started_mono) VALUES (?,?,?,?)",
                (os.getpid(), boot_id(), now, mono),
            )
        return int(cursor.lastrowid or 0)

    def end_run(self, run: int, now: float) -> None:
        """Writes down that the dispatcher has ended in order."""
        with self.transaction():
            self._db.execute("UPDATE runs SET ended_at = ? WHERE id = ?", (now, run))

    def last_attempt(self) -> int:
        """The highest attempt number used so far, 0 for none."""
        return int(self._db.execute("SELECT coalesce(max(id), 0) FROM attempts").fetchone()[0])

    def record_start(self, attempt: AttemptRecord, run: int, *, wait_s: float, leased_mono: float | None) -> None:
        """One start: see ``record_starts``."""
        self.record_starts([StartRecord(attempt, wait_s, leased_mono)], run)

    def record_starts(self, starts: Sequence[StartRecord], run: int) -> None:
        """Waiting jobs run. To be called when their processes are there and before they get their go-ahead."""
        with self.transaction():
            for start in starts:
                self._record_start(start, run)

    def _record_start(self, start: StartRecord, run: int) -> None:
        attempt, process = start.attempt, start.attempt.process
        self._change(
            "UPDATE jobs SET state = 'running', attempts = ?, reason = NULL"
            " WHERE id = ? AND state = 'waiting' AND blocked = 0 AND held = 0",
            (attempt.number, attempt.queued.id),
        )
        self._db.execute(
            "INSERT INTO attempts (id, job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
            " leased_mono, started_at, started_mono, shared_mb) VALUES (?,?,?,?,'running',?,?,?,?,?,?,?,?,?,?,?)",
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
                start.wait_s,
                start.leased_mono,
                attempt.started_at,
                attempt.started_mono,
                attempt.shared_mb,
            ),
        )

    def record_end(self, end: AttemptEnd) -> tuple[str, ...]:
        """One end: see ``record_ends``."""
        return self.record_ends([end])[0]

    def record_ends(self, ends: Sequence[AttemptEnd]) -> tuple[tuple[str, ...], ...]:
        """Running attempts have ended, and their jobs are done, failed or cancelled for good, or wait again.

        Returns for each the names of jobs that can't run any more because they need this one; they are cancelled.
        """
        with self.transaction():
            return tuple(self._record_end(end) for end in ends)

    def _record_end(self, end: AttemptEnd) -> tuple[str, ...]:
        self._change(
            "UPDATE attempts SET state = ?, ended_at = ?, ended_mono = ?, exit_code = ?, signal = ?, class = ?,"
            " reason = ?, peak_mb = ?, paused_s = ?, paused = '', paused_mono = NULL"
            " WHERE id = ? AND state = 'running'",
            (
                end.state,
                end.ended_at,
                end.ended_mono,
                end.exit_code,
                end.signal,
                end.failure_class,
                end.reason,
                end.peak_mb,
                end.paused_s,
                end.attempt,
            ),
        )
        job = int(self._db.execute("SELECT job FROM attempts WHERE id = ?", (end.attempt,)).fetchone()[0])
        costs = end.state is AttemptState.FAILED and end.costs_try
        self._change(
            "UPDATE jobs SET state = ?, reason = ?, tries = tries + ?, not_before = ?, avoid = ?, ready_at = ?,"
            " cancelled_by = NULL WHERE id = ? AND state = 'running'",
            (
                end.job_state,
                end.reason,
                int(costs),
                end.not_before,
                json.dumps(sorted(end.avoid)) if end.avoid else "[]",
                max(end.ended_at, end.not_before),
                job,
            ),
        )
        if end.adapted is not None:
            self._db.execute(
                "UPDATE jobs SET gpus = ?, memory_mb = ?, share = ? WHERE id = ?",
                (end.adapted.gpus, end.adapted.memory_mb, end.adapted.share, job),
            )
        if end.job_state is JobState.DONE:
            self._unblock(job)
        fate = _FATE.get(end.job_state)
        return () if fate is None else interventions.doom(self._db, job, fate)

    def fail_waiting(self, job: int, reason: str) -> tuple[str, ...]:
        """A waiting job is given up without having run. Returns the names of jobs cancelled with it."""
        with self.transaction():
            self._change(
                "UPDATE jobs SET state = 'failed', reason = ? WHERE id = ? AND state = 'waiting'",
                (reason, job),
            )
            return interventions.doom(self._db, job, "failed")

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

    # --- what people ask ---------------------------------------------------------------------------------------

    def post(self, letter: Letter) -> int:
        """Writes down what somebody asks; returns its number. Any process may, at any time."""
        with self.transaction():
            return mailbox.post(self._db, letter)

    def letters(self) -> tuple[Letter, ...]:
        """What is asked and not yet done, oldest first."""
        return mailbox.open_letters(self._db)

    def answer(self, letter: int, reply: Reply, now: float) -> None:
        """What was asked is done; to be called in the same transaction."""
        with self.transaction():
            mailbox.answer(self._db, letter, reply, now)

    def reply_to(self, letter: int) -> Reply | None:
        """What came of it, None while it is not done."""
        return mailbox.reply_to(self._db, letter)

    def unknown(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the names that no job has."""
        return tuple(
            name for name in names if not self._db.execute("SELECT 1 FROM jobs WHERE name = ?", (name,)).fetchone()
        )

    def names(self, limit: int) -> tuple[str, ...]:
        """The names of the newest ``limit`` jobs."""
        return tuple(row[0] for row in self._db.execute("SELECT name FROM jobs ORDER BY id DESC LIMIT ?", (limit,)))

    def cancel(self, names: Sequence[str], by: str) -> Changed:
        """Ends jobs for good: waiting ones at once; running ones are marked (``QueuedJob.cancelled_by``).

        Here and below ``names`` are jobs that are there; () means all that it can be done to.
        """
        with self.transaction():
            return interventions.cancel(self._db, self._rows(names, ("waiting", "running")), by)

    def retry(self, names: Sequence[str], now: float) -> Changed:
        """Failed and cancelled jobs wait again, with fresh tries, and so do those cancelled because of them."""
        with self.transaction():
            return interventions.retry(self._db, self._rows(names, ("failed", "cancelled")), now)

    def pause(self, names: Sequence[str], by: str, mono: float) -> Changed:
        """Holds waiting jobs; running ones are marked (``AttemptRecord.paused``)."""
        with self.transaction():
            return interventions.pause(self._db, self._rows(names, ("waiting", "running")), by, mono)

    def resume(self, names: Sequence[str], mono: float, now: float) -> Changed:
        """Takes ``pause`` back."""
        with self.transaction():
            found = self._rows(names, ("waiting", "running"))
            if not names:
                found = [row for row in found if row["held"] or row["state"] == JobState.RUNNING]
            changed = interventions.resume(self._db, found, mono, now)
            return changed if names else Changed(changed.jobs)

    def set_priority(self, names: Sequence[str], priority: int) -> Changed:
        """Gives jobs another place in the line."""
        with self.transaction():
            return interventions.set_priority(self._db, self._rows(names, ("waiting", "running")), priority)

    def mark_paused(self, attempt: int, why: PauseReason, mono: float) -> bool:
        """Writes down that a running attempt is stopped for this reason too; False when it was already."""
        with self.transaction():
            return interventions.mark_paused(self._db, attempt, why, mono)

    def mark_resumed(self, attempt: int, why: PauseReason, mono: float) -> bool:
        """Writes down that this reason is over; False when it was none."""
        with self.transaction():
            return interventions.mark_resumed(self._db, attempt, why, mono)

    def _rows(self, names: Sequence[str], states: tuple[str, ...]) -> list[sqlite3.Row]:
        if not names:
            return self._db.execute(
                f"SELECT * FROM jobs WHERE submission = ? AND state IN ({','.join('?' * len(states))}) ORDER BY id",  # noqa: S608
                (self._submission(), *states),
            ).fetchall()
        found = (self._db.execute("SELECT * FROM jobs WHERE name = ?", (name,)).fetchone() for name in names)
        return [row for row in found if row is not None]

    # --- what is learned --------------------------------------------------------------------------------------

    def families(self) -> dict[str, int]:
        """The most memory that a job of each family was seen to use on one GPU, in MB."""
        return {row["name"]: row["peak_mb"] for row in self._db.execute("SELECT name, peak_mb FROM families")}

    def learn(self, family: str, peak_mb: int) -> None:
        """A job of this family was seen to use so much on one GPU."""
        with self.transaction():
            known = self._db.execute("SELECT peak_mb FROM families WHERE name = ?", (family,)).fetchone()
            peak = max(peak_mb, 0 if known is None else known["peak_mb"])
            self._db.execute("INSERT OR REPLACE INTO families VALUES (?, ?)", (family, peak))

    def gpu_health(self) -> dict[str, str]:
        """What is remembered of each GPU's faults, as JSON by UUID (``jobs.quarantine``)."""
        return {row["uuid"]: row["state"] for row in self._db.execute("SELECT uuid, state FROM gpu_health")}

    def save_gpu_health(self, states: Mapping[str, str]) -> None:
        """Replaces what is remembered of these GPUs."""
        with self.transaction():
            self._db.executemany("INSERT OR REPLACE INTO gpu_health VALUES (?, ?)", states.items())

    # --- plumbing ---------------------------------------------------------------------------------------------

    def _submission(self) -> int:
        return int(self._meta("submission"))

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        if self._db.execute(statement, values).rowcount != 1:
            raise ImpossibleTransition(f"refused: {statement} with {values}")

    def _meta(self, key: str) -> str:
        return str(self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])
