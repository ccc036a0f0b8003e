"""What becomes of a job after an attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.engines.local.process import Exit
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.attempts.retry import Blameless, Facts, Seen, settle
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.records import AttemptState, QueuedJob, Request


def queued(tries: int = 0, retries: int = 1, avoid: frozenset[str] = frozenset()) -> QueuedJob:
    job = Job(name="j", argv=("x",), retries=retries, timeout_s=9.0, result="/r")
    return QueuedJob(1, job, tries, tries, 0.0, avoid, 0.0)


def test_success_and_no_result() -> None:
    done = settle(queued(), Facts(exit=Exit(True, 0)), 100.0)
    assert (done.attempt, done.job, done.reason) == (AttemptState.DONE, JobState.DONE, None)
    empty = settle(queued(retries=0), Facts(exit=Exit(True, 0), has_result=False), 100.0)
    assert (empty.job, empty.diagnosis and empty.diagnosis.failure) == (JobState.FAILED, FailureClass.NO_RESULT)


@pytest.mark.parametrize("why", list(Blameless))
def test_a_blameless_end_costs_no_try(why: Blameless) -> None:
    again = settle(queued(tries=1, retries=1), Facts(exit=Exit(True, signal=15), blameless=why), 100.0)
    assert (again.attempt, again.job, again.not_before) == (AttemptState.REQUEUED, JobState.WAITING, 0.0)


def test_a_job_that_succeeded_while_it_was_being_stopped_is_done() -> None:
    assert settle(queued(), Facts(exit=Exit(True, 0), blameless=Blameless.STOPPED), 1.0).job is JobState.DONE


def test_a_retry_goes_elsewhere_after_a_pause() -> None:
    facts = Facts(exit=Exit(True, 71), seen=Seen(gpus=("GPU-a",)))
    again = settle(queued(avoid=frozenset({"GPU-b"})), facts, 100.0)
    assert (again.attempt, again.job) == (AttemptState.FAILED, JobState.WAITING)
    assert again.not_before == 101.0
    assert again.avoid == {"GPU-a", "GPU-b"}


def test_a_cancelled_job_ends_for_good_unless_it_had_succeeded() -> None:
    ended = settle(queued(), Facts(exit=Exit(True, signal=15), cancelled_by="alice"), 1.0)
    assert (ended.attempt, ended.job, ended.reason) == (
        AttemptState.REQUEUED,
        JobState.CANCELLED,
        "cancelled by alice",
    )
    assert settle(queued(), Facts(exit=Exit(True, 0), cancelled_by="alice"), 1.0).job is JobState.DONE
    # Cancelled, and the run is stopped before it has ended: it does not come back with the next run.
    both = Facts(exit=Exit(True, signal=15), cancelled_by="alice", blameless=Blameless.STOPPED)
    assert settle(queued(), both, 1.0).job is JobState.CANCELLED


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        (LimitKind.WHOLE, FailureClass.TIMEOUT),
        (LimitKind.STAGE, FailureClass.TIMEOUT),
        (LimitKind.HEARTBEAT, FailureClass.NO_HEARTBEAT),
    ],
)
def test_each_limit_has_its_class(kind: LimitKind, failure: FailureClass) -> None:
    ended = settle(queued(), Facts(exit=Exit(True, signal=15), passed=Passed(kind, 5.0, "loading")), 1.0)
    assert ended.diagnosis is not None
    assert ended.diagnosis.failure is failure
    assert "5 s" in ended.diagnosis.reason


def test_more_memory_is_asked_for_where_there_is_a_larger_gpu() -> None:
    seen = Seen(gpus=("GPU-a",), gpu_total_mb=8192, larger_exists=True)
    ended = settle(queued(), Facts(exit=Exit(True, 71), seen=seen), 1.0)
    assert ended.adapted == Request(1, 8193, False)


@given(st.integers(0, 5), st.integers(0, 5), st.one_of(st.none(), st.integers(1, 255)), st.booleans(), st.booleans())
def test_tries_are_never_exceeded(tries: int, retries: int, code: int | None, started: bool, timed_out: bool) -> None:
    facts = Facts(exit=Exit(started, code), passed=Passed(LimitKind.WHOLE, 9.0) if timed_out else None)
    settlement = settle(queued(tries, retries), facts, 1.0)
    assert settlement.diagnosis is not None
    waits = settlement.job is JobState.WAITING
    assert waits == (settlement.diagnosis.retry and tries < retries)
