"""An open queue: its connection, its transactions, and all queries.

Queries change nothing; any process may make them at any time. ``store`` adds the changes, ``submission`` converts the
rows; views that never write use ``reader``.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from gpuherd.errors import GpuherdError
from gpuherd.jobs.control.messages import Request, Response
from gpuherd.jobs.job import Job, JobState, job_of
from gpuherd.jobs.lock import Hold
from gpuherd.jobs.options import Order
from gpuherd.jobs.queue.reader import FAMILIES, attempt, attempt_row, family_memory, queued, round_opened
from gpuherd.jobs.queue.schema import (
    LONGEST_BACK_OFF_S,
    connect,
    damage_behind,
    make,
    passing_through,
    taken_back,
)
from gpuherd.jobs.records import AttemptRecord, AttemptRow, Counts, Predecessor, QueuedJob
from gpuherd.jobs.scheduler.lengths import Length
from gpuherd.jobs.scheduler.memory import FamilyMemory
from gpuherd.jobs.scheduler.ordering import BEYOND, MOST_KINDS

_T = TypeVar("_T")

COSTS_WAITING = "SELECT count(*), count(cost), total(cost) FROM jobs WHERE submission = ? AND state = 'waiting'"
# Names in one query: SQLite takes a thousand values, and some builds no more.
_AT_ONCE = 500
# Of a number that SQLite has a place for.
_DIGITS = 18
_COULD_RUN = "state = 'waiting' AND blocked = 0 AND held = 0"
_ORDER: Mapping[Order, str] = {"age": "priority DESC, id", "longest": "priority DESC, rank DESC, id"}


# Dependencies in an engine's hands: jobs that an engine has before the jobs that they need have succeeded; it keeps the
# order itself. Such a job is running in the queue while its ``blocked`` still counts its needs. It follows the attempts
# that were open when it was handed over: they have lower numbers than its own. When one of those fails, or another
# attempt takes its place, the follower can't start any more: it is *orphaned*, and must be taken back.

# The needed job m is submitted to the engine, and no request is to end it.
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


class QueueFile:
    """An open queue, to be read; ``Queue`` adds the changes.

    Args:
        path: the file; made, for its owner alone, if it is not there.
        check: scan the whole file for damage. Processes that only add a job or make a query may skip that.

    Attributes:
        tag: names this queue in the environment of its jobs' processes.
        copied: the file is a copy of the queue that last ran, so that what runs there does not belong to this one.

    Raises QueueUnreadable when the file is damaged or of a newer gpuherd; it is then left as it is. As a context it
    raises that also where an error in the block comes of damage. QueueElsewhere while another machine works on it
    (``onehost``), also from what changes it.
    """

    def __init__(self, path: str | Path, *, check: bool = True):
        self.path = Path(path)
        make(self.path)
        self._hold = Hold(self.path)
        try:
            self._db = connect(self.path, check=check)
        except BaseException:
            self._hold.release()
            raise
        self._depth = 0
        # A copied folder has the same queue in it, but the attempts and processes of the original are not its own.
        inode = str(self.path.stat().st_ino)
        self.copied = self._meta("inode") not in ("", inode)
        self.tag = f"{self._meta('queue')}.{inode}"
        self._batches = f"gpuherd-{self.tag}-"

    def close(self) -> None:
        """Closes the file. What was changed is safe already."""
        self._db.close()
        self._hold.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        # Errors that a damaged row or index causes: SQLite's own, a missing row, values of a wrong type.
        strange = (sqlite3.Error, RuntimeError, LookupError, TypeError, ValueError)
        if isinstance(error, strange) and not isinstance(error, GpuherdError):
            damage = damage_behind(self.path, error)
            if damage is not None:
                raise damage from error

    def be_sure(self) -> None:
        """Raises QueueElsewhere when another machine has taken the queue over meanwhile, so that the files next to it
        are not ours any more. Every transaction begins with this check."""
        self._hold.check()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes in the block are made together or not at all. May be nested."""
        if self._depth:
            yield
            return
        self._hold.check()
        self._db.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield
            if not self._db.in_transaction:
                raise taken_back()
            self._db.execute("COMMIT")
        except BaseException:
            # A full disk makes SQLite roll back by itself; a second rollback would hide the error.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._depth = 0

    # --- jobs --------------------------------------------------------------------------------------------------

    def head(self, limit: int, now: float, order: Order = "age") -> tuple[QueuedJob, ...]:
        """The first ``limit`` jobs that need GPUs and the first ``limit`` that need none, of the lowest round that has
        not ended: by priority, then age, or then the longest first (``ordering.rank``), then age.

        Jobs that are paused, whose needs have not succeeded, or whose back-off has not passed, are not among them. (A
        back-off that is far in the future is one from before the clock was set back, and counts as passed.)
        """
        unfinished = self.round()
        found: list[sqlite3.Row] = []
        for needs_gpu in (1, 0) if unfinished is not None else ():
            found += self._db.execute(
                f"SELECT * FROM jobs WHERE {_COULD_RUN} AND (gpus > 0) = ?"  # noqa: S608
                f" AND round = ? AND (not_before <= ? OR not_before > ?) ORDER BY {_ORDER[order]} LIMIT ?",
                (needs_gpu, unfinished, now, now + LONGEST_BACK_OFF_S, limit),
            ).fetchall()
        return self._queued(found)

    def first_of_kinds(self, gpus: int, now: float, order: Order = "age") -> tuple[QueuedJob, ...]:
        """Of the jobs that need GPUs, the first of each kind: those that ask for as many GPUs and as much memory, and
        share or not. Of one kind as many as could start on ``gpus`` GPUs, within limits, and one more; of sharing jobs
        a few more.

        Which jobs are among them is as with ``head``. For each number of GPUs at most ``MOST_KINDS`` kinds, those that
        ask for the least memory.
        """
        unfinished = self.round()
        found: list[sqlite3.Row] = []
        for kind in self._kinds_of(unfinished) if unfinished is not None else ():
            size, share, _ = kind
            most = 1 + (BEYOND if share else min(gpus // size, BEYOND))
            found += self._db.execute(
                f"SELECT * FROM jobs WHERE {_COULD_RUN} AND round = ? AND gpus = ? AND share = ?"  # noqa: S608
                " AND coalesce(memory_mb, 0) = ? AND (not_before <= ? OR not_before > ?)"
                f" ORDER BY {_ORDER[order]} LIMIT ?",
                (unfinished, *kind, now, now + LONGEST_BACK_OFF_S, most),
            ).fetchall()
        return self._queued(found)

    def following(self, engine: str, limit: int, now: float) -> tuple[tuple[QueuedJob, tuple[Predecessor, ...]], ...]:
        """The first ``limit`` waiting jobs of the open round that can follow others: all that they need and that has
        not succeeded is in the hands of this engine. With each the attempts of those others, oldest first.

        Which jobs are left out besides is as with ``head``. They are looked for among those that need what the engine
        has, so that a long queue costs no more than a short one.
        """
        found = self._db.execute(
            "SELECT j.* FROM jobs j WHERE j.id IN (SELECT needs.job FROM attempts a JOIN needs ON needs.needed = a.job"  # noqa: S608
            " WHERE a.state = 'running' AND a.engine = ? AND a.handle IS NOT NULL)"
            " AND j.state = 'waiting' AND j.blocked > 0 AND j.held = 0 AND j.round = ?"
            f" AND (j.not_before <= ? OR j.not_before > ?) AND NOT EXISTS ({_NOT_YET} AND NOT ({_IN_HAND}))"
            " ORDER BY j.priority DESC, j.id LIMIT ?",
            (engine, self.round(), now, now + LONGEST_BACK_OFF_S, engine, limit),
        ).fetchall()
        return tuple((job, self._predecessors(job.id, engine)) for job in self._queued(found))

    def _predecessors(self, job: int, engine: str) -> tuple[Predecessor, ...]:
        rows = self._db.execute(
            "SELECT a.id, a.handle FROM needs n JOIN jobs m ON m.id = n.needed JOIN attempts a ON a.job = m.id"
            " WHERE n.job = ? AND m.state <> 'done' AND a.state = 'running' AND a.engine = ? ORDER BY a.id",
            (job, engine),
        )
        return tuple(Predecessor(row["id"], row["handle"]) for row in rows)

    def followed(self) -> dict[str, frozenset[int]]:
        """By batch of which the engine still has an attempt: the attempts that it may follow there."""
        return _by_batch(self._db.execute(f"SELECT a.batch, b.id FROM {_FOLLOWED}"), frozenset)  # noqa: S608

    def open_batches(self) -> dict[str, tuple[int, ...]]:
        """All attempts of each batch of which the engine still has one, or that one which it has may follow; in the
        batch's own order."""
        found = self._db.execute(
            "SELECT batch, id FROM attempts WHERE batch IN (SELECT batch FROM attempts WHERE state = 'running'"  # noqa: S608
            f" UNION SELECT b.batch FROM {_FOLLOWED}) ORDER BY batch, place"
        )
        return _by_batch(found, tuple)

    def batch_name(self, first: int) -> str:
        """What a batch of this queue is called whose first attempt has this number. No other queue has such a name,
        also none of which this one is a copy, and an attempt's number is used for one record only."""
        return f"{self._batches}{first}"

    def has_batch(self, name: str) -> bool:
        """Whether a batch of this name is one of this queue, and recorded in it: a queue that was restored knows
        nothing of what was handed over since."""
        first = name.removeprefix(self._batches)
        if first == name or not (first.isascii() and first.isdigit()) or len(first) > _DIGITS:
            return False
        return self._value(int, "SELECT 1 FROM attempts WHERE id = ? AND batch = ?", (int(first), name)) is not None

    def owns(self, record: AttemptRecord) -> bool:
        """Whether an open attempt is this queue's own, and not one of the queue of which it is a copy. (A copy's first
        start puts those back. If it is killed before, the queue is no fresh copy any more, and they are still there.)
        """
        return not self.copied and (record.handed is None or record.handed.batch.startswith(self._batches))

    def ended_on_gpus(self, before: int, limit: int) -> tuple[tuple[AttemptRecord, float, float], ...]:
        """Attempts on this machine's GPUs that have ended, the newest first, each with its end by the wall clock and
        its length in seconds: of the few thousand with the highest numbers below ``before``; older ones cost nothing.
        """
        rows = self._db.execute(
            "SELECT * FROM (SELECT * FROM attempts WHERE id < ? ORDER BY id DESC LIMIT 4096)"
            " WHERE state <> 'running' AND gpus <> '[]' AND engine = 'local' AND ended_mono IS NOT NULL LIMIT ?",
            (before, limit),
        ).fetchall()
        found = []
        for row in rows:
            job = self._db.execute("SELECT * FROM jobs WHERE id = ?", (row["job"],)).fetchone()
            found.append((attempt(row, job), float(row["ended_at"]), max(0.0, row["ended_mono"] - row["started_mono"])))
        return tuple(found)

    def orphaned(self) -> frozenset[int]:
        """Attempts in the hands of an engine that are to follow others which are open no more and did not succeed, or
        were begun anew since: they can't begin there any more."""
        rows = self._db.execute(
            "SELECT a.id FROM attempts a JOIN jobs j ON j.id = a.job WHERE a.state = 'running' AND j.blocked > 0"  # noqa: S608
            f" AND EXISTS ({_NOT_YET}"
            " AND NOT EXISTS (SELECT 1 FROM attempts b WHERE b.job = m.id AND b.state = 'running' AND b.id < a.id))"
        )
        return frozenset(row["id"] for row in rows)

    def _follows(self, job: int, engine: str) -> bool:
        """Whether all that this job needs and that has not succeeded is in the engine's hands."""
        lacking = f"SELECT 1 FROM jobs j WHERE j.id = ? AND EXISTS ({_NOT_YET} AND NOT ({_IN_HAND}))"  # noqa: S608
        return self._value(int, lacking, (job, engine)) is None

    def _queued(self, found: Sequence[sqlite3.Row]) -> tuple[QueuedJob, ...]:
        """Jobs of the round that is open now: none of them could run before it was."""
        opened_at = self.round_opened()[1]
        jobs = (queued(row) for row in found)
        return tuple(job if job.ready_at >= opened_at else replace(job, ready_at=opened_at) for job in jobs)

    def _kinds_of(self, unfinished: int) -> Iterator[tuple[int, int, int]]:
        """GPUs, share and MB of the kinds of a round: each is the next in the index, however long the queue is."""
        waiting = f"FROM jobs WHERE {_COULD_RUN} AND round = ?"
        next_size = f"SELECT min(gpus) {waiting} AND gpus > ?"
        next_memory = (
            f"SELECT min(coalesce(memory_mb, 0)) {waiting} AND gpus = ? AND share = ? AND coalesce(memory_mb, 0) > ?"
        )
        size = self._value(int, next_size, (unfinished, 0))
        while size is not None:
            for share in (0, 1):
                memory_mb: int | None = -1
                for _ in range(MOST_KINDS):
                    memory_mb = self._value(int, next_memory, (unfinished, size, share, memory_mb))
                    if memory_mb is None:
                        break
                    yield size, share, memory_mb
            size = self._value(int, next_size, (unfinished, size))

    def round(self) -> int | None:
        """The lowest round of which a job waits or runs, None when none does."""
        return self._value(int, "SELECT min(round) FROM jobs WHERE state IN ('waiting', 'running')")

    def round_opened(self) -> tuple[int | None, float]:
        """The round that was last recorded as the lowest unfinished one, and since which wall-clock second; (None, 0.0)
        where none is recorded."""
        return round_opened(self._value(str, "SELECT value FROM meta WHERE key = 'round'"))

    def held(self) -> int:
        """How many waiting jobs are paused."""
        return self._value(int, "SELECT count(*) FROM jobs WHERE held = 1") or 0

    def next_not_before(self, now: float) -> float | None:
        """The next wall-clock second at which a job's back-off ends, or None."""
        return self._value(
            float,
            "SELECT min(not_before) FROM jobs WHERE state = 'waiting' AND blocked = 0 AND held = 0"
            " AND not_before > ? AND not_before <= ?",
            (now, now + LONGEST_BACK_OFF_S),
        )

    def counts(self) -> Counts:
        """Jobs of the latest submission by state."""
        query = "SELECT state, count(*) AS n FROM jobs WHERE submission = ? GROUP BY state"
        return Counts.of({row["state"]: row["n"] for row in self._db.execute(query, (self._submission(),))})

    def states(self) -> dict[str, JobState]:
        """Every job's state, by name."""
        return {row["name"]: JobState(row["state"]) for row in self._db.execute("SELECT name, state FROM jobs")}

    def job(self, name: str) -> tuple[QueuedJob, JobState] | None:
        """The job of this name and its state, None when there is none."""
        row = self._named(name)
        return None if row is None else (queued(row), JobState(row["state"]))

    def jobs(self) -> Iterator[Job]:
        """Every job as it was last submitted, in order of age."""
        return (job_of(row["spec"]) for row in self._db.execute("SELECT spec FROM jobs ORDER BY id"))

    def running(self) -> tuple[AttemptRecord, ...]:
        """The attempts that have no end yet: those of this dispatcher, or those that a dead one left."""
        found = self._db.execute("SELECT * FROM attempts WHERE state = 'running' ORDER BY id").fetchall()
        return tuple(
            attempt(row, self._db.execute("SELECT * FROM jobs WHERE id = ?", (row["job"],)).fetchone()) for row in found
        )

    def kinds(self) -> tuple[tuple[int, int | None], ...]:
        """The requests of the waiting jobs, each once: number of GPUs, and MB on each."""
        with passing_through(self._db):
            found = self._db.execute("SELECT DISTINCT gpus, memory_mb FROM jobs WHERE state = 'waiting'").fetchall()
        return tuple((row["gpus"], row["memory_mb"]) for row in found)

    def attempts(self) -> Iterator[AttemptRow]:
        """Every attempt in order of start, with its length; None for the length of one that crossed a reboot."""
        # Not by number: a shell that stands by has its number before it is known when it is started.
        found = self._db.execute(
            "SELECT a.*, j.name FROM attempts a JOIN jobs j ON j.id = a.job ORDER BY a.run, a.started_mono, a.id"
        )
        return (attempt_row(row, row["name"]) for row in found)

    def runs(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each dispatcher's run in wall-clock seconds; a killed one ends with the last that it saw to,
        and before the next begins.
        """
        found = self._db.execute(
            "SELECT r.started_at, coalesce(r.ended_at, min("
            "  max(r.started_at, coalesce(max(a.ended_at), 0), coalesce(max(a.started_at), 0)),"
            "  coalesce((SELECT n.started_at FROM runs n WHERE n.id > r.id ORDER BY n.id LIMIT 1), 9e99))) AS ended_at"
            " FROM runs r LEFT JOIN attempts a ON a.run = r.id GROUP BY r.id ORDER BY r.id"
        )
        return tuple((row["started_at"], max(row["started_at"], row["ended_at"])) for row in found)

    def last_failure(self, job: int) -> str | None:
        """The failure class of a job's latest attempt; None if that did not fail."""
        return self._value(str, "SELECT class FROM attempts WHERE job = ? ORDER BY id DESC LIMIT 1", (job,))

    def last_attempt(self) -> int:
        """The highest attempt number used so far, 0 for none."""
        return self._value(int, "SELECT max(id) FROM attempts") or 0

    # --- requests and measurements -----------------------------------------------------------------------------

    def requests(self) -> tuple[Request, ...]:
        """The requests without a response, oldest first."""
        rows = self._db.execute("SELECT * FROM controls WHERE applied_at IS NULL ORDER BY id").fetchall()
        return tuple(
            Request(
                row["kind"],
                tuple(json.loads(row["jobs"])),
                json.loads(row["settings"]),
                row["by"],
                row["at"],
                row["id"],
            )
            for row in rows
        )

    def response(self, request: int) -> Response | None:
        """The response to a request, None while it is open."""
        row = self._db.execute("SELECT * FROM controls WHERE id = ?", (request,)).fetchone()
        if row is None or row["applied_at"] is None:
            return None
        return Response(bool(row["ok"]), row["answer"], row["applied_by"], tuple(json.loads(row["changed"])))

    def unknown(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the names that no job has."""
        return tuple(name for name in names if self._named(name) is None)

    def names(self, limit: int) -> tuple[str, ...]:
        """The names of the newest ``limit`` jobs."""
        return tuple(row[0] for row in self._db.execute("SELECT name FROM jobs ORDER BY id DESC LIMIT ?", (limit,)))

    def families(self, names: Collection[str]) -> dict[str, FamilyMemory]:
        """Measured memory of these families; without those that were never measured."""
        wanted = sorted(set(names))
        return {
            row["name"]: family_memory(row)
            for start in range(0, len(wanted), _AT_ONCE)
            for row in self._db.execute(
                f"{FAMILIES} WHERE name IN ({','.join('?' * len(wanted[start : start + _AT_ONCE]))})",
                wanted[start : start + _AT_ONCE],
            )
        }

    def latest_lengths(self, most: int = 50) -> tuple[Length, ...]:
        """How long the latest attempts that have succeeded ran, without their pauses, the newest first."""
        rows = self._db.execute(
            "SELECT j.spec, j.gpus, a.ended_mono - a.started_mono - a.paused_s AS run_s FROM attempts a"
            " JOIN jobs j ON j.id = a.job WHERE a.state = 'done' AND a.ended_mono IS NOT NULL"
            " ORDER BY a.id DESC LIMIT ?",
            (most,),
        )
        return tuple(Length(job_of(row["spec"]).family, row["gpus"], max(0.0, row["run_s"])) for row in rows)

    def gpu_health(self) -> dict[str, str]:
        """What is remembered of each GPU's faults, as JSON by UUID (``jobs.quarantine``)."""
        return {row["uuid"]: row["state"] for row in self._db.execute("SELECT uuid, state FROM gpu_health")}

    # --- helpers ----------------------------------------------------------------------------------------------

    def _value(self, kind: Callable[[Any], _T], query: str, values: tuple[object, ...] = ()) -> _T | None:
        """The first value of the first row; None where there is no row, or no value in it."""
        row = self._db.execute(query, values).fetchone()
        return None if row is None or row[0] is None else kind(row[0])

    def _named(self, name: str) -> sqlite3.Row | None:
        """The row of the job with this name. Users may give any bytes: what is no valid text is no job's name."""
        try:
            row: sqlite3.Row | None = self._db.execute("SELECT * FROM jobs WHERE name = ?", (name,)).fetchone()
        except UnicodeEncodeError:
            return None
        return row

    def _submission(self) -> int:
        return int(self._meta("submission"))

    def _meta(self, key: str) -> str:
        return str(self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])


_Numbers = TypeVar("_Numbers", tuple[int, ...], frozenset[int])


def _by_batch(rows: Iterable[sqlite3.Row], kind: Callable[[Iterable[int]], _Numbers]) -> dict[str, _Numbers]:
    """The attempts of each batch, from rows with both."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["batch"], []).append(row["id"])
    return {batch: kind(numbers) for batch, numbers in found.items()}
