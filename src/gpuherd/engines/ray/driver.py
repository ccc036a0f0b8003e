"""The process next to Ray: ``python -m gpuherd.engines.ray.driver DESCRIPTOR``. It joins or starts a
cluster and answers the dispatcher's queries.
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

import ray
from ray.exceptions import AuthenticationError, RayError

from gpuherd.engines.base import EngineAway
from gpuherd.engines.ray.engine import refused_token
from gpuherd.engines.ray.messages import SETUP, Address, Answer, Kind, Question, RayClient, Setup, answers
from gpuherd.engines.ray.resources import NodeRoom, in_short
from gpuherd.errors import GpuherdError, UsageError

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


def rooms() -> list[NodeRoom]:
    """The nodes that are alive, with their total and free resources. Raises EngineAway."""
    from ray._private.state import available_resources_per_node  # no public function gives it by node

    try:
        free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        return [
            NodeRoom(node["NodeManagerHostname"], node["Resources"], free.get(node["NodeID"], {}))
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
        told = json.loads(_internal_kv_get("__autoscaling_status") or b"{}").get("autoscaler_report") or {}
        return any(_NO_TYPE.fullmatch(each) is None for each in {**(told.get("active_nodes") or {})})
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


# The process next to Ray: ``python -m gpuherd.engines.ray.driver DESCRIPTOR``. It answers the dispatcher's questions
# over a socket until that is closed, which it also is when the dispatcher dies.


def serve(connection: Connection) -> None:
    """Answers until the dispatcher has gone; then leaves Ray as it was found."""
    client: RayClient | None = None
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


def _open(setup: Setup) -> RayClient:
    if setup.address.kind is Kind.SERVER:
        from gpuherd.engines.ray.job_server import JobServer

        return JobServer(setup)
    from gpuherd.engines.ray.tasks import Tasks

    return Tasks(setup)


def main() -> None:
    """The command."""
    # The end of the dispatcher is noticed as the end of the socket, while Ray still runs and can be left in order.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
