"""What becomes of a job when an attempt has ended: done, failed or cancelled for good, another try, or it waits again.

Pure: it is given what is known of the end and answers with the transition to record. How a failure is tried again is
``retry``'s part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gpuherd.engines.local import Exit
from gpuherd.jobs.failures import Diagnosis, Ending, classify
from gpuherd.jobs.job import JobState
from gpuherd.jobs.records import AttemptState, QueuedJob, Request
from gpuherd.jobs.retry import Seen, next_try
from gpuherd.jobs.timelimits import LimitKind, Passed


class Blameless(StrEnum):
    """Ends that say nothing about the job, and so cost it no try."""

    STOPPED = "stopped by us; it waits again"
    GAVE_WAY = "stopped because somebody else uses its GPU; it waits again"
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
    STRANDED = "what it was to follow has not succeeded; it waits again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of an attempt that has ended.

    Attributes:
        exit: how the main process ended.
        blameless: set when the end is our or the machine's doing.
        cancelled_by: who wanted the job to end for good, None for nobody.
        passed: the limit for which we ended it.
        rest_s: seconds before a job that ended without fault of its own may go again.
        has_result: whether the job's result file is there (True for a job without one).
        log_tail: the last part of its output, "" after a success.
        gpu_problem: what the driver reports of one of its GPUs.
        seen: where it ran, and what was seen of its memory and of the disk.
    """

    exit: Exit
    blameless: Blameless | None = None
    cancelled_by: str | None = None
    passed: Passed | None = None
    rest_s: float = 0.0
    has_result: bool = True
    log_tail: str = ""
    gpu_problem: str | None = None
    seen: Seen = field(default_factory=Seen)


@dataclass(frozen=True, slots=True)
class Settlement:
    """The transition to record.

    Attributes:
        reason: None after a success.
        diagnosis: there for a failed attempt.
        adapted: what the job asks for in its next try, None for what it asked for before.
        costs_try: whether the failure counts against its retries.
        change: what is different in the next try, as a part of a sentence.
    """

    attempt: AttemptState
    job: JobState
    reason: str | None = None
    diagnosis: Diagnosis | None = None
    not_before: float = 0.0
    avoid: frozenset[str] = frozenset()
    adapted: Request | None = None
    costs_try: bool = True
    change: str | None = None


def settle(queued: QueuedJob, facts: Facts, now: float) -> Settlement:
    """Decides. ``now`` is the wall-clock second from which a back-off counts."""
    succeeded = facts.exit.code == 0 and facts.has_result
    if succeeded:
        # Also when we had begun to stop it: the work is there.
        return Settlement(AttemptState.DONE, JobState.DONE)
    if facts.cancelled_by is not None:
        reason = f"cancelled by {facts.cancelled_by}"
        return Settlement(AttemptState.REQUEUED, JobState.CANCELLED, reason, avoid=queued.avoid)
    if facts.blameless is not None:
        not_before = now + facts.rest_s if facts.rest_s else 0.0
        reason = facts.blameless.value
        return Settlement(AttemptState.REQUEUED, JobState.WAITING, reason, not_before=not_before, avoid=queued.avoid)
    diagnosis = classify(_ending(queued, facts))
    again = next_try(queued, diagnosis, facts.seen, now)
    if again is None:
        return Settlement(AttemptState.FAILED, JobState.FAILED, diagnosis.reason, diagnosis, avoid=queued.avoid)
    request = Request(again.gpus, again.memory_mb, again.share)
    return Settlement(
        AttemptState.FAILED,
        JobState.WAITING,
        diagnosis.reason,
        diagnosis,
        again.not_before,
        again.avoid,
        None if request == queued.request else request,
        again.costs_try,
        again.change,
    )


def _ending(queued: QueuedJob, facts: Facts) -> Ending:
    limits = {} if facts.passed is None else {facts.passed.kind: facts.passed.limit_s}
    return Ending(
        started=facts.exit.started,
        code=facts.exit.code,
        signal=facts.exit.signal,
        log_tail=facts.log_tail,
        timeout_s=limits.get(LimitKind.WHOLE),
        stage_timeout_s=limits.get(LimitKind.STAGE),
        stage=None if facts.passed is None else facts.passed.stage,
        heartbeat_s=limits.get(LimitKind.HEARTBEAT),
        gpu_problem=facts.gpu_problem,
        missing_result=queued.job.result if facts.exit.code == 0 and not facts.has_result else None,
    )
