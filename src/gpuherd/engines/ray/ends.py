"""What an error of a task, or the state of a job of the job server, says about a parcel's end. Knows Ray's words."""

from __future__ import annotations

import re

from ray import exceptions

from gpuherd.engines.cluster import End

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 300
_NODE_IS_GONE = re.compile(r"node (?:it was running on |has )?(?:is dead|was terminated|died|has died)|node.{0,80} died")


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
    if isinstance(cause, exceptions.NodeDiedError | exceptions.LocalRayletDiedError | exceptions.TaskUnschedulableError):
        return End.NODE_LOST, _first_line(str(cause))
    if isinstance(cause, exceptions.WorkerCrashedError):
        return End.FAILED, "Ray's worker died while it led the job"
    if isinstance(error, exceptions.RayTaskError):
        return End.FAILED, f"in Ray's worker: {type(cause).__name__}: {_last_line(str(cause))}"
    return End.FAILED, f"{type(cause).__name__}: {_first_line(str(cause))}"


def end_of_job(status: str, error_type: str | None, message: str | None) -> tuple[End, str | None]:
    """How a job of the job server ended."""
    words = _COLOURS.sub("", message or "")
    if status == "SUCCEEDED":
        return End.OK, None
    if status == "STOPPED":
        return End.CANCELLED, "stopped in Ray"
    if error_type == "JOB_SUPERVISOR_ACTOR_START_TIMEOUT":
        return End.NEVER, f"Ray has given up waiting for its resources: {_first_line(words)}"
    if error_type == "JOB_SUPERVISOR_ACTOR_DIED":
        lost = _NODE_IS_GONE.search(words) is not None
        if not lost and re.search(r"out of memory|OOM|memory pressure", words):
            return End.OUT_OF_MEMORY, _first_line(words)
        return (End.NODE_LOST if lost else End.FAILED), _first_line(words)
    return End.FAILED, _last_line(words) or None


def _first_line(text: str) -> str:
    """The first sentence of it: Ray goes on with advice for a page."""
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    return re.split(r"\.(?:\s|$)", lines[0], maxsplit=1)[0][:_LONGEST] if lines else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    return lines[-1][:_LONGEST] if lines else ""
