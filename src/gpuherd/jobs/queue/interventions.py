"""Changes that users request, from any process: jobs are submitted and added, cancelled, retried, paused and resumed.

Each change is one transaction. Running jobs are only marked (``cancelled_by``, ``attempts.paused``). The dispatcher of
their processes then acts on the marks, and its successor does so again after a kill: the marks are the truth.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError, clean
from gpuherd.jobs.control.messages import Request, Response
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.job import Job, JobState, check_needs, job_of, spec_of
from gpuherd.jobs.queue.connection import QueueFile
from gpuherd.jobs.queue.reader import pause_reasons
from gpuherd.jobs.records import PauseReason
from gpuherd.jobs.scheduler.ordering import rank

# More need not be named: jobs of a remark, circles of needs.
_MOST_NAMES = 8
_MOST_CIRCULAR = 10
ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED)
FATE = {JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled"}
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
            counts = "; ".join(f"{how} stay {_some(names)}" for how, names in self.kept.items())
            found.append(f"the last run was cut off and is continued: {counts} (see gpuherd retry, gpuherd resume)")
        if self.revived:
            many = len(self.revived)
            how = "1 job that had failed or was cancelled waits"
            if many > 1:
                how = f"{many} jobs that had failed or were cancelled wait"
            found.append(f"{how} again, with fresh tries: {_some(self.revived)}")
        return tuple(found)


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


# What a job forgets that waits again with fresh tries.
_CHANGED = "spec = ?, gpus = ?, memory_mb = ?, share = ?, cost = ?, round = ?, priority = ?, rank = ?, submission = ?"
_FRESH = ", tries = 0, not_before = 0, avoid = '[]', reason = NULL, held = 0, doomed = 0, cancelled_by = NULL"


class Interventions(QueueFile):
    """A queue with the changes that users request; ``Queue`` adds those of a dispatcher."""

    # --- submitting -------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job], rerun: Collection[str] = ()) -> SubmissionChanges:
        """Makes the queue hold exactly these jobs as work to do, going on from what is there by name.

        A job that is new waits. One that succeeded with the same command stays done while its ``result`` is there, and
        waits again when it is gone, when the command has changed, or when ``rerun`` names it. One that failed or was
        cancelled waits again. A running one goes on. All have fresh tries. Jobs of earlier submissions that still wait
        and are not named any more are cancelled. Of a running one whose ``result`` is another path now, as in a folder
        that was moved, a further try is that of the new job: what runs leaves no result there.

        Where the last run never ended, as after a kill, or an engine still has jobs of it, it is continued: a job of it
        that is the same stays failed, cancelled or paused, and its tries go on being counted.

        Raises UsageError for a name given twice and for ``needs`` that name no job, a later round, or go in a circle;
        nothing is changed then.
        """
        check_needs(jobs)
        with self.transaction():
            before = self._submission()
            latest, continued = before + 1, before if self._is_cut_off() else None
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'submission'", (str(latest),))
            found = self._enter(jobs, set(rerun), latest, continued)
            if continued is not None:
                self._cascade_lost(jobs)
            self._db.execute(
                "UPDATE jobs SET state = 'cancelled', held = 0, reason = 'no longer in the list'"
                " WHERE submission < ? AND state = 'waiting'",
                (latest,),
            )
            self._note_round(time.time())
            return found

    def add(self, jobs: Sequence[Job], rerun: Collection[str] = ()) -> None:
        """Adds jobs to those of the queue, also while a dispatcher works it off (then ``poke``).

        By the rules of ``submit``, but nothing else is cancelled, and ``needs`` may name jobs that are in the queue. A
        job that needs one which has failed or was cancelled is cancelled at once, with the reason. Raises UsageError as
        ``submit`` does; nothing is changed then.
        """
        with self.transaction():
            self._check_added(jobs)
            self._enter(jobs, set(rerun), self._submission())
            self._check_circles(jobs)
            self._cascade_lost(jobs)
            self._note_round(time.time())

    def _cascade_lost(self, jobs: Sequence[Job]) -> None:
        """Cancels those of the jobs, which are in the queue by now, that wait and need what they can't get any more."""
        for job in jobs:
            lost = self._db.execute(
                "SELECT n.id, n.state FROM jobs j CROSS JOIN needs ON needs.job = j.id"
                " CROSS JOIN jobs n ON n.id = needs.needed"
                " WHERE j.name = ? AND j.state = 'waiting' AND n.state IN ('failed', 'cancelled')",
                (job.name,),
            )
            for row in lost.fetchall() if job.needs else ():
                self._cascade(row["id"], FATE[JobState(row["state"])])

    def _is_cut_off(self) -> bool:
        """Whether the last run did not end: it was killed, or left jobs in an engine."""
        cut_off = self._value(int, "SELECT ended_at IS NULL FROM runs ORDER BY id DESC LIMIT 1")
        if cut_off is None:
            return False
        left = self._value(int, "SELECT 1 FROM attempts WHERE state = 'running' LIMIT 1")
        return bool(cut_off) or left is not None

    def _enter(
        self, jobs: Sequence[Job], again: Collection[str], submission: int, continued: int | None = None
    ) -> SubmissionChanges:
        """Puts the jobs into the table, or changes what is there of the same name, and links their needs.

        Args:
            again: names of jobs that are to run once more though they are done.
            continued: the submission that never ended and is continued: what was decided of its jobs stays so, unless
                the job itself is another now.

        Raises UsageError for needs that can't be met; the caller then takes the transaction back.
        """
        now = time.time()
        known = self._known(jobs)
        fresh = (job for job in jobs if job.name not in known)
        self._db.executemany(_INSERT, (_row(_anchored(job), submission, now) for job in fresh))
        revived: list[str] = []
        kept: dict[str, list[str]] = {}
        for job in jobs:
            row = known.get(job.name)
            if row is None:
                continue
            anchored, repeated = _anchored(job), job.name in again
            if row["submission"] == continued and not repeated and _stands(row, anchored):
                self._leave(row, submission)
                if row["held"] or row["state"] in ENDED_BADLY:
                    kept.setdefault("paused" if row["held"] else row["state"], []).append(job.name)
                continue
            if row["state"] in ENDED_BADLY and not row["doomed"]:
                revived.append(job.name)
            self._go_on(anchored, row, repeated, submission, now)
        self._link_needs(jobs, bool(known))
        self._check_rounds()
        return SubmissionChanges(tuple(revived), {how: tuple(names) for how, names in kept.items()})

    def _check_added(self, jobs: Sequence[Job]) -> None:
        """Checks names and needs of jobs that are added to those of the queue. Raises UsageError."""
        needed = {need for job in jobs for need in job.needs}
        rows = (self._db.execute("SELECT name, round FROM jobs WHERE name = ?", (need,)).fetchone() for need in needed)
        known = {row["name"]: row["round"] for row in rows if row is not None}
        if needed - known.keys() - {job.name for job in jobs}:
            # One is missing: so that the nearest can be named.
            newest = self._db.execute("SELECT name, round FROM jobs ORDER BY id DESC LIMIT 1000")
            known |= {row["name"]: row["round"] for row in newest}
        check_needs(jobs, known)

    def _check_circles(self, jobs: Iterable[Job]) -> None:
        """Raises UsageError when any of these jobs, linked by now, needs itself by way of others in the queue."""
        circular = [
            job.name
            for job in jobs
            if job.needs
            and self._db.execute(
                "WITH RECURSIVE needed (id) AS"
                " (SELECT n.needed FROM needs n JOIN jobs j ON j.id = n.job WHERE j.name = ?"
                " UNION SELECT n.needed FROM needs n JOIN needed ON n.job = needed.id)"
                " SELECT 1 FROM needed JOIN jobs j ON j.id = needed.id WHERE j.name = ?",
                (job.name, job.name),
            ).fetchone()
        ]
        if circular:
            cycles = [f"job {name!r} would need itself, by way of jobs that are in the queue" for name in circular]
            raise UsageError("; ".join(cycles[:_MOST_CIRCULAR]))

    def _known(self, jobs: Sequence[Job]) -> Mapping[str, sqlite3.Row]:
        if self._value(int, "SELECT 1 FROM jobs LIMIT 1") is None:
            return {}
        columns = "id, name, spec, state, submission, held, doomed"
        rows = (self._db.execute(f"SELECT {columns} FROM jobs WHERE name = ?", (job.name,)).fetchone() for job in jobs)  # noqa: S608
        return {row["name"]: row for row in rows if row is not None}

    def _leave(self, row: sqlite3.Row, submission: int) -> None:
        self._db.execute("UPDATE jobs SET submission = ? WHERE id = ?", (submission, row["id"]))
        if row["state"] == JobState.RUNNING:
            # Killed together with its dispatcher time and again, it must not fail for that. What an engine has is not.
            retries = job_of(row["spec"]).retries
            self._db.execute(
                "UPDATE jobs SET tries = max(0, min(tries, ?)) WHERE id = ?"
                " AND EXISTS (SELECT 1 FROM attempts WHERE job = jobs.id AND state = 'running' AND engine = ?)",
                (retries - 1, row["id"], LOCAL),
            )

    def _go_on(self, job: Job, known: sqlite3.Row, again: bool, submission: int, now: float) -> None:
        if known["state"] == JobState.RUNNING:
            # Fresh tries for it too: killed together with its dispatcher time and again, it must not fail for that.
            self._db.execute("UPDATE jobs SET submission = ?, tries = 0 WHERE id = ?", (submission, known["id"]))
            if job_of(known["spec"]).result != job.result:
                changed = (*_row(job, submission, now)[1:-1], known["id"])
                self._db.execute(f"UPDATE jobs SET {_CHANGED} WHERE id = ?", changed)  # noqa: S608
            return
        stays = known["state"] == JobState.DONE and not again and _same_work(job_of(known["spec"]), job)
        stays = stays and (job.result is None or Path(job.result).exists())
        state = JobState.DONE if stays else JobState.WAITING
        fresh = "" if stays else _FRESH
        ready = "" if stays or known["state"] == JobState.WAITING else f", ready_at = {now!r}"
        self._db.execute(
            f"UPDATE jobs SET {_CHANGED}, state = ?{fresh}{ready} WHERE id = ?",  # noqa: S608
            (*_row(job, submission, now)[1:-1], state, known["id"]),
        )

    def _link_needs(self, jobs: Sequence[Job], some_known: bool) -> None:
        """Records what those of the jobs need that wait; new ones that need nothing have nothing to record."""
        linked = [job for job in jobs if job.needs or some_known]
        names = [(job.name,) for job in linked]
        self._db.executemany(
            "DELETE FROM needs WHERE job = (SELECT id FROM jobs WHERE name = ? AND state = 'waiting')", names
        )
        self._db.executemany(
            "INSERT OR IGNORE INTO needs SELECT j.id, n.id FROM jobs j JOIN jobs n ON n.name = ?"
            " WHERE j.name = ? AND j.state = 'waiting'",
            ((need, job.name) for job in linked for need in job.needs),
        )
        self._db.executemany(f"{COUNT_BLOCKED} WHERE name = ? AND state = 'waiting'", names)

    def _check_rounds(self) -> None:
        """A job that needs one of a later round could never run: its own round would never end."""
        found = self._db.execute(
            "SELECT a.name, a.round, b.name AS needed, b.round AS later FROM needs"
            " JOIN jobs a ON a.id = needs.job JOIN jobs b ON b.id = needs.needed"
            " WHERE a.state = 'waiting' AND b.state <> 'done' AND b.round > a.round LIMIT 1"
        ).fetchone()
        if found is not None:
            raise UsageError(
                f"job {found['name']!r} of round {found['round']} needs {found['needed']!r}, which is of the later"
                f" round {found['later']}"
            )

    # --- cancel, retry, pause, resume, priority ---------------------------------------------------------------
    #
    # ``names`` are jobs that are there; () means all that it can be done to.

    def cancel(self, names: Sequence[str], by: str) -> Changed:
        """Ends jobs for good: waiting ones at once, with all that need them; running ones are marked
        (``QueuedJob.cancelled_by``)."""
        changed: list[str] = []
        along: list[str] = []
        refused: list[str] = []
        with self.transaction():
            for row in self._rows(names, ("waiting", "running")):
                # Cancelled by now, perhaps, with one that it needs.
                state = self._value(JobState, "SELECT state FROM jobs WHERE id = ?", (row["id"],))
                if state is JobState.WAITING:
                    self._db.execute(
                        "UPDATE jobs SET state = 'cancelled', held = 0, cancelled_by = ?, reason = ? WHERE id = ?",
                        (by, f"cancelled by {by}", row["id"]),
                    )
                    along += self._cascade(row["id"], "was cancelled")
                elif state is JobState.RUNNING:
                    self._db.execute("UPDATE jobs SET cancelled_by = ? WHERE id = ?", (by, row["id"]))
                else:
                    if row["name"] not in along:
                        refused.append(f"{row['name']} is {state} already")
                    continue
                changed.append(row["name"])
            self._note_round(time.time())
        return Changed(tuple(changed), tuple(along), tuple(refused))

    def retry(self, names: Sequence[str], now: float) -> Changed:
        """Failed and cancelled jobs wait again with fresh tries, and so do those cancelled because of them."""
        with self.transaction():
            rows = self._rows(names, ENDED_BADLY)
            wanted = {row["id"]: row["name"] for row in rows if row["state"] in ENDED_BADLY}
            refused = [
                f"{row['name']} is {row['state']}; only failed and cancelled jobs can be tried again"
                for row in rows
                if row["id"] not in wanted
            ]
            stuck = self._stuck(wanted)
            refused += [
                f"{wanted[job]} needs {need}, which is {state}: retry that one too"
                for job, (need, state) in stuck.items()
            ]
            wanted = {job: name for job, name in wanted.items() if job not in stuck}
            along = self._cascaded_from(wanted)
            for job in wanted | along:
                spec = job_of(self._db.execute("SELECT spec FROM jobs WHERE id = ?", (job,)).fetchone()[0])
                self._db.execute(
                    f"UPDATE jobs SET state = 'waiting'{_FRESH}, gpus = ?, memory_mb = ?, share = ?, ready_at = ?,"  # noqa: S608
                    " submission = (SELECT value FROM meta WHERE key = 'submission') WHERE id = ?",
                    (spec.gpus, spec.memory_mb, spec.share, now, job),
                )
            self._db.executemany(f"{COUNT_BLOCKED} WHERE id = ?", ((job,) for job in wanted | along))
            self._note_round(now)
        return Changed(tuple(wanted.values()), tuple(along.values()), tuple(refused))

    def pause(self, names: Sequence[str], by: str, mono: float) -> Changed:
        """Holds waiting jobs and marks running ones (``AttemptRecord.paused``). Jobs in the hands of an engine can't be
        paused."""
        changed, refused = [], []
        with self.transaction():
            for row in self._rows(names, ("waiting", "running")):
                attempt = self._open_attempt(row)
                if attempt is not None and attempt["engine"] != LOCAL:
                    engine = engine_name(attempt["engine"])
                    refused.append(f"{row['name']} is in the hands of {engine} and goes on there")
                elif attempt is not None:
                    self.mark_paused(attempt["id"], PauseReason.USER, mono)
                    changed.append(row["name"])
                elif row["state"] == JobState.WAITING:
                    reason = f"paused by {by}"
                    self._db.execute("UPDATE jobs SET held = 1, reason = ? WHERE id = ?", (reason, row["id"]))
                    changed.append(row["name"])
                else:
                    refused.append(f"{row['name']} is {row['state']}; only what waits or runs can be paused")
        # A request for all jobs means all that can be paused.
        if names:
            return Changed(tuple(changed), refused=tuple(refused))
        return Changed(tuple(changed), remarks=tuple(refused))

    def resume(self, names: Sequence[str], mono: float, now: float) -> Changed:
        """Undoes ``pause``."""
        changed, refused = [], []
        with self.transaction():
            for row in self._rows(names, ("waiting", "running")):
                attempt = self._open_attempt(row)
                if row["held"]:
                    update = "UPDATE jobs SET held = 0, reason = NULL, ready_at = ? WHERE id = ?"
                    self._db.execute(update, (now, row["id"]))
                elif attempt is None or not self._resume_attempt(attempt["id"], mono):
                    refused.append(f"{row['name']} is not paused")
                    continue
                changed.append(row["name"])
        return Changed(tuple(changed), refused=tuple(refused) if names else ())

    def set_priority(self, names: Sequence[str], priority: int) -> Changed:
        """Gives jobs that have not ended another priority."""
        changed, refused = [], []
        with self.transaction():
            for row in self._rows(names, ("waiting", "running")):
                if row["state"] not in (JobState.WAITING, JobState.RUNNING):
                    refused.append(f"{row['name']} is {row['state']}")
                    continue
                spec = spec_of(replace(job_of(row["spec"]), priority=priority))
                self._db.execute("UPDATE jobs SET priority = ?, spec = ? WHERE id = ?", (priority, spec, row["id"]))
                changed.append(row["name"])
        return Changed(tuple(changed), refused=tuple(refused))

    def _cascade(self, job: int, fate: str) -> tuple[str, ...]:
        """Cancels the waiting jobs that need this one, also by way of others; returns their names."""
        name = self._value(str, "SELECT name FROM jobs WHERE id = ?", (job,))
        cascaded = self._db.execute(
            "WITH RECURSIVE doomed (id) AS (SELECT job FROM needs WHERE needed = ?"
            " UNION SELECT needs.job FROM needs JOIN doomed ON needs.needed = doomed.id)"
            " SELECT jobs.id, jobs.name FROM doomed JOIN jobs ON jobs.id = doomed.id WHERE jobs.state = 'waiting'",
            (job,),
        ).fetchall()
        self._db.executemany(
            "UPDATE jobs SET state = 'cancelled', held = 0, doomed = 1, reason = ? WHERE id = ?",
            ((f"needs {name}, which {fate}", row["id"]) for row in cascaded),
        )
        return tuple(row["name"] for row in cascaded)

    def _resume_attempt(self, attempt: int, mono: float) -> bool:
        """Ends the pauses that only a person ends; False when there are none."""
        ended = [self.mark_resumed(attempt, why, mono) for why in (PauseReason.USER, PauseReason.IDLE)]
        return any(ended)

    def mark_paused(self, attempt: int, why: PauseReason, mono: float) -> bool:
        """Records that a running attempt is stopped for this reason too; False when it was already."""
        with self.transaction():
            reasons = self._pauses(attempt)
            self._db.execute(
                "UPDATE attempts SET paused = ?, paused_mono = coalesce(paused_mono, ?) WHERE id = ?",
                (" ".join(sorted(reasons | {why})), mono, attempt),
            )
            return why not in reasons

    def mark_resumed(self, attempt: int, why: PauseReason, mono: float) -> bool:
        """Records that this reason is over, and with the last one the pause; False when it was none."""
        with self.transaction():
            reasons = self._pauses(attempt)
            left = reasons - {why}
            self._db.execute("UPDATE attempts SET paused = ? WHERE id = ?", (" ".join(sorted(left)), attempt))
            if not left:
                self._db.execute(
                    "UPDATE attempts SET paused_mono = NULL,"
                    " paused_s = paused_s + max(0, ? - coalesce(paused_mono, ?)) WHERE id = ?",
                    (mono, mono, attempt),
                )
            return why in reasons

    def _pauses(self, attempt: int) -> frozenset[PauseReason]:
        return self._value(pause_reasons, "SELECT paused FROM attempts WHERE id = ?", (attempt,)) or frozenset()

    def _open_attempt(self, job: sqlite3.Row) -> sqlite3.Row | None:
        """Number and engine of the attempt with which a job runs; None for a job that does not run."""
        if job["state"] != JobState.RUNNING:
            return None
        found: sqlite3.Row = self._db.execute(
            "SELECT id, engine FROM attempts WHERE job = ? AND state = 'running'", (job["id"],)
        ).fetchone()
        return found

    def _stuck(self, wanted: Collection[int]) -> dict[int, tuple[str, str]]:
        """Jobs that can't run again: they need a failed or cancelled one that is not retried, or one that is stuck
        itself. By number, with the needed job's name and state.
        """
        stuck: dict[int, tuple[str, str]] = {}
        for job in wanted:
            needed = self._db.execute(
                "SELECT n.id, n.name, n.state FROM needs JOIN jobs n ON n.id = needs.needed WHERE needs.job = ?", (job,)
            )
            for row in needed.fetchall():
                if row["state"] in ENDED_BADLY and row["id"] not in wanted:
                    stuck[job] = row["name"], row["state"]
                    break
        front = list(stuck)
        while front:
            needed = self._db.execute(
                "SELECT needs.job, n.name, n.state FROM needs JOIN jobs n ON n.id = needs.needed WHERE n.id = ?",
                (front.pop(),),
            )
            for row in needed.fetchall():
                if row["job"] in wanted and row["job"] not in stuck:
                    stuck[row["job"]] = row["name"], row["state"]
                    front.append(row["job"])
        return stuck

    def _cascaded_from(self, back: dict[int, str]) -> dict[int, str]:
        """Jobs cancelled because of those that are retried, which need no other that stays failed or cancelled."""
        found: dict[int, str] = {}
        front = list(back)
        while front:
            for row in self._db.execute(
                "SELECT j.id, j.name FROM needs JOIN jobs j ON j.id = needs.job WHERE needs.needed = ? AND j.doomed = 1"
                " AND j.state = 'cancelled'",
                (front.pop(),),
            ).fetchall():
                if row["id"] not in found and row["id"] not in back:
                    found[row["id"]] = row["name"]
                    front.append(row["id"])
        stuck = self._stuck(back.keys() | found.keys())
        return {job: name for job, name in found.items() if job not in stuck}

    # --- requests and their responses -------------------------------------------------------------------------

    def add_request(self, request: Request) -> int:
        """Records a request (its ``id`` is ignored); returns its number. Any process may, at any time."""
        with self.transaction():
            cursor = self._db.execute(
                "INSERT INTO controls (at, kind, jobs, settings, by) VALUES (?,?,?,?,?)",
                (request.at, request.kind, json.dumps(request.jobs), json.dumps(dict(request.settings)), request.by),
            )
            return int(cursor.lastrowid or 0)

    def answer(self, request: int, response: Response, now: float) -> None:
        """Records the response, which closes the request. To be called in the transaction that carried it out, so that
        a kill at any instant leaves it open or done, never done twice."""
        with self.transaction():
            self._db.execute(
                "UPDATE controls SET applied_at = ?, applied_by = ?, ok = ?, answer = ?, changed = ? WHERE id = ?",
                (now, response.applied_by, response.ok, response.text, json.dumps(response.changed), request),
            )

    # --- helpers ----------------------------------------------------------------------------------------------

    def _note_round(self, now: float) -> None:
        """Records since when the lowest unfinished round is open: its jobs could not run before, and did not wait."""
        current = self.round()
        if current is not None and current != self.round_opened()[0]:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('round', ?)", (f"{current} {now!r}",))

    def _rows(self, names: Sequence[str], states: tuple[str, ...]) -> list[sqlite3.Row]:
        """The jobs of these names; without names those of the latest submission in one of the states."""
        if not names:
            return self._db.execute(
                f"SELECT * FROM jobs WHERE submission = ? AND state IN ({','.join('?' * len(states))}) ORDER BY id",  # noqa: S608
                (self._submission(), *states),
            ).fetchall()
        return [row for name in dict.fromkeys(names) if (row := self._named(name)) is not None]


COUNT_BLOCKED = (
    "UPDATE jobs SET blocked = (SELECT count(*) FROM needs JOIN jobs n ON n.id = needs.needed"
    " WHERE needs.job = jobs.id AND n.state <> 'done')"
)


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
