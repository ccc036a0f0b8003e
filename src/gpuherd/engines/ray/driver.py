"""The process next to Ray: ``python -m gpuherd.engines.ray.driver DESCRIPTOR`` joins or starts a cluster and answers
queries of the dispatcher over a socket until that is closed, which it also is when the dispatcher dies. With ``look
ADDRESS`` it joins that cluster and prints its totals as JSON, for the doctor.

Also here: the meaning of Ray's errors and of the states of its jobs.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import exceptions
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobDetails

from gpuherd.engines.base import End, EngineAway
from gpuherd.engines.ray.cluster import LOOK, Address, ClusterKind, NodeCapacity, answers
from gpuherd.engines.ray.engine import SETUP, Answer, Question, Setup, refused_token
from gpuherd.errors import ExitCode, GpuherdError, UsageError

if TYPE_CHECKING:
    from gpuherd.engines.ray.job_server import JobServer
    from gpuherd.engines.ray.tasks import Tasks

# Joins a Ray cluster as a driver, or starts one of our own on this machine. A cluster that was joined is left as it was
# found; of one of our own nothing is left.

# Nothing but exit codes goes through Ray's object store; this is the least that it takes.
_STORE_BYTES = 80 * 2**20
_QUIET = {"log_to_driver": False, "logging_level": "ERROR"}
# How the monitor names a node's type where no autoscaler has given it another name.
_NO_TYPE = re.compile(r"node_[0-9a-f]{56}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that we are connected to. ``folder``: of one of our own; None for one that ran already."""

    address: str
    folder: Path | None

    def leave(self) -> None:
        """Disconnects, or shuts the cluster down with all its processes and files."""
        with suppress(RayError, OSError):
            ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def connect(address: Address, folder: Path | None) -> Cluster:
    """Joins the cluster, or with a folder for its files starts one of our own. Raises EngineAway when nothing answers,
    UsageError for another version or a refused token."""
    return _join(address.text) if folder is None else _start(folder)


def rooms() -> list[NodeCapacity]:
    """The nodes that are alive, with their total and free resources. Raises EngineAway."""
    from ray._private.state import available_resources_per_node  # no public function gives it by node

    try:
        free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        return [
            NodeCapacity(node["NodeManagerHostname"], node["Resources"], free.get(node["NodeID"], {}))
            for node in ray.nodes()
            if node["Alive"]
        ]
    except (RayError, OSError) as problem:
        raise EngineAway(f"the Ray cluster does not answer: {in_short(problem)}") from problem


def grows() -> bool:
    """Whether an autoscaler can add nodes, perhaps larger ones."""
    from ray._private.state import state
    from ray.experimental.internal_kv import _internal_kv_get

    with suppress(RayError, OSError, AttributeError):
        config = state.get_cluster_config()
        if config is not None and config.node_group_configs:
            return True
    with suppress(RayError, OSError, ValueError, TypeError, AttributeError):
        report = json.loads(_internal_kv_get("__autoscaling_status") or b"{}").get("autoscaler_report") or {}
        return any(_NO_TYPE.fullmatch(each) is None for each in {**(report.get("active_nodes") or {})})
    return False


def _start(folder: Path) -> Cluster:
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=str(folder),
            **_QUIET,
        )
    except Exception as problem:  # Ray also raises plain ones, as for a node that does not start in time
        shutil.rmtree(folder, ignore_errors=True)
        raise EngineAway(f"can't start a Ray cluster on this machine: {in_short(problem)}") from problem
    return Cluster("local", folder)


def _join(address: str) -> Cluster:
    if not answers(address):
        raise EngineAway(f"no Ray cluster answers at {address} (ray start --head starts one)")
    try:
        ray.init(address=address, **_QUIET)
    except AuthenticationError as problem:
        raise UsageError(refused_token(f"the Ray cluster at {address}")) from problem
    except RuntimeError as problem:
        raise UsageError(_mismatch(address, problem)) from problem
    except (RayError, OSError, ValueError) as problem:
        raise EngineAway(
            f"can't join the Ray cluster at {address}: {in_short(problem)}; it can be joined from its own machines "
            "only, from others by its job server (http://HOST:8265)"
        ) from problem
    return Cluster(address, None)


def _mismatch(address: str, problem: RuntimeError) -> str:
    """One sentence for versions that differ; Ray takes ten lines."""
    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(problem))
    if len(versions) < 2:
        return f"can't join the Ray cluster at {address}: {in_short(problem)}"
    (theirs, their_python), (ours, our_python) = versions[:2]
    return (
        f"the Ray cluster at {address} runs Ray {theirs} with Python {their_python}, and here is Ray {ours} with "
        f"Python {our_python}; use the cluster's versions here (pip install 'ray[default]=={theirs}')"
    )


# --- a parcel's end, from the error of a task or from the state of a job of the job server ----------------------------

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 300
_MADE_ROOM = ExitCode.BUSY  # as a leader exits that made room
_TIMEOUT = 124  # as the program ``timeout`` exits
_OF_RAY = re.compile(r"^Running entrypoint for job |INFO job_manager\.py|^\(truncated to |^No logs available")


# How a task ended that raised one of these, and why; None for Ray's own words.
_ENDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], End, str | None], ...] = (
    (exceptions.TaskCancelledError, End.CANCELLED, "cancelled in Ray"),
    (exceptions.TaskPlacementGroupRemoved, End.CANCELLED, "its placement group was removed in Ray"),
    (exceptions.OutOfMemoryError, End.OUT_OF_MEMORY, None),
    (
        (exceptions.NodeDiedError, exceptions.LocalRayletDiedError, exceptions.TaskUnschedulableError),
        End.NODE_LOST,
        None,
    ),
    (exceptions.WorkerCrashedError, End.FAILED, "Ray's worker died while it led the job"),
)


def end_of(error: BaseException) -> tuple[End, str]:
    """How a task ended that raised an error, and why in Ray's words."""
    cause = error
    if isinstance(error, exceptions.RayTaskError):
        cause = getattr(error, "cause", None) or error
    for kinds, end, reason in _ENDS:
        if isinstance(cause, kinds):
            return end, reason or _first_line(str(cause))
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
    own = [line for line in _lines(log) if not _OF_RAY.search(line)]
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


def _lines(text: str) -> list[str]:
    return [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]


def _first_line(text: str) -> str:
    """The first sentence; Ray follows it with a page of advice."""
    lines = _lines(text)
    return re.split(r"\.(?:\s|$)", lines[0], maxsplit=1)[0][:_LONGEST] if lines else ""


def _last_line(text: str) -> str:
    lines = _lines(text)
    return lines[-1][:_LONGEST] if lines else ""


# --- the process ------------------------------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """Answers until the dispatcher has gone; then leaves Ray as it was found."""
    client: Tasks | JobServer | None = None
    try:
        while True:
            try:
                question: Question = connection.recv()
            except (EOFError, OSError):
                return
            method, argument = question
            answer: Answer
            try:
                if method == SETUP:
                    client = _open(argument)
                    answer = True, None
                else:
                    answer = True, getattr(client, method)(argument)
            except GpuherdError as problem:
                answer = False, problem
            except Exception as problem:
                answer = False, bug(problem)
            try:
                connection.send(answer)
            except OSError:
                return
    finally:
        if client is not None:
            client.close()


def bug(problem: Exception) -> RuntimeError:
    """An unforeseen error for the dispatcher, which may be unable to load the original."""
    lines = traceback.format_exception(problem)
    error = RuntimeError(f"the process next to Ray has failed: {lines[-1].strip()}")
    error.add_note("".join(lines))
    return error


def _open(setup: Setup) -> Tasks | JobServer:
    if setup.address.kind is ClusterKind.SERVER:
        from gpuherd.engines.ray.job_server import JobServer

        return JobServer(setup)
    from gpuherd.engines.ray.tasks import Tasks

    return Tasks(setup)


def look(address: str) -> dict[str, Any]:
    """The totals of a cluster that this process joins and leaves."""
    try:
        cluster = connect(Address(ClusterKind.JOINED, address), None)
        try:
            there = rooms()
        finally:
            cluster.leave()
    except GpuherdError as problem:
        return {"error": str(problem)}
    totals = [room.total for room in there]
    gpus, cores = (sum(total.get(name, 0.0) for total in totals) for name in ("GPU", "CPU"))
    return {"nodes": len(there), "gpus": gpus, "cpus": cores}


def main() -> None:
    """The command."""
    if sys.argv[1] == LOOK:
        sys.stdout.write(json.dumps(look(sys.argv[2])) + "\n")
        return
    # The end of the dispatcher is noticed as the end of the socket, while Ray still runs and can be left in order.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
