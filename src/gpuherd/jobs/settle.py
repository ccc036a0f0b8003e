"""What becomes of a job when an attempt has ended: done, failed for good, another try, or simply back in the queue.

Pure: it is given what is known of the end and answers with the transition to record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpuherd.engines.local import Exit
from gpuherd.jobs.failures import Diagnosis, Ending, back_off_s, classify
from gpuherd.jobs.job import JobState
from gpuherd.jobs.records import AttemptState, QueuedJob


class Blameless(StrEnum):
    """Ends that say nothing about the job, and so cost it no try."""

    STOPPED = "stopped by us; it waits again"
    NEVER_WENT = "gpuherd ended before it gave the go-ahead; it waits again"
    COPIED = "it runs in the folder of which this one is a copy; here it waits again"
    REBOOT = "the machine was restarted while it ran; it waits again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of an attempt that has ended.

    Attributes:
        exit: how the main process ended.
        blameless: set when the end is our or the machine's doing.
        timed_out: we ended it for its time limit.
        has_result: whether the job's result file is there (True for a job without one).
        log_tail: the last part of its output, "" after a success.
        gpus: UUIDs that it ran on.
    """

    exit: Exit
    blameless: Blameless | None = None
    timed_out: bool = False
    has_result: bool = True
    log_tail: str = ""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settlement:
    """The transition to record. ``diagnosis`` is there for a failed attempt; ``reason`` is None after a success."""

    attempt: AttemptState
    job: JobState
    reason: str | None = None
    diagnosis: Diagnosis | None = None
    not_before: float = 0.0
    avoid: frozenset[str] = frozenset()


def settle(queued: QueuedJob, facts: Facts, now: float) -> Settlement:
    """Decides. ``now`` is the wall-clock second from which a back-off counts."""
    succeeded = facts.exit.code == 0 and facts.has_result
    if succeeded:
        # Also when we had begun to stop it: the work is there.
        return Settlement(AttemptState.DONE, JobState.DONE)
    if facts.blameless is not None:
        return Settlement(AttemptState.REQUEUED, JobState.WAITING, facts.blameless.value, avoid=queued.avoid)
    diagnosis = classify(_ending(queued, facts))
    avoid = queued.avoid | frozenset(facts.gpus) if diagnosis.elsewhere else queued.avoid
    if diagnosis.retry and queued.tries < queued.job.retries:
        not_before = now + back_off_s(queued.tries + 1)
        return Settlement(AttemptState.FAILED, JobState.WAITING, diagnosis.reason, diagnosis, not_before, avoid)
    return Settlement(AttemptState.FAILED, JobState.FAILED, diagnosis.reason, diagnosis, avoid=avoid)


def _ending(queued: QueuedJob, facts: Facts) -> Ending:
    return Ending(
        started=facts.exit.started,
        code=facts.exit.code,
        signal=facts.exit.signal,
        log_tail=facts.log_tail,
        timeout_s=queued.job.timeout_s if facts.timed_out else None,
        missing_result=queued.job.result if facts.exit.code == 0 and not facts.has_result else None,
    )
