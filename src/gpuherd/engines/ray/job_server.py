"""Parcels as jobs of Ray's job server: they go on when the dispatcher dies, and are found again by their names. Runs in
the process next to Ray.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from gpuherd.engines.base import Batch, End, EngineAway, Phase, Placement, Refused, Sighting
from gpuherd.engines.ray.cluster import CPU, GPU, MEMORY, NodeCapacity, refused, resources_per_node, turn_of
from gpuherd.engines.ray.driver import end_of_job, in_short, said
from gpuherd.engines.ray.engine import Setup, handle_of, refused_token
from gpuherd.errors import UsageError

# Seconds between Ray's SIGTERM to a job that is stopped and its SIGKILL. The job's own grace, which its leader keeps,
# is shorter.
_STOP_WAIT_S = 300
_FOLDER = "gpuherd_folder"
_SPANNING = (
    "Ray's job server gives a job one node; one over several needs a cluster that is joined, from one of its own "
    "machines (--ray-address HOST:PORT, the port that `ray start --head` has named, else 6379)"
)
_MOST_NODES = 10_000
# The server gives the same reason for every waiting job: its resources or its environment.
_WAITS_FOR = "Ray has not started it yet: it waits for its resources, or is being set up"
_WAITS = {JobStatus.PENDING: Phase.WAITING, JobStatus.RUNNING: Phase.RUNNING}


class JobServer:
    """A cluster by the address of its job server. Raises as ``driver.connect``."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._url = setup.address.text
        with self._errors_translated():
            self._client = JobSubmissionClient(self._url)
        self._fetched: set[str] = set()

    def check(self, placements: tuple[Placement, ...]) -> dict[Placement, str]:
        """As ``Engine.check``; a cluster with an autoscaler is expected to grow."""
        found = {each: _SPANNING for each in placements if each.nodes > 1}
        with self._errors_translated():
            if self._grows():
                return found
            nodes = [
                NodeCapacity(node.node_name, node.resources_total or {}, {})
                for node in list_nodes(address=self._url, limit=_MOST_NODES, raise_on_missing_output=False)
                if node.state == "ALIVE"
            ]
        return refused(placements, self._resources, nodes) | found

    def submit(self, batch: Batch) -> list[str]:
        """As ``Engine.submit``. Jobs that the server has by these names already are not submitted again."""
        asked = self._resources(batch.placement)
        extra = {name: amount for name, amount in asked.items() if name not in (GPU, CPU, MEMORY)}
        turn_s = turn_of(batch.placement, self._setup.notice_s)
        handles: list[str] = []
        for index, parcel in enumerate(batch.parcels):
            handle = handle_of(batch.name, index)
            with self._errors_translated(taken=index):
                self._submit(
                    submission_id=handle,
                    entrypoint=entrypoint(batch.command, index, turn_s),
                    entrypoint_num_gpus=asked.get(GPU),
                    entrypoint_num_cpus=asked.get(CPU),
                    entrypoint_memory=int(asked[MEMORY]) if MEMORY in asked else None,
                    entrypoint_resources=extra or None,
                    metadata={"job_submission_id": handle, "name": parcel.title, _FOLDER: str(batch.folder)},
                    runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S)}},
                )
            handles.append(handle)
        return handles

    def look(self, handles: tuple[str, ...]) -> dict[str, Sighting]:
        """As ``Engine.look``, with one query."""
        with self._errors_translated():
            jobs = {job.submission_id: job for job in self._client.list_jobs()}
        return {handle: self._sighting(handle, jobs[handle]) for handle in handles if handle in jobs}

    def cancel(self, handles: tuple[str, ...]) -> None:
        """As ``Engine.cancel``."""
        for handle in handles:
            with self._errors_translated():
                try:
                    self._client.stop_job(handle)
                except RuntimeError as problem:
                    if "does not exist" not in str(problem):
                        raise

    def close(self) -> None:
        """Jobs go on."""

    def _submit(self, **words: Any) -> None:
        """Submits one job, unless the server has it already."""
        try:
            self._client.submit_job(**words)
        except RuntimeError as problem:
            if "already exists" not in str(problem):
                raise

    def _resources(self, placement: Placement) -> dict[str, float]:
        return resources_per_node(placement, self._setup.resources, cpus=0.0)

    def _sighting(self, handle: str, job: JobDetails) -> Sighting:
        agent = urlsplit(job.driver_agent_http_address or "").hostname
        phase = _WAITS.get(job.status, Phase.ENDED)
        if phase is Phase.RUNNING:
            return Sighting(handle=handle, phase=phase, node=agent)
        if phase is Phase.WAITING:
            return Sighting(handle=handle, phase=phase, reason=_WAITS_FOR)
        end, reason = end_of_job(job)
        if end is End.FAILED:
            self._fetch(handle, job)
        return Sighting(handle=handle, phase=phase, reason=reason, end=end, node=agent)

    def _fetch(self, handle: str, job: JobDetails) -> None:
        """Writes Ray's output of a failed job into the batch's folder, once, where that is writable."""
        folder = (job.metadata or {}).get(_FOLDER)
        if folder is None or handle in self._fetched:
            return
        self._fetched.add(handle)
        with suppress(OSError, RuntimeError, requests.RequestException):
            text = self._client.get_job_logs(handle)
            target = Path(folder) / f"{handle}.ray.log"
            if said(text) and not target.exists():
                target.write_text(text, encoding="utf-8", errors="surrogateescape")

    def _grows(self) -> bool:
        """Whether an autoscaler can bring nodes that are not there yet."""
        with suppress(RuntimeError, ValueError, TypeError, AttributeError):
            reply: Any = self._client._do_request("GET", "/api/cluster_status").json()
            report = json.dumps(reply.get("data", {}).get("clusterStatus", {}).get("autoscalingStatus"))
            return "Launch" in report
        return False

    @contextmanager
    def _errors_translated(self, taken: int | None = None) -> Iterator[None]:
        """Turns what can go wrong on the way to the server, and in it, into our errors. ``taken``: how many jobs of the
        batch that is handed over it has already: only one of which it has nothing can be refused."""
        try:
            yield
        except AuthenticationError as problem:
            raise UsageError(refused_token(f"Ray's job server at {self._url}")) from problem
        except (requests.RequestException, OSError, RayStateApiException) as problem:
            raise EngineAway(
                f"Ray's job server does not answer at {self._url} ({type(problem).__name__}); its port is 8265 unless "
                "the cluster was started with another --dashboard-port"
            ) from problem
        except RuntimeError as problem:
            text = f"Ray's job server at {self._url}: {in_short(problem)}"
            if taken is None:
                raise EngineAway(text) from problem
            if taken:
                raise EngineAway(f"{text} (it has taken {taken} jobs of a batch)") from problem
            raise Refused(text, may_pass=True) from problem
        except (ValueError, TypeError, KeyError) as problem:  # what Ray's own client makes of it
            raise EngineAway(
                f"what Ray's job server at {self._url} answers is not understood ({type(problem).__name__}); if it is "
                "one, a Ray of its version here will understand it"
            ) from problem


def entrypoint(command: tuple[str, ...], index: int, turn_s: float | None) -> str:
    """The shell command of a parcel. ``timeout`` keeps its time, which Ray does not."""
    limit = () if turn_s is None else ("timeout", "--foreground", "--signal=TERM", f"{turn_s:.3f}")
    return "exec " + shlex.join((*limit, *command, str(index)))
