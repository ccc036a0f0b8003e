"""The end of an attempt, from what its process did to what becomes of its job. Plain frozen data.

``Exit`` (``engines.local``) says what the process did. ``Known`` adds everything else that is known of the end: the
record, the log, the node, the engine, GPUs and disk. ``Diagnosis`` (``attempts.failures``) is the class of a failure
and its reason. ``Settlement`` is the transition to record: the attempt's state, the job's, and the next try.

An attempt of this machine (``attempts.supervise``) and one in an engine's hands (``remote.outcome``) both become a
``Known``. From there the path is the same: ``attempts.complete.settle`` decides, and ``attempts.complete`` records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuherd.jobs.job import JobState
from gpuherd.jobs.records import AttemptRecord, AttemptState, ResourceRequest

if TYPE_CHECKING:
    from gpuherd.engines.local.process import Exit
    from gpuherd.jobs.attempts.failures import Diagnosis
    from gpuherd.jobs.attempts.time_limits import Passed


class NoFault(StrEnum):
    """Ends that say nothing about the job, and so cost it no try: the job waits again.

    Names stand in claims of attempts on a cluster (``remote.protocol.Claim.why``), values are shown to people.
    """

    STOPPED = "stopped by us; it waits again"
    GAVE_WAY = "stopped because somebody else uses its GPU; it waits again"
    IDLE = "stopped because it did not use its GPUs; it waits again"
    NEVER_WENT = "gpuherd ended before it gave the go-ahead; it waits again"
    COPIED = "it runs in the folder of which this one is a copy; here it waits again"
    REBOOT = "the machine was restarted while it ran; it waits again"
    # Of attempts that an engine beyond this machine had.
    PREEMPTED = "the cluster gave its place to another job; it waits again"
    TIME_UP = "its time on the cluster was up; it goes on in another turn"
    MADE_ROOM = "the cluster asked it to make room; it waits again"
    NODE_LOST = "its node was lost; it waits again"
    NOT_BEGUN = "the cluster has ended it before it began; it waits again"
    NOT_TAKEN = "the cluster does not know of it, and it never began; it waits again"
    TOO_EARLY = "the cluster began it before what it needs had succeeded; it waits again"
    DEPENDENCY_FAILED = "what it was to follow has not succeeded; it waits again"
    STRANDED = DEPENDENCY_FAILED  # the name in claims of an earlier version


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """GPUs, memory and disk as they were observed during the attempt and at its end.

    Attributes:
        gpus: UUIDs that it ran on; () on the CPU.
        faulty: those of them that the driver blames, () when it blames none.
        peak_mb: the most it used on one GPU, None if that is not known.
        from_start: it was observed all the time, so that the peak is that of the whole attempt.
        most_mb: the most that as many GPUs of the run could ever have free; None if that is not known.
        gpu_total_mb: size of the smallest of its GPUs.
        larger_exists: the run may use GPUs larger than that, as many as the job needs.
        disk_low: less than ``min_disk`` was free for the run, or where the job works and writes, when it ended.
        on_trial: one of its GPUs had been left out for crashes before, and no job had succeeded there since.
    """

    gpus: tuple[str, ...] = ()
    faulty: tuple[str, ...] = ()
    peak_mb: int | None = None
    from_start: bool = True
    most_mb: int | None = None
    gpu_total_mb: int | None = None
    larger_exists: bool = False
    disk_low: bool = False
    on_trial: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """All that is known of an attempt that has ended.

    Attributes:
        record: the attempt as the queue has it.
        exit: what its main process did.
        at, mono: when it ended, by the wall clock and by the machine's own (None after a reboot: it began anew).
        no_fault: set when the end is our doing, the machine's or the engine's.
        cancelled_by: who cancelled the job for good, else None.
        passed: the time limit for which it was ended.
        paused_s: how long its processes were stopped by us.
        rest_s: seconds before a job that ended without fault of its own may start again: the cause may still be there.
        gpu_problem: what the driver reports of one of its GPUs ("Xid 79").
        observed: its GPUs and their memory, and the disk.
        has_result: whether the job's result file was there, as its node saw it; None where no node has looked.
        log_tail: the last part of its output; "" after a success.
        note: what the engine or the node says of the end; it counts as the end of the log.
    """

    record: AttemptRecord
    exit: Exit
    at: float
    mono: float | None
    no_fault: NoFault | None = None
    cancelled_by: str | None = None
    passed: Passed | None = None
    paused_s: float = 0.0
    rest_s: float = 0.0
    gpu_problem: str | None = None
    observed: Observed = field(default_factory=Observed)
    has_result: bool | None = None
    log_tail: str = ""
    note: str = ""

    @property
    def run_s(self) -> float | None:
        """How long it ran, pauses included; None where the machine's clock began anew meanwhile."""
        return None if self.mono is None else self.mono - self.record.started_mono


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTry:
    """The next try of a job.

    Attributes:
        not_before: wall-clock second of its earliest start.
        request: what it asks for from now on.
        avoid: UUIDs of GPUs that it should not get if there are others.
        costs_try: whether the failure counts against ``job.retries``.
        change: what is different this time, as a part of a sentence; None when nothing is.
    """

    not_before: float
    request: ResourceRequest
    avoid: frozenset[str]
    costs_try: bool = True
    change: str | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """The transition to record.

    Attributes:
        attempt, job: their states from now on; the job's is DONE, FAILED, CANCELLED, or WAITING for another try.
        reason: None after a success.
        diagnosis: set for a failed attempt.
        again: the next try of a job that waits again.
    """

    known: Known
    attempt: AttemptState
    job: JobState
    reason: str | None = None
    diagnosis: Diagnosis | None = None
    again: NextTry | None = None

    @property
    def no_fault_reason(self) -> str | None:
        """Why the job waits again through no fault of its own; None where that is not so."""
        return self.reason if self.job is JobState.WAITING and self.diagnosis is None else None

    @property
    def costs_try(self) -> bool:
        """Whether the end counts against ``job.retries``."""
        return self.attempt is AttemptState.FAILED and (self.again is None or self.again.costs_try)

    @property
    def avoid(self) -> frozenset[str]:
        """UUIDs of GPUs that the job should not get from now on, if there are others."""
        if self.again is not None:
            return self.again.avoid
        return frozenset() if self.job is JobState.DONE else self.known.record.queued.avoid

    @property
    def adapted(self) -> ResourceRequest | None:
        """What the job asks for from now on; None for no change."""
        if self.again is None or self.again.request == self.known.record.queued.request:
            return None
        return self.again.request
