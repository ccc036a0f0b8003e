"""What Ray's errors and states say about a parcel's end."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from gpuherd.engines.base import End, EngineAway, Refused
from gpuherd.errors import UsageError

exceptions = pytest.importorskip("ray.exceptions")


def ends() -> Any:
    from gpuherd.engines.ray import driver as ends

    return ends


def in_task(cause: Exception) -> Exception:
    error: Exception = exceptions.RayTaskError("work", "Traceback ...", cause)
    return error


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (lambda: exceptions.TaskCancelledError(), End.CANCELLED),
        (lambda: in_task(exceptions.TaskCancelledError()), End.CANCELLED),
        (lambda: exceptions.TaskPlacementGroupRemoved(), End.CANCELLED),
        (
            lambda: exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.\nMore."),
            End.OUT_OF_MEMORY,
        ),
        (lambda: exceptions.NodeDiedError("Task failed because the node is dead. Node IP: 1."), End.NODE_LOST),
        (lambda: exceptions.LocalRayletDiedError(), End.NODE_LOST),
        (lambda: exceptions.TaskUnschedulableError("gone"), End.NODE_LOST),
        (lambda: exceptions.WorkerCrashedError(), End.FAILED),
        (lambda: exceptions.RaySystemError("broken"), End.FAILED),
    ],
)
def test_errors_of_tasks(error: Any, end: End) -> None:
    found, reason = ends().end_of(error())
    assert found is end
    assert reason and "\n" not in reason and len(reason) < 400


def test_a_node_that_has_gone_was_not_unfit() -> None:
    assert ends().unfit(exceptions.NodeDiedError("Task failed because the node is dead.")) is None
    assert "No module named 'gpuherd'" in ends().unfit(in_task(ModuleNotFoundError("No module named 'gpuherd'")))


def test_what_a_task_raised_is_told_in_its_own_words() -> None:
    found, reason = ends().end_of(in_task(ModuleNotFoundError("No module named 'gpuherd'")))
    assert (found, reason) == (End.FAILED, "in Ray's worker: ModuleNotFoundError: No module named 'gpuherd'")


def test_exit_codes_of_leaders() -> None:
    codes = {(0, False): End.OK, (1, False): End.FAILED, (75, False): End.PREEMPTED, (75, True): End.TIME_UP}
    assert {given: ends().end_of_leader(given[0], time_was_up=given[1])[0] for given in codes} == codes


def job(status: str, **told: Any) -> Any:
    from ray.job_submission import JobDetails, JobStatus, JobType

    return JobDetails(type=JobType.SUBMISSION, status=JobStatus(status), entrypoint="exec x", **told)


@pytest.mark.parametrize(
    ("details", "end", "says"),
    [
        (("SUCCEEDED", {}), End.OK, None),
        (("STOPPED", {}), End.CANCELLED, "stopped"),
        (
            (
                "FAILED",
                {
                    "driver_exit_code": 73,
                    "message": "Job entrypoint command failed with exit code 73, last available logs (truncated to "
                    "20,000 chars):\nRunning entrypoint for job b-0: exec x\ncan't claim: Disk quota exceeded\n",
                },
            ),
            End.FAILED,
            "exit code 73: can't claim: Disk quota exceeded",
        ),
        (
            (
                "FAILED",
                {
                    "driver_exit_code": 1,
                    "message": "Job entrypoint command failed with exit code 1, last available logs (truncated to "
                    "20,000 chars):\nRunning entrypoint for job b-0: exec x\n",
                },
            ),
            End.FAILED,
            "its leader ended with exit code 1",
        ),
        (("FAILED", {"driver_exit_code": 124, "message": "x"}), End.TIME_UP, "time was up"),
        (("FAILED", {"driver_exit_code": 75, "message": "x"}), End.PREEMPTED, "made room"),
        (("FAILED", {"error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "message": "Gave up."}), End.NEVER, "Gave up"),
        (
            ("FAILED", {"error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "Its node died. x"}),
            End.NODE_LOST,
            "node died",
        ),
        (
            ("FAILED", {"error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "killed: out of memory"}),
            End.OUT_OF_MEMORY,
            "memory",
        ),
        (
            ("FAILED", {"error_type": "RUNTIME_ENV_SETUP_FAILURE", "message": "a\nno such venv"}),
            End.FAILED,
            "no such venv",
        ),
    ],
)
def test_jobs_of_the_job_server(details: tuple[str, dict[str, Any]], end: End, says: str | None) -> None:
    status, told = details
    found, reason = ends().end_of_job(job(status, **told))
    assert found is end
    assert reason is None if says is None else says in reason


def test_what_ray_alone_has_written_into_a_log_is_nothing() -> None:
    assert (
        ends().said("2026-01-01 INFO job_manager.py:581 -- Runtime env\nRunning entrypoint for job x: exec y\n") == ""
    )
    assert ends().said("Running entrypoint for job x: exec y\n\x1b[31mno such file\x1b[0m\n") == "no such file"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (exceptions.RaySystemError("The head is gone. Look into the logs.\nmore"), "System error: The head is gone"),
        (
            RuntimeError(
                "Request failed with status code 500: Traceback (most recent call last):\n"
                '  File "job_head.py", line 5, in submit\n    x()\nValueError: no such node.'
            ),
            "Request failed with status code 500: ValueError: no such node.",
        ),
        (in_task(ValueError("bad")), "ValueError: bad"),
        (ConnectionError(), "ConnectionError"),
    ],
)
def test_messages_have_no_stack_frames(error: Exception, told: str) -> None:
    assert ends().in_short(error) == told


def test_a_bug_next_to_ray_is_told_by_its_last_line() -> None:
    from gpuherd.engines.ray.driver import bug

    error = bug(KeyError(5))
    assert str(error) == "the process next to Ray has failed: KeyError: 5" and "KeyError: 5" in error.__notes__[0]


def test_errors_come_through_the_channel_as_they_are() -> None:
    for error in (Refused("no", may_pass=True), EngineAway("gone"), UsageError("wrong")):
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)
