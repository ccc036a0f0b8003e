"""The order of an end: exit status, what it means, the record in the queue, then the attempt's files go.

Ends that come together are recorded in one transaction, with what they say of the jobs' families and of the GPUs. Where
the disk is full they are kept and recorded later; meanwhile nothing else may happen to their jobs, and no new one is
started.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.engines.local.process import Exit
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.attempts.log_file import tail
from gpuherd.jobs.attempts.retry import Blameless, Facts, Seen, Settlement, settle
from gpuherd.jobs.attempts.supervise import Attempt, LostAttempt
from gpuherd.jobs.attempts.time_limits import Passed
from gpuherd.jobs.gpu.health import HealthBook
from gpuherd.jobs.job import JobState
from gpuherd.jobs.queue.errors import may_pass, why
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptEnd, AttemptRecord
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory

logger = logging.getLogger(__name__)

RECORD_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """An attempt that has ended: ``at`` by the wall clock, ``mono`` by the machine's own (None after a reboot).

    ``has_result``: whether its result was there, where somebody has looked; ``told``: what others say of the end, after
    its log; ``rest_s``: as in ``settle.Facts``.
    """

    record: AttemptRecord
    exit: Exit
    at: float
    mono: float | None
    blameless: Blameless | None = None
    passed: Passed | None = None
    cancelled_by: str | None = None
    paused_s: float = 0.0
    gpu_problem: str | None = None
    seen: Seen = field(default_factory=Seen)
    has_result: bool | None = None
    told: str = ""
    rest_s: float = 0.0


def ended(attempt: Attempt, found: Exit, *, at: float, now: float, gpu_problem: str | None, seen: Seen) -> Ended:
    """The end of an attempt that we have followed: ``at`` by the wall clock, ``now`` by the machine's."""
    blameless = attempt.blameless
    if attempt.adopted and not found.started:
        blameless = Blameless.NEVER_WENT
    return Ended(
        record=attempt.record,
        exit=found,
        at=at,
        mono=now,
        blameless=blameless,
        passed=attempt.passed,
        cancelled_by=attempt.cancelled_by,
        paused_s=attempt.timer.paused_s(now),
        gpu_problem=gpu_problem,
        seen=seen,
    )


def lost(found: LostAttempt, at: float, now: float) -> Ended:
    """The end of an attempt that a dead dispatcher left and that has ended since."""
    mono: float | None = now
    if found.blameless in (Blameless.REBOOT, Blameless.COPIED):
        mono = None
    elif found.exit.ran_s is not None:
        # By the status file, so that hours without a dispatcher don't count as the job's.
        mono = min(now, found.record.started_mono + found.exit.ran_s)
        at -= now - mono
    return Ended(
        record=found.record,
        exit=found.exit,
        at=at,
        mono=mono,
        blameless=found.blameless,
        cancelled_by=found.record.queued.cancelled_by,
        paused_s=found.record.paused_s,
        seen=Seen(gpus=found.record.gpus),
    )


# Of more jobs that wait again for one reason, as when their cluster has lost them, one line tells.
_MOST_LINES = 5


@dataclass(frozen=True, slots=True)
class _Settled:
    ended: Ended
    settlement: Settlement
    end: AttemptEnd

    @property
    def wait_reason(self) -> str | None:
        """Why the job waits again through no fault of its own, None where that is not so."""
        found = self.settlement
        return found.reason if found.job is JobState.WAITING and found.diagnosis is None else None


def _has_result(ended: Ended) -> bool:
    """Whether the job's result is there. A node that wrote it knows best: over a network we may see it late."""
    result = ended.record.queued.job.result
    return result is None or (ended.has_result is True) or Path(result).exists()


def _ran_out_mb(settled: _Settled) -> int | None:
    """What the attempt had on each GPU when it ran out of GPU memory, None if it didn't. It may have declared more than
    its GPU has, by what was learned of its family.

    One that shared its GPU and used no more than it was promised ran out because of the others there.
    """
    diagnosis, record = settled.settlement.diagnosis, settled.ended.record
    if diagnosis is None or diagnosis.failure is not FailureClass.OUT_OF_MEMORY or diagnosis.on_host:
        return None
    seen = settled.ended.seen
    peak_mb = seen.peak_mb or 0
    if record.shared_mb is not None:
        return peak_mb if peak_mb >= record.shared_mb else None
    declared_mb = record.queued.memory_mb or 0
    had_mb = declared_mb if seen.gpu_total_mb is None else min(declared_mb, seen.gpu_total_mb)
    return max(peak_mb, had_mb) or None


class Endings:
    """Settles and records ends.

    Attributes:
        machine, in_use: all GPUs that the run may use, and those of its running jobs.
        again_at: when ``record`` is to be called again because the queue could not be written (by ``clock.mono``), else
            None.
        trouble: then why, in a few words.
    """

    def __init__(self, queue: Queue, run: RunDirectory, tell: Reporter, health: HealthBook):
        self._queue = queue
        self._run = run
        self._tell = tell
        self._health = health
        self._open: list[_Settled] = []
        self.again_at: float | None = None
        self.trouble = ""
        self.machine: Collection[str] = ()
        self.in_use: Collection[str] = ()

    def settle(self, ended: Sequence[Ended], now: float) -> None:
        """Decides what becomes of the jobs, records it and tells of it."""
        self._open += [self._settle(each) for each in ended]
        self.record(now)

    @property
    def unrecorded(self) -> set[int]:
        """The attempts whose end is not in the queue yet."""
        return {settled.ended.record.id for settled in self._open}

    def record(self, now: float) -> bool:
        """Records what is settled; False when the queue can't be written, and then it is to be called again."""
        try:
            with self._health.unless_taken_back(), self._queue.transaction():
                cancelled = self._queue.record_ends([settled.end for settled in self._open])
                for settled in self._open:
                    self._learn(settled)
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            self.again_at, self.trouble = now + RECORD_AGAIN_S, why(problem)
            return False
        done, self._open, self.again_at = self._open, [], None
        alike = Counter(settled.wait_reason for settled in done)
        for reason, count in alike.items():
            if reason is not None and count > _MOST_LINES:
                self._tell.requeued([each.ended.record for each in done if each.wait_reason == reason], reason)
        for settled, names in zip(done, cancelled, strict=True):
            ended = settled.ended
            self._run.remove_attempt_files(ended.record.id)
            run_s = 0.0 if ended.mono is None else ended.mono - ended.record.started_mono
            if settled.wait_reason is None or alike[settled.wait_reason] <= _MOST_LINES:
                self._tell.ended(ended.record, settled.settlement, run_s, ended.paused_s)
            self._tell.cancelled(names, ended.record.queued.job.name, settled.settlement.job)
        return True

    def _settle(self, ended: Ended) -> _Settled:
        record = ended.record
        well = ended.exit.code == 0
        log_tail = "" if well else "\n".join(part for part in (tail(Path(record.log)), ended.told) if part)
        facts = Facts(
            exit=ended.exit,
            blameless=ended.blameless,
            cancelled_by=ended.cancelled_by,
            passed=ended.passed,
            rest_s=ended.rest_s,
            has_result=_has_result(ended),
            log_tail=log_tail,
            gpu_problem=ended.gpu_problem,
            seen=ended.seen,
        )
        found = settle(record.queued, facts, ended.at)
        end = AttemptEnd(
            attempt=record.id,
            state=found.attempt,
            job_state=found.job,
            ended_at=ended.at,
            ended_mono=ended.mono,
            exit_code=ended.exit.code,
            signal=ended.exit.signal,
            failure_class=None if found.diagnosis is None else found.diagnosis.failure.value,
            reason=found.reason,
            not_before=found.not_before,
            avoid=found.avoid,
            costs_try=found.costs_try,
            adapted=found.adapted,
            peak_mb=ended.seen.peak_mb,
            paused_s=ended.paused_s,
        )
        if found.diagnosis is not None:
            self._tell.write_failure(record, end, found.diagnosis, log_tail)
        return _Settled(ended, found, end)

    def _learn(self, settled: _Settled) -> None:
        """What the end says of the job's family and of the GPUs."""
        ended, record = settled.ended, settled.ended.record
        family = record.queued.family
        if record.handed is not None and ended.seen.peak_mb is None:
            return  # nobody looked, and the GPUs are none of ours to judge
        if family is not None and record.gpus:
            well = settled.settlement.job is JobState.DONE and ended.seen.from_start
            self._queue.learn(family, ended.seen.peak_mb, well=well, ran_out_mb=_ran_out_mb(settled))
        if not record.gpus or record.handed is not None:
            return
        if settled.settlement.job is JobState.DONE:
            self._health.succeeded(record.gpus, record.queued.job, started_at=record.started_at, now=ended.at)
        elif settled.settlement.diagnosis is not None:
            self._health.failed(
                ended.seen.faulty or record.gpus,
                record.queued.job,
                settled.settlement.diagnosis,
                now=ended.at,
                machine=self.machine,
                in_use=frozenset(self.in_use).__contains__,
            )
