"""The next try of a job that has failed, and what an attempt's end means for its job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from gpuherd.engines.local.process import Exit
from gpuherd.jobs.attempts.failures import Diagnosis, Ending, FailureClass, back_off_s, classify
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed
from gpuherd.jobs.gpu.health import MAY_BE_THE_GPU
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.records import AttemptState, QueuedJob, Request
from gpuherd.jobs.scheduler.memory import after_running_out

# How a job that has failed is tried again: when, with what, and where not. One pure function over a table.
#
# Whether another try can help at all is said by the diagnosis (``failures``); this says how. A job that ran out of
# GPU memory climbs a ladder, one rung for each failure:
#
# 1. it shared its GPU: it gets one for itself;
# 2. it got a smaller GPU than it asked for, since others of its family had needed less: it gets what it asks for;
# 3. there are larger GPUs: it asks for one of them;
# 4. it may have more GPUs (``gpus_at_most``): twice as many, up to that;
# 5. else the same again, on another GPU if there is one.
#
# On rungs 1, 3 and 5 it asks for more memory than it had asked for and was seen to use
# (``memory.after_running_out``), if there is more to be had, but on the first one only if it used more than it
# asked for; on more GPUs for what it asked at first, since each then holds less.
#
# Rungs 1, 2 and 4 cost no try, since the job asked for them (``share``, ``gpus_at_most``) or can't help it, and each
# can be climbed a few times at most. A full disk costs no try either while it is full: the job waits for space; nor
# does a failure on a GPU on trial (``quarantine``), once for each such GPU: the job was to find out about the GPU.


@dataclass(frozen=True, slots=True)
class Rule:
    """How a class of failure is tried again.

    Attributes:
        first_wait_s, longest_wait_s: the pause before the first further try; it doubles with each, up to the longest.
        ladder: more memory or more GPUs may help.
        waits_for_disk: not before there is space again.
    """

    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    ladder: bool = False
    waits_for_disk: bool = False


RULES: Mapping[FailureClass, Rule] = MappingProxyType(
    {
        FailureClass.OUT_OF_MEMORY: Rule(ladder=True),
        FailureClass.GPU_FAULT: Rule(),
        FailureClass.NO_HEARTBEAT: Rule(),
        FailureClass.TIMEOUT: Rule(),
        FailureClass.CRASH: Rule(),
        FailureClass.NO_RESULT: Rule(),
        FailureClass.NEVER_STARTED: Rule(),
        FailureClass.KILLED: Rule(),
        FailureClass.DISK_FULL: Rule(waits_for_disk=True),
    }
)
# Host memory is used by all jobs of the machine: a pause until some of them have ended helps, another GPU does not.
HOST_MEMORY = Rule(first_wait_s=5.0, longest_wait_s=120.0)


class Tried(Protocol):
    """What is known of a job that has been tried (``records.QueuedJob``): the job as its owner meant it, the failures
    that count so far, where it failed, and what the last try asked for."""

    @property
    def job(self) -> Job:
        """As it was submitted."""

    @property
    def tries(self) -> int:
        """Failures so far that count against ``job.retries``, without this one."""

    @property
    def avoid(self) -> frozenset[str]:
        """UUIDs of GPUs on which it failed."""

    @property
    def gpus(self) -> int:
        """How many GPUs it asked for this time."""

    @property
    def memory_mb(self) -> int | None:
        """What it asked to be free on each."""

    @property
    def share(self) -> bool:
        """Whether it was to share its GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What was seen of the attempt.

    Attributes:
        gpus: UUIDs that it ran on; () on the CPU.
        faulty: those of them that the driver blames, () when it blames none.
        peak_mb: the most it was seen to use on one GPU, None if that is not known.
        from_start: somebody looked all the time, so that the peak is that of the whole attempt.
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
class NextTry:
    """The next try of a job.

    Attributes:
        not_before: wall-clock second of its earliest start.
        gpus, memory_mb, share: what it asks for from now on.
        avoid: UUIDs of GPUs that it should not get if there are others.
        costs_try: whether the failure counts against ``job.retries``.
        change: what is different this time, as a part of a sentence; None when nothing is.
    """

    not_before: float
    gpus: int
    memory_mb: int | None
    share: bool
    avoid: frozenset[str]
    costs_try: bool = True
    change: str | None = None


def next_try(queued: Tried, diagnosis: Diagnosis, seen: Seen, now: float) -> NextTry | None:
    """The next try after this failure, or None when it has failed for good."""
    if not diagnosis.retry:
        return None
    rule = HOST_MEMORY if diagnosis.on_host else RULES[diagnosis.failure]
    change = _climb(queued, seen) if rule.ladder and seen.gpus else _Change(queued.gpus, queued.memory_mb, queued.share)
    waits_for_disk = rule.waits_for_disk and seen.disk_low
    probed = seen.on_trial and diagnosis.failure in MAY_BE_THE_GPU and queued.avoid.isdisjoint(seen.gpus)
    costs = not (change.is_asked_for or waits_for_disk or probed)
    if costs and queued.tries >= queued.job.retries:
        return None
    avoid = queued.avoid
    if (diagnosis.elsewhere and not (change.is_asked_for or diagnosis.on_host)) or change.too_small:
        avoid |= frozenset(seen.faulty or seen.gpus)
    return NextTry(
        not_before=now + back_off_s(queued.tries + 1, rule.first_wait_s, rule.longest_wait_s),
        gpus=change.gpus,
        memory_mb=change.memory_mb,
        share=change.share,
        avoid=avoid,
        costs_try=costs,
        change="when there is space on the disk again" if waits_for_disk else change.sentence,
    )


@dataclass(frozen=True, slots=True)
class _Change:
    gpus: int
    memory_mb: int | None
    share: bool
    is_asked_for: bool = False
    sentence: str | None = None
    too_small: bool = False


def _had_less_than_asked(queued: Tried, seen: Seen) -> bool:
    """Whether it ran on a smaller GPU than it asked for, for the first time, and there are others."""
    asked_mb, had_mb = queued.memory_mb, seen.gpu_total_mb
    if asked_mb is None or had_mb is None or queued.avoid:
        return False
    return had_mb < asked_mb and (seen.most_mb is None or asked_mb <= seen.most_mb)


def _climb(queued: Tried, seen: Seen) -> _Change:
    """The next rung of the ladder for a job that ran out of GPU memory."""
    gpus = queued.gpus
    memory_mb = after_running_out(queued.memory_mb, seen.peak_mb, seen.most_mb)
    if queued.share:
        # Who used less than it asked for ran out because of the others there, or was promised less than that.
        enough = queued.memory_mb is not None and (seen.peak_mb or 0) < queued.memory_mb
        return _Change(gpus, queued.memory_mb if enough else memory_mb, False, True, "on a GPU for itself")
    if _had_less_than_asked(queued, seen):
        return _Change(gpus, queued.memory_mb, False, True, f"on a GPU with {queued.memory_mb} MB, as it asked", True)
    if seen.larger_exists and seen.gpu_total_mb is not None:
        more_mb = seen.gpu_total_mb + 1
        return _Change(gpus, more_mb, False, False, f"on a GPU of more than {seen.gpu_total_mb} MB")
    most = queued.job.gpus_at_most
    if most is not None and gpus < most:
        more = min(2 * gpus, most)
        return _Change(more, queued.job.memory_mb, False, True, f"on {more} GPUs")
    more_free = None if memory_mb == queued.memory_mb else f"on a GPU with {memory_mb} MB free"
    return _Change(gpus, memory_mb, False, False, more_free)


# What becomes of a job when an attempt has ended: done, failed or cancelled for good, another try, or it waits again.
#
# Pure: it is given what is known of the end and answers with the transition to record. How a failure is tried again
# is ``retry``'s part.


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
