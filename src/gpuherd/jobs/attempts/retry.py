"""The next try of a job that has failed, and what an attempt's end means for its job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass, back_off_s, classify
from gpuherd.jobs.completion import Known, NextTry, Observed, Settlement
from gpuherd.jobs.gpu.health import MAY_BE_THE_GPU
from gpuherd.jobs.job import JobState
from gpuherd.jobs.records import AttemptState, QueuedJob
from gpuherd.jobs.scheduler.memory import after_running_out

# How a failed job is tried again: when, with what, and where not. One pure function over a table.
#
# The diagnosis (``failures``) says whether another try can help at all. A job that ran out of GPU memory climbs a
# ladder, one rung for each failure:
#
# 1. it shared its GPU: it gets one for itself;
# 2. it got a smaller GPU than it asked for, since others of its family had needed less: it gets what it asks for;
# 3. there are larger GPUs: it asks for one of them;
# 4. it may have more GPUs (``gpus_at_most``): twice as many, up to that;
# 5. else the same again, on another GPU if there is one.
#
# On rungs 1, 3 and 5 it asks for more memory than it had asked for and than it was measured to use
# (``memory.after_running_out``), if more is available, but on rung 1 only if it used more than it had asked for. On
# more GPUs it asks for what it asked at first, since each GPU then holds less.
#
# Rungs 1, 2 and 4 cost no try, since the job asked for them (``share``, ``gpus_at_most``) or is not at fault, and each
# can be climbed a few times at most. A full disk costs no try while it is full: the job waits for space. Nor does a
# failure on a GPU on trial (``gpu.health``), once for each such GPU: the job was the test of the GPU.


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
# All jobs of the machine use host memory: a pause until some of them have ended helps, another GPU does not.
HOST_MEMORY = Rule(first_wait_s=5.0, longest_wait_s=120.0)


def next_try(queued: QueuedJob, diagnosis: Diagnosis, seen: Observed, now: float) -> NextTry | None:
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


def _had_less_than_asked(queued: QueuedJob, seen: Observed) -> bool:
    """Whether it ran on a smaller GPU than it asked for, for the first time, and there are others."""
    asked_mb, had_mb = queued.memory_mb, seen.gpu_total_mb
    if asked_mb is None or had_mb is None or queued.avoid:
        return False
    return had_mb < asked_mb and (seen.most_mb is None or asked_mb <= seen.most_mb)


def _climb(queued: QueuedJob, seen: Observed) -> _Change:
    """The next rung of the ladder for a job that ran out of GPU memory."""
    gpus = queued.gpus
    memory_mb = after_running_out(queued.memory_mb, seen.peak_mb, seen.most_mb)
    if queued.share:
        # A job that used less than it asked for ran out because of the others there, or was promised less.
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


def settle(known: Known) -> Settlement:
    """Decides what an attempt's end means for its job: done, failed or cancelled for good, another try, or a wait."""
    queued, end = known.record.queued, known.exit
    has_result = known.has_result is not False
    if end.code == 0 and has_result:
        # Also when we had begun to stop it: the work is there.
        return Settlement(known, AttemptState.DONE, JobState.DONE)
    if known.cancelled_by is not None:
        return Settlement(known, AttemptState.REQUEUED, JobState.CANCELLED, f"cancelled by {known.cancelled_by}")
    if known.no_fault is not None:
        not_before = known.at + known.rest_s if known.rest_s else 0.0
        same = NextTry(
            not_before=not_before,
            gpus=queued.gpus,
            memory_mb=queued.memory_mb,
            share=queued.share,
            avoid=queued.avoid,
            costs_try=False,
        )
        return Settlement(known, AttemptState.REQUEUED, JobState.WAITING, known.no_fault.value, again=same)
    diagnosis = classify(
        end,
        known.log_tail,
        passed=known.passed,
        gpu_problem=known.gpu_problem,
        missing_result=queued.job.result if end.code == 0 else None,
    )
    again = next_try(queued, diagnosis, known.observed, known.at)
    job = JobState.FAILED if again is None else JobState.WAITING
    return Settlement(known, AttemptState.FAILED, job, diagnosis.reason, diagnosis, again)
