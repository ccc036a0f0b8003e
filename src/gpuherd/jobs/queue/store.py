"""The durable queue: every job, every attempt, and every change of state as one transaction.

The database is the only truth about progress. The dispatcher's memory can be rebuilt from here after a kill at any
instant. Each method that changes something is one transaction (or part of the one that ``transaction``
opened) and refuses a transition that can't be (``ImpossibleTransition``). Any process may read a queue, add jobs and
post controls; only who holds its ``DispatcherLock`` starts, ends and changes jobs. What to run next is decided
elsewhere. How the file is opened, and all queries, are in ``connection``, changes that users request
in ``interventions``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from itertools import takewhile

from gpuherd.engines.process_tree import ProcessId, boot_id
from gpuherd.engines.registry import LOCAL
from gpuherd.jobs.completion import Settlement
from gpuherd.jobs.job import JobState, job_of
from gpuherd.jobs.lock import machine_name
from gpuherd.jobs.queue.interventions import COUNT_BLOCKED, FATE, Interventions
from gpuherd.jobs.queue.schema import DISPATCHER_WAITS_MS
from gpuherd.jobs.records import AttemptState, Begun, QueuedJob, StartRecord
from gpuherd.jobs.scheduler.memory import FamilyMemory, learned

# Process columns of an attempt that was handed over.
_NO_PROCESS = ProcessId(0, 0, "")


class ImpossibleTransition(RuntimeError):
    """An invalid change of state: a defect in gpuherd. The transaction was rolled back."""


class Overtaken(RuntimeError):
    """A job was changed since it was read, because one of the same name was added: it must be read again. The
    transaction was rolled back."""


class Queue(Interventions):
    """The jobs of one run folder, in one SQLite file: ``QueueFile`` opens it and has the queries, ``Interventions`` the
    changes that users request; here are those of a dispatcher."""

    # --- transitions ------------------------------------------------------------------------------------------

    def begin_run(self, now: float, mono: float, engine: str = LOCAL) -> int:
        """Records that a dispatcher for this engine begins; returns the run's number.

        Jobs in an engine's hands outlive this machine: from then on no power cut may undo a commit.
        """
        if engine != LOCAL:
            self._db.execute("PRAGMA synchronous = FULL")
        # While a dispatcher waits for a lock it handles no ends and no requests: it had better try again.
        self._db.execute(f"PRAGMA busy_timeout = {DISPATCHER_WAITS_MS}")
        self._hold.keep()
        with self.transaction():
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'inode'", (str(self.path.stat().st_ino),))
            cursor = self._db.execute(
                "INSERT INTO runs (pid, boot, started_at, started_mono, host, engine) VALUES (?,?,?,?,?,?)",
                (os.getpid(), boot_id(), now, mono, machine_name(), engine),
            )
        return int(cursor.lastrowid or 0)

    def end_run(self, run: int, now: float) -> None:
        """Records that the dispatcher has ended in order."""
        with self.transaction():
            self._db.execute("UPDATE runs SET ended_at = ? WHERE id = ?", (now, run))

    def record_starts(self, starts: Sequence[StartRecord], run: int) -> None:
        """Waiting jobs run, or are handed over. To be called when their processes are there and before they get their
        go-ahead; and before an engine gets them.

        Raises Overtaken when one of them is not any more what is about to be started.
        """
        with self.transaction():
            for start in starts:
                self._record_start(start, run)

    def _record_start(self, start: StartRecord, run: int) -> None:
        attempt, handed = start.attempt, start.attempt.handed
        process = attempt.process or _NO_PROCESS
        self._check_is_as_read(attempt.queued, None if handed is None else handed.engine)
        self._change(
            "UPDATE jobs SET state = 'running', attempts = ?, reason = NULL"
            " WHERE id = ? AND state = 'waiting' AND held = 0",
            (attempt.number, attempt.queued.id),
        )
        self._db.execute(
            "INSERT INTO attempts (id, job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
            " leased_mono, started_at, started_mono, shared_mb, engine, batch, place, handle, node)"
            " VALUES (?,?,?,?,'running',?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
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
                *((LOCAL, None, None, None, None) if handed is None else astuple(handed)),
            ),
        )

    def withdraw(self, attempts: Collection[int]) -> None:
        """An engine has refused these attempts: their jobs wait again, as if none of them had been recorded."""
        with self.transaction():
            for attempt in attempts:
                row = self._db.execute("SELECT job FROM attempts WHERE id = ?", (attempt,)).fetchone()
                self._change("DELETE FROM attempts WHERE id = ? AND state = 'running'", (attempt,))
                self._change(
                    "UPDATE jobs SET state = 'waiting', attempts = attempts - 1 WHERE id = ? AND state = 'running'",
                    (row["job"],),
                )
                self._db.execute(f"{COUNT_BLOCKED} WHERE id = ?", (row["job"],))

    def record_handles(self, handles: Mapping[int, str]) -> None:
        """The engine's own words for attempts that it has taken, by attempt."""
        with self.transaction():
            for attempt, handle in handles.items():
                self._change("UPDATE attempts SET handle = ? WHERE id = ? AND state = 'running'", (handle, attempt))

    def record_begun(self, begun: Sequence[Begun]) -> None:
        """Attempts that were handed over have begun on their nodes: from then on their time counts."""
        with self.transaction():
            for each in begun:
                self._change(
                    "UPDATE attempts SET node = ?, gpus = ?, labels = ?, wait_s = wait_s + max(0, ? - started_at),"
                    " started_at = ?, started_mono = ? WHERE id = ? AND state = 'running'",
                    (
                        each.node,
                        json.dumps(each.gpus),
                        json.dumps(each.labels),
                        each.at,
                        each.at,
                        each.mono,
                        each.attempt,
                    ),
                )

    def _check_is_as_read(self, queued: QueuedJob, engine: str | None) -> None:
        """The one change that another process may make meanwhile is to add the job again.

        ``engine``: what it is handed to; that may know of all that it needs, and keep the order itself.
        """
        row = self._db.execute("SELECT spec, state, blocked FROM jobs WHERE id = ?", (queued.id,)).fetchone()
        if row is None or row["state"] != JobState.WAITING:
            return
        blocked = row["blocked"] and (engine is None or not self._follows(queued.id, engine))
        if blocked or job_of(row["spec"]) != queued.job:
            raise Overtaken(f"{queued.job.name} was changed while it was about to be started")

    def record_ends(self, ends: Sequence[Settlement]) -> tuple[tuple[str, ...], ...]:
        """Running attempts have ended, and their jobs are done, failed or cancelled for good, or wait again.

        Returns for each the names of jobs that can't run any more because they need this one; they are cancelled.
        """
        with self.transaction():
            cascaded = tuple(self._record_end(end) for end in ends)
            self._note_round(max((end.known.at for end in ends), default=0.0))
            return cascaded

    def _record_end(self, end: Settlement) -> tuple[str, ...]:
        known, not_before = end.known, 0.0 if end.again is None else end.again.not_before
        self._change(
            "UPDATE attempts SET state = ?, ended_at = ?, ended_mono = ?, exit_code = ?, signal = ?, class = ?,"
            " reason = ?, peak_mb = ?, paused_s = ?, paused = '', paused_mono = NULL"
            " WHERE id = ? AND state = 'running'",
            (
                end.attempt,
                known.at,
                known.mono,
                known.exit.code,
                known.exit.signal,
                None if end.diagnosis is None else end.diagnosis.failure,
                end.reason,
                known.observed.peak_mb,
                known.paused_s,
                known.record.id,
            ),
        )
        job = int(self._db.execute("SELECT job FROM attempts WHERE id = ?", (known.record.id,)).fetchone()[0])
        self._change(
            "UPDATE jobs SET state = ?, reason = ?, tries = tries + ?, not_before = ?, avoid = ?, ready_at = ?,"
            " cancelled_by = NULL WHERE id = ? AND state = 'running'",
            (
                end.job,
                end.reason,
                int(end.costs_try),
                not_before,
                json.dumps(sorted(end.avoid)) if end.avoid else "[]",
                max(known.at, not_before),
                job,
            ),
        )
        if end.job is JobState.WAITING:
            # One that was handed over may have gone before what it needs had succeeded; now it may not.
            self._db.execute(f"{COUNT_BLOCKED} WHERE id = ?", (job,))
        if (adapted := end.adapted) is not None:
            self._db.execute(
                "UPDATE jobs SET gpus = ?, memory_mb = ?, share = ? WHERE id = ?",
                (adapted.gpus, adapted.memory_mb, adapted.share, job),
            )
        if end.job is JobState.DONE:
            self._unblock(job, known.at)
        fate = FATE.get(end.job)
        return () if fate is None else self._cascade(job, fate)

    def ends_in_a_row(self, job: int, reason: str) -> int:
        """How many of the job's latest attempts that have ended were requeued for this reason; other requeues among
        them don't count, and a failure ends the row."""
        rows = self._db.execute(
            "SELECT state, reason FROM attempts WHERE job = ? AND state <> 'running' ORDER BY id DESC LIMIT 100", (job,)
        )
        requeued = takewhile(lambda row: row["state"] == AttemptState.REQUEUED, rows.fetchall())
        return sum(row["reason"] == reason for row in requeued)

    def cascade_failures(self) -> tuple[tuple[str, JobState, tuple[str, ...]], ...]:
        """Cancels the waiting jobs that need one which has failed or was cancelled, also by way of others that were
        cancelled for that. Returns for each of the first its name, how it ended, and the names of the jobs cancelled.
        """
        with self.transaction():
            cascaded = []
            # Before those that were cancelled for need of another stands that other.
            ended_badly = self._db.execute(
                "WITH RECURSIVE bad (id) AS (SELECT n.id FROM needs JOIN jobs n ON n.id = needs.needed"
                " JOIN jobs j ON j.id = needs.job WHERE j.state = 'waiting' AND n.state IN ('failed', 'cancelled')"
                " UNION SELECT n.id FROM bad JOIN jobs b ON b.id = bad.id AND b.doomed = 1"
                " JOIN needs ON needs.job = b.id JOIN jobs n ON n.id = needs.needed"
                " WHERE n.state IN ('failed', 'cancelled'))"
                " SELECT id, name, state FROM jobs WHERE id IN (SELECT id FROM bad) ORDER BY doomed, id"
            ).fetchall()
            for row in ended_badly:
                state = JobState(row["state"])
                names = self._cascade(row["id"], FATE[state])
                if names:
                    cascaded.append((row["name"], state, names))
            return tuple(cascaded)

    def fail_waiting(self, job: int, reason: str) -> tuple[str, ...]:
        """A waiting job is given up without having run. Returns the names of jobs cancelled with it."""
        with self.transaction():
            self._change(
                "UPDATE jobs SET state = 'failed', reason = ? WHERE id = ? AND state = 'waiting'",
                (reason, job),
            )
            cascaded = self._cascade(job, "failed")
            self._note_round(time.time())
            return cascaded

    def postpone(self, reasons: Mapping[int, str], not_before: float) -> None:
        """These waiting jobs are not started before this wall-clock second, each for its reason."""
        with self.transaction():
            self._db.executemany(
                "UPDATE jobs SET reason = ?, not_before = ?, ready_at = ? WHERE id = ? AND state = 'waiting'",
                [(reason, not_before, not_before, job) for job, reason in reasons.items()],
            )

    def note(self, at: float, kind: str, text: str, job: str | None = None, attempt: int | None = None) -> None:
        """Adds a row to the queue's table of events."""
        self._db.execute(
            "INSERT INTO events (at, kind, job, attempt, text) VALUES (?,?,?,?,?)", (at, kind, job, attempt, text)
        )

    def _unblock(self, job: int, now: float) -> None:
        """A job has succeeded: those that need it need one less."""
        # Jobs that need no other could run from now on: the time before was no wait for a GPU.
        self._db.execute(
            "UPDATE jobs SET blocked = blocked - 1,"
            " ready_at = CASE WHEN blocked = 1 THEN max(ready_at, ?) ELSE ready_at END"
            " WHERE state = 'waiting' AND blocked > 0 AND id IN (SELECT job FROM needs WHERE needed = ?)",
            (now, job),
        )
        # Those that follow it in an engine begin to wait for a place, and for nothing else, when it was the last. The
        # time before counts for no wait, also where it was heard first that one has begun and only then what it
        # followed.
        running = "state = 'running' AND blocked > 0 AND id IN (SELECT job FROM needs WHERE needed = ?)"
        freed = f"state = 'running' AND job IN (SELECT id FROM jobs WHERE blocked = 1 AND {running})"  # noqa: S608
        self._db.execute(
            "UPDATE attempts SET started_mono = started_mono + max(0, ? - started_at), started_at = max(?, started_at)"  # noqa: S608
            f" WHERE node IS NULL AND {freed}",
            (now, now, job),
        )
        self._db.execute(
            f"UPDATE attempts SET wait_s = min(wait_s, max(0, started_at - ?)) WHERE node IS NOT NULL AND {freed}",  # noqa: S608
            (now, job),
        )
        self._db.execute(f"UPDATE jobs SET blocked = blocked - 1 WHERE {running}", (job,))  # noqa: S608

    # --- measurements -----------------------------------------------------------------------------------------

    def learn(self, family: str, peak_mb: int | None, *, well: bool = False, ran_out_mb: int | None = None) -> None:
        """A job of this family has ended: updates the family's measurements (``memory.learned``)."""
        with self.transaction():
            known = learned(self.families([family]).get(family), peak_mb=peak_mb, well=well, ran_out_mb=ran_out_mb)
            if known != FamilyMemory():
                # The column forbids NULL: 0 is an unknown peak.
                self._db.execute("INSERT OR REPLACE INTO families VALUES (?,?)", (family, known.peak_mb or 0))
                self._db.execute(
                    "INSERT OR REPLACE INTO family_ends VALUES (?,?,?)", (family, known.measured, known.ran_out_mb)
                )

    def save_gpu_health(self, states: Mapping[str, str]) -> None:
        """Replaces the stored health of these GPUs."""
        with self.transaction():
            self._db.executemany("INSERT OR REPLACE INTO gpu_health VALUES (?, ?)", states.items())

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        if self._db.execute(statement, values).rowcount != 1:
            raise ImpossibleTransition(f"refused: {statement} with {values}")
