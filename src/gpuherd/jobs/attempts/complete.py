"""Completes attempts: their ends are settled, recorded in the queue and reported, then their files are removed.

Ends that come together are recorded in one transaction, with what they say of the jobs' families and of the GPUs. Where
the disk is full they are kept and recorded later; until then nothing else happens to their jobs, and no new job is
started.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from gpuherd.jobs.attempts import RECORD_AGAIN_S
from gpuherd.jobs.attempts.failures import FailureClass, clean
from gpuherd.jobs.attempts.log_file import tail
from gpuherd.jobs.attempts.retry import settle
from gpuherd.jobs.completion import Known, Settlement
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.job import JobState
from gpuherd.jobs.queue.errors import may_pass, why
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import Failure, QueuedJob
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory

# Of more jobs that wait again for one reason, as when their cluster has lost them, one line tells.
_MOST_LINES = 5


class Completion:
    """Settles and records ends, of this machine's attempts and of those that an engine had.

    Attributes:
        machine, in_use: all GPUs that the run may use, and those of its running jobs.
        again_at: when ``record`` is to be called again because the queue could not be written (by ``clock.mono``), else
            None.
        trouble: then why, in a few words.
    """

    def __init__(self, queue: Queue, run: RunDirectory, reporter: Reporter, health: GpuHealth):
        self._queue = queue
        self._run = run
        self._reporter = reporter
        self._health = health
        self._open: list[Settlement] = []
        self.again_at: float | None = None
        self.trouble = ""
        self.machine: Collection[str] = ()
        self.in_use: Collection[str] = ()

    def complete(self, ended: Sequence[Known], now: float) -> None:
        """Decides what becomes of the jobs, records it and reports it."""
        for known in ended:
            settlement = settle(_with_files(known))
            self._reporter.write_failure(settlement)
            self._open.append(settlement)
        self.record(now)

    @property
    def unrecorded(self) -> set[int]:
        """The attempts whose end is not in the queue yet."""
        return {settlement.known.record.id for settlement in self._open}

    def record(self, now: float) -> bool:
        """Records what is settled; False when the queue can't be written, and then it is to be called again."""
        try:
            with self._health.unless_taken_back(), self._queue.transaction():
                cancelled = self._queue.record_ends(self._open)
                for settlement in self._open:
                    self._learn(settlement)
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            self.again_at, self.trouble = now + RECORD_AGAIN_S, why(problem)
            return False
        done, self._open, self.again_at = self._open, [], None
        alike = Counter(settlement.no_fault_reason for settlement in done)
        for reason, count in alike.items():
            if reason is not None and count > _MOST_LINES:
                self._reporter.requeued([each.known.record for each in done if each.no_fault_reason == reason], reason)
        for settlement, names in zip(done, cancelled, strict=True):
            record, reason = settlement.known.record, settlement.no_fault_reason
            self._run.remove_attempt_files(record.id)
            if reason is None or alike[reason] <= _MOST_LINES:
                self._reporter.ended(settlement)
            self._reporter.cancelled(names, record.queued.job.name, settlement.job)
        return True

    def _learn(self, settlement: Settlement) -> None:
        """Updates what the end says of the memory of the job's family and of the health of the GPUs."""
        known, record, job = settlement.known, settlement.known.record, settlement.known.record.queued.job
        observed, done = known.observed, settlement.job is JobState.DONE
        if record.handed is not None and observed.peak_mb is None:
            return  # the node has not looked, and the GPUs are not ours to judge
        if record.queued.family is not None and record.gpus:
            well = done and observed.from_start
            ran_out_mb = _ran_out_mb(settlement)
            self._queue.learn(record.queued.family, observed.peak_mb, well=well, ran_out_mb=ran_out_mb)
        if not record.gpus or record.handed is not None:
            return
        if done:
            self._health.succeeded(record.gpus, job, started_at=record.started_at, now=known.at)
        elif settlement.diagnosis is not None:
            self._health.failed(
                observed.faulty or record.gpus,
                job,
                settlement.diagnosis,
                now=known.at,
                machine=self.machine,
                in_use=frozenset(self.in_use).__contains__,
            )


def _with_files(known: Known) -> Known:
    """The same with the end of its log, and with whether its result is there. A node that wrote the result knows best:
    over a network file system we may see it late."""
    result = known.record.queued.job.result
    has_result = result is None or known.has_result is True or Path(result).exists()
    log_tail = ""
    if known.exit.code != 0:
        log_tail = "\n".join(part for part in (tail(Path(known.record.log)), known.note) if part)
    return replace(known, has_result=has_result, log_tail=log_tail)


def _ran_out_mb(settlement: Settlement) -> int | None:
    """How much memory the attempt had on each GPU when it ran out of GPU memory, None if it didn't run out. It may have
    declared more than its GPU has, by what was learned of its family.

    One that shared its GPU and used no more than it was promised ran out because of the others there.
    """
    diagnosis, record, observed = settlement.diagnosis, settlement.known.record, settlement.known.observed
    if diagnosis is None or diagnosis.failure is not FailureClass.OUT_OF_MEMORY or diagnosis.on_host:
        return None
    peak_mb = observed.peak_mb or 0
    if record.shared_mb is not None:
        return peak_mb if peak_mb >= record.shared_mb else None
    declared_mb = record.queued.memory_mb or 0
    had_mb = declared_mb if observed.gpu_total_mb is None else min(declared_mb, observed.gpu_total_mb)
    return max(peak_mb, had_mb) or None


def give_up(
    queue: Queue, reporter: Reporter, jobs: Sequence[QueuedJob], failure: FailureClass, reason: str
) -> sqlite3.OperationalError | None:
    """Jobs that can never run fail without an attempt, all for one reason: records that, and reports it once.

    Returns the error when the queue can't be written now: the caller tries again.
    """
    try:
        with queue.transaction():
            cancelled = [queue.fail_waiting(each.id, reason) for each in jobs]
    except sqlite3.OperationalError as problem:
        if not may_pass(problem):
            raise
        return problem
    reason = clean(reason)
    reporter.given_up(
        [Failure(each.job.name, each.job.title or each.job.name, failure, reason, each.attempts, None) for each in jobs]
    )
    for each, names in zip(jobs, cancelled, strict=True):
        reporter.cancelled(names, each.job.name)
    return None
