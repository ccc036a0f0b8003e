"""A parcel's request in Ray's terms, and the meaning of Ray's errors and states. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from ray import exceptions
from ray.job_submission import JobDetails

from gpuherd.engines.base import End, Placement
from gpuherd.errors import ExitCode, UsageError

# The resources of a parcel in Ray's terms, whether any node could ever grant them, and why it waits.

GPU, CPU, MEMORY = "GPU", "CPU", "memory"
# Ray's own names, each with the flag that requests it.
_OWN = {"GPU": "--gpus-per-job", "CPU": "--cpus-per-job", "memory": "--host-mem", "object_store_memory": "nothing here"}
_MB = 2**20
_FLAGS = {GPU: "--gpus-per-job", CPU: "--cpus-per-job", MEMORY: "--host-mem"}


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node that is alive: its total and free resources by Ray's names; memory in bytes."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def custom(words: Iterable[str]) -> dict[str, float]:
    """Custom resources from words like ``licence=1``. Raises UsageError."""
    found: dict[str, float] = {}
    for word in words:
        name, sign, amount = word.rpartition("=")
        if not sign or not name:
            raise UsageError(f"--ray-resources {word!r}: it is NAME=AMOUNT, like licence=1")
        if name in _OWN:
            raise UsageError(f"--ray-resources {word!r}: {name} is asked for by {_OWN[name]}")
        if name in found:
            raise UsageError(f"--ray-resources names {name!r} twice")
        found[name] = _amount(word, amount)
    return found


def _amount(word: str, amount: str) -> float:
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf or (value > 1 and value != int(value)):
        raise UsageError(f"--ray-resources {word!r}: the amount is a whole number, or a part of 1 like 0.5")
    return value


def wanted(placement: Placement, extra: Mapping[str, float], *, cpus: float) -> dict[str, float]:
    """The resources that it takes on each of its nodes. ``cpus``: Ray's default."""
    asked = {
        GPU: float(placement.gpus),
        CPU: float(cpus if placement.cpus is None else placement.cpus),
        MEMORY: float((placement.memory_mb or 0) * _MB),
        **extra,
    }
    return {name: amount for name, amount in asked.items() if amount > 0}


def turn_of(placement: Placement, notice_s: float) -> float | None:
    """Seconds after which a parcel is asked to make room; Ray itself has no time limit."""
    if placement.time_s is None:
        return None
    return placement.time_s - notice_s if placement.time_s > notice_s else placement.time_s


def never(placement: Placement, asked: Mapping[str, float], nodes: Collection[NodeRoom]) -> str | None:
    """Why these nodes can never grant it; None where they can once it is free."""
    able = sum(_fits(asked, node.total) for node in nodes)
    if able >= placement.nodes:
        return None
    if not nodes:
        return "the Ray cluster has no node that is alive"
    if able:
        return (
            f"it asks for {placement.nodes} nodes with {_words(asked)} each, and {able} of the Ray cluster's "
            f"{len(nodes)} nodes {'has' if able == 1 else 'have'} that; ask for fewer nodes"
        )
    lacking = [name for name in asked if max(node.total.get(name, 0.0) for node in nodes) < asked[name]]
    names = lacking or list(asked)
    most = {name: max(node.total.get(name, 0.0) for node in nodes) for name in names}
    flags = " and ".join(_FLAGS.get(name, f"--ray-resources {name}=…") for name in names)
    if lacking:
        had = f"the most that any of the Ray cluster's {_count(len(nodes))} has is {_words(most)}"
    else:
        had = f"no single one of the Ray cluster's {_count(len(nodes))} has all of that"
    return (
        f"it asks for {_words({name: asked[name] for name in names})} on one node, and {had}; ask for less by {flags}"
    )


def refused(
    placements: Iterable[Placement], asked: Callable[[Placement], Mapping[str, float]], nodes: Collection[NodeRoom]
) -> dict[Placement, str]:
    """Those placements that these nodes can never grant, and why. ``asked``: a placement's resources in Ray's terms."""
    reasons = ((each, never(each, asked(each), nodes)) for each in placements)
    return {each: reason for each, reason in reasons if reason is not None}


def waits_for(count: int, asked: Mapping[str, float], nodes: Collection[NodeRoom]) -> str:
    """Why a parcel that Ray has not placed waits."""
    if sum(_fits(asked, node.total) for node in nodes) < count:
        return f"Ray has no node with {_words(asked)} now; it starts when one joins"
    able = sum(_fits(asked, node.free) for node in nodes)
    if able >= count:
        return "Ray is about to start it"
    if count > 1:
        return f"waits for {count} nodes with {_words(asked)} free on each; {able} of {len(nodes)} have that"
    short = [name for name in asked if max(node.free.get(name, 0.0) for node in nodes) < asked[name]]
    if not short:
        return f"waits for {_words(asked)} on one node: they are free, but on different ones"
    most = {name: max(node.free.get(name, 0.0) for node in nodes) for name in short}
    return f"waits for {_words({name: asked[name] for name in short})}; at most {_words(most)} free on one node"


def _fits(asked: Mapping[str, float], room: Mapping[str, float]) -> bool:
    return all(room.get(name, 0.0) >= amount for name, amount in asked.items())


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _words(amounts: Mapping[str, float]) -> str:
    """``2 GPUs, 16 CPUs and 30.0 GB of memory``."""
    words = [_amount_words(name, amount) for name, amount in amounts.items()]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _amount_words(name: str, amount: float) -> str:
    if name == MEMORY:
        return f"{amount / 2**30:.1f} GB of memory"
    unit = name if name not in (GPU, CPU) or amount == 1 else f"{name}s"
    return f"{amount:g} {unit}"


# A parcel's end, from the error of a task or from the state of a job of the job server.

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 300
_MADE_ROOM = ExitCode.BUSY  # as a leader exits that made room
_TIMEOUT = 124  # as the program ``timeout`` exits
_OF_RAY = re.compile(r"^Running entrypoint for job |INFO job_manager\.py|^\(truncated to |^No logs available")


def end_of(error: BaseException) -> tuple[End, str]:
    """How a task ended that raised an error, and why in Ray's words."""
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
    """Why a node failed the trial task, in Ray's words; None where the node has gone meanwhile."""
    end, reason = end_of(error)
    return None if end is End.NODE_LOST else reason


def end_of_leader(code: int, *, time_was_up: bool) -> tuple[End, str | None]:
    """The end that the exit code of an attempt's leader means."""
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
        # A supervisor ends only with its node: it runs nothing but a shell's child.
        return End.NODE_LOST, _first_line(words)
    if job.driver_exit_code is None:
        return End.FAILED, _last_line(words) or None
    if job.driver_exit_code in (_MADE_ROOM, _TIMEOUT):
        return end_of_leader(_MADE_ROOM, time_was_up=job.driver_exit_code == _TIMEOUT)
    end, reason = end_of_leader(job.driver_exit_code, time_was_up=False)
    last = said(words.partition("logs")[2])
    return end, f"{reason}: {last}" if last else reason


def said(log: str) -> str:
    """The last line of a job's output; "" where Ray alone has written into its log."""
    lines = [line.strip() for line in _COLOURS.sub("", log).splitlines() if line.strip()]
    own = [line for line in lines if not _OF_RAY.search(line)]
    return own[-1][:_LONGEST] if own else ""


def in_short(error: BaseException) -> str:
    """An error in one line: Ray puts stack frames and a page of advice into some."""
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
    """The first sentence; Ray follows it with a page of advice."""
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    return re.split(r"\.(?:\s|$)", lines[0], maxsplit=1)[0][:_LONGEST] if lines else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    return lines[-1][:_LONGEST] if lines else ""
