"""What becomes of a job after an attempt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.attempts import attempt_of

from gpuherd.engines.local.process import Exit
from gpuherd.jobs.attempts.complete import settle
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed
from gpuherd.jobs.completion import Known, NoFault, Observed
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.records import AttemptState, QueuedJob, ResourceRequest


def queued(tries: int = 0, retries: int = 1, avoid: frozenset[str] = frozenset()) -> QueuedJob:
    job = Job(name="j", argv=("x",), retries=retries, timeout_s=9.0, result="/r")
    return QueuedJob(1, job, tries, tries, 0.0, avoid, 0.0)


def known(job: QueuedJob, *, at: float = 100.0, **more: Any) -> Known:
    return Known(record=attempt_of(job, 1), at=at, mono=at, **more)


def test_success_and_no_result() -> None:
    done = settle(known(queued(), exit=Exit(True, 0), at=100.0))
    assert (done.attempt, done.job, done.reason) == (AttemptState.DONE, JobState.DONE, None)
    empty = settle(known(queued(retries=0), exit=Exit(True, 0), has_result=False, at=100.0))
    assert (empty.job, empty.diagnosis and empty.diagnosis.failure) == (JobState.FAILED, FailureClass.NO_RESULT)


@pytest.mark.parametrize("why", list(NoFault))
def test_a_blameless_end_costs_no_try(why: NoFault) -> None:
    again = settle(known(queued(tries=1, retries=1), exit=Exit(True, signal=15), no_fault=why, at=100.0))
    assert (again.attempt, again.job, again.costs_try) == (AttemptState.REQUEUED, JobState.WAITING, False)
    assert again.again is not None and again.again.not_before == 0.0


def test_a_job_that_succeeded_while_it_was_being_stopped_is_done() -> None:
    assert settle(known(queued(), exit=Exit(True, 0), no_fault=NoFault.STOPPED, at=1.0)).job is JobState.DONE


def test_a_retry_goes_elsewhere_after_a_pause() -> None:
    ended = known(queued(avoid=frozenset({"GPU-b"})), exit=Exit(True, 71), observed=Observed(gpus=("GPU-a",)))
    again = settle(ended)
    assert (again.attempt, again.job) == (AttemptState.FAILED, JobState.WAITING)
    assert again.again is not None and again.again.not_before == 101.0
    assert again.avoid == {"GPU-a", "GPU-b"}


def test_a_cancelled_job_ends_for_good_unless_it_had_succeeded() -> None:
    ended = settle(known(queued(), exit=Exit(True, signal=15), cancelled_by="alice", at=1.0))
    assert (ended.attempt, ended.job, ended.reason) == (
        AttemptState.REQUEUED,
        JobState.CANCELLED,
        "cancelled by alice",
    )
    assert settle(known(queued(), exit=Exit(True, 0), cancelled_by="alice", at=1.0)).job is JobState.DONE
    # Cancelled, and the run is stopped before it has ended: it does not come back with the next run.
    both = known(queued(), exit=Exit(True, signal=15), cancelled_by="alice", no_fault=NoFault.STOPPED)
    assert settle(both).job is JobState.CANCELLED


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        (LimitKind.WHOLE, FailureClass.TIMEOUT),
        (LimitKind.STAGE, FailureClass.TIMEOUT),
        (LimitKind.HEARTBEAT, FailureClass.NO_HEARTBEAT),
    ],
)
def test_each_limit_has_its_class(kind: LimitKind, failure: FailureClass) -> None:
    ended = settle(known(queued(), exit=Exit(True, signal=15), passed=Passed(kind, 5.0, "loading"), at=1.0))
    assert ended.diagnosis is not None
    assert ended.diagnosis.failure is failure
    assert "5 s" in ended.diagnosis.reason


def test_more_memory_is_asked_for_where_there_is_a_larger_gpu() -> None:
    observed = Observed(gpus=("GPU-a",), gpu_total_mb=8192, larger_exists=True)
    ended = settle(known(queued(), exit=Exit(True, 71), observed=observed, at=1.0))
    assert ended.adapted == ResourceRequest(1, 8193, False)


@given(st.integers(0, 5), st.integers(0, 5), st.one_of(st.none(), st.integers(1, 255)), st.booleans(), st.booleans())
def test_tries_are_never_exceeded(tries: int, retries: int, code: int | None, started: bool, timed_out: bool) -> None:
    passed = Passed(LimitKind.WHOLE, 9.0) if timed_out else None
    settlement = settle(known(queued(tries, retries), exit=Exit(started, code), passed=passed))
    assert settlement.diagnosis is not None
    waits = settlement.job is JobState.WAITING
    assert waits == (settlement.diagnosis.retry and tries < retries)
