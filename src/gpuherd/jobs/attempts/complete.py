"""Completes attempts: what an end means for the job is decided (``settle``, pure), recorded in the queue and reported;
then the attempt's files are removed.

Ends that come together are recorded in one transaction, with what they say of the jobs' families and of the GPUs. Where
the disk is full they are kept and recorded later; until then nothing else happens to their jobs, and no new job is
started.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from gpuherd.errors import clean
from gpuherd.jobs.attempts import RECORD_AGAIN_S
from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass, back_off_s, classify, tail
from gpuherd.jobs.completion import Known, NextTry, Observed, Settlement
from gpuherd.jobs.gpu.health import MAY_BE_THE_GPU, GpuHealth
from gpuherd.jobs.job import JobState
from gpuherd.jobs.queue.schema import may_pass, why
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptState, Failure, QueuedJob, ResourceRequest
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory
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
    change = _climb(queued, seen) if rule.ladder and seen.gpus else _Change(queued.request)
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
        request=change.request,
        avoid=avoid,
        costs_try=costs,
        change="when there is space on the disk again" if waits_for_disk else change.sentence,
    )


@dataclass(frozen=True, slots=True)
class _Change:
    request: ResourceRequest
    is_asked_for: bool = False
    sentence: str | None = None
    too_small: bool = False


def _had_smaller_gpu(queued: QueuedJob, seen: Observed) -> bool:
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
        alone = ResourceRequest(gpus, queued.memory_mb if enough else memory_mb)
        return _Change(alone, is_asked_for=True, sentence="on a GPU for itself")
    if _had_smaller_gpu(queued, seen):
        sentence = f"on a GPU with {queued.memory_mb} MB, as it asked"
        return _Change(queued.request, is_asked_for=True, sentence=sentence, too_small=True)
    if seen.larger_exists and seen.gpu_total_mb is not None:
        larger = ResourceRequest(gpus, seen.gpu_total_mb + 1)
        return _Change(larger, sentence=f"on a GPU of more than {seen.gpu_total_mb} MB")
    most = queued.job.gpus_at_most
    if most is not None and gpus < most:
        more = min(2 * gpus, most)
        return _Change(ResourceRequest(more, queued.job.memory_mb), is_asked_for=True, sentence=f"on {more} GPUs")
    more_free = None if memory_mb == queued.memory_mb else f"on a GPU with {memory_mb} MB free"
    return _Change(ResourceRequest(gpus, memory_mb), sentence=more_free)


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
        same = NextTry(not_before=not_before, request=queued.request, avoid=queued.avoid, costs_try=False)
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


# --- ends are recorded --------------------------------------------------------------------------------------------

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
