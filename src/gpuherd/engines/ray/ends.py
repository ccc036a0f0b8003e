"""What an error of a task, or the state of a job of the job server, says about a parcel's end. Knows Ray's words."""

from __future__ import annotations

import re

from ray import exceptions
from ray.job_submission import JobDetails

from gpuherd.engines.cluster import End
from gpuherd.errors import ExitCode

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 300
_MADE_ROOM = ExitCode.BUSY  # as a leader ends that was asked to
_TIMEOUT = 124  # as the program ``timeout`` ends that has asked it
_OF_RAY = re.compile(r"^Running entrypoint for job |INFO job_manager\.py|^\(truncated to |^No logs available")


def end_of(error: BaseException) -> tuple[End, str]:
    """How a task ended that did not come to its end, and why in Ray's words."""
    cause = error
    if isinstance(error, exceptions.RayTaskError):
        cause = getattr(error, "cause", None) or error
    if isinstance(cause, exceptions.TaskCancelledError):
        return End.CANCELLED, "cancelled in Ray"
    if isinstance(cause, exceptions.TaskPlacementGroupRemoved):
        return End.CANCELLED, "its placement group was removed in Ray"
    if isinstance(cause, exceptions.OutOfMemoryError):
        return End.OUT_OF_MEMORY, _first_line(str(cause))
    if isinstance(
        cause, exceptions.NodeDiedError | exceptions.LocalRayletDiedError | exceptions.TaskUnschedulableError
    ):
        return End.NODE_LOST, _first_line(str(cause))
    if isinstance(cause, exceptions.WorkerCrashedError):
        return End.FAILED, "Ray's worker died while it led the job"
    if isinstance(error, exceptions.RayTaskError):
        return End.FAILED, f"in Ray's worker: {type(cause).__name__}: {_last_line(str(cause))}"
    return End.FAILED, f"{type(cause).__name__}: {_first_line(str(cause))}"


def unfit(error: BaseException) -> str | None:
    """Why a node has not done what it was asked for as a trial, in Ray's words; None where it has gone meanwhile."""
    end, reason = end_of(error)
    return None if end is End.NODE_LOST else reason


def end_of_leader(code: int, *, time_was_up: bool) -> tuple[End, str | None]:
    """What the exit code of an attempt's leader says."""
    if code == 0:
        return End.OK, None
    if code == _MADE_ROOM:
        return (End.TIME_UP, "its time was up") if time_was_up else (End.PREEMPTED, "it has made room")
    return End.FAILED, f"its leader ended with exit code {code}"


def end_of_job(job: JobDetails) -> tuple[End, str | None]:
    """How a job of the job server ended."""
    status, kind = str(job.status.value), str(getattr(job, "error_type", None))
    words = _COLOURS.sub("", job.message or "")
    if status == "SUCCEEDED":
        return End.OK, None
    if status == "STOPPED":
        return End.CANCELLED, "stopped in Ray"
    if "START_TIMEOUT" in kind:
        return End.NEVER, f"Ray has given up waiting for its resources: {_first_line(words)}"
    if "ACTOR_DIED" in kind:
        if re.search(r"out of memory|OutOfMemory|memory pressure", words):
            return End.OUT_OF_MEMORY, _first_line(words)
        # Nothing but its node's end takes a supervisor away: it runs nothing but a shell's child.
        return End.NODE_LOST, _first_line(words)
    if job.driver_exit_code is None:
        return End.FAILED, _last_line(words) or None
    if job.driver_exit_code in (_MADE_ROOM, _TIMEOUT):
        return end_of_leader(_MADE_ROOM, time_was_up=job.driver_exit_code == _TIMEOUT)
    end, reason = end_of_leader(job.driver_exit_code, time_was_up=False)
    last = said(words.partition("logs")[2])
    return end, f"{reason}: {last}" if last else reason


def said(log: str) -> str:
    """The last line of what a job has printed, "" for what Ray alone has written into its log."""
    lines = [line.strip() for line in _COLOURS.sub("", log).splitlines() if line.strip()]
    own = [line for line in lines if not _OF_RAY.search(line)]
    return own[-1][:_LONGEST] if own else ""


def in_short(error: BaseException) -> str:
    """What an error says, in one line: Ray puts stack frames and a page of advice into some."""
    cause = getattr(error, "cause", None) if isinstance(error, exceptions.RayTaskError) else None
    if cause is not None:
        return f"{type(cause).__name__}: {_last_line(str(cause))}"
    text = str(error)
    head, frames, rest = text.partition("Traceback (most recent call last)")
    if frames:
        before = _first_line(head.rstrip(" :\n"))
        return f"{before}: {_last_line(rest)}" if before else _last_line(rest)
    return _first_line(text) or type(error).__name__


def _first_line(text: str) -> str:
    """The first sentence of it: Ray goes on with advice for a page."""
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    return re.split(r"\.(?:\s|$)", lines[0], maxsplit=1)[0][:_LONGEST] if lines else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    return lines[-1][:_LONGEST] if lines else ""
