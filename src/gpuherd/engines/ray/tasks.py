"""Parcels as tasks of Ray: one task leads one attempt. Runs in the process beside Ray, which is their driver: they live
no longer than it does.

A task never runs twice: another turn is another attempt, and that is decided elsewhere (``max_retries=0``). Its worker
takes the next task when it has ended (``max_calls=0``). For a task with GPUs Ray starts a process each, so that the
next one finds no memory of a GPU in use; ours never touches a GPU, the job is a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from gpuherd.engines.cluster import Batch, End, EngineAway, Phase, Placement, Sighting
from gpuherd.engines.ray import connecting
from gpuherd.engines.ray.ends import end_of, end_of_leader, in_short, unfit
from gpuherd.engines.ray.messages import Lead, Setup, handle_of
from gpuherd.engines.ray.resources import CPU, GPU, MEMORY, NodeRoom, refused, turn_of, waits_for, wanted
from gpuherd.engines.ray.spanning import Span, free, in_bundle, reserve
from gpuherd.engines.ray.worker import imports, work
from gpuherd.errors import UsageError

_TASK_CPUS = 1.0
_ROOMS_AGAIN_S = 2.0
_ONE_NODE = "there is no way here to lead a job over several nodes"
_PROBE_S = 60.0
_PROBED_NODES = 16
# As the leader's grace for a job that is asked to make room, and a bit.
_FAREWELL_S = 20.0


@dataclass
class Flight:
    """A parcel whose task Ray has. ``node`` is known when it runs, ``ended`` when it has ended."""

    stream: Any
    asked: Mapping[str, float]
    span: Span | None = None
    node: str | None = None
    ended: Sighting | None = None
    cancelled: bool = False


class Tasks:
    """The tasks of one driver. Raises as ``connecting.connect``."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._cluster = connecting.connect(setup.address, setup.folder)
        self._work = ray.remote(num_returns="streaming", max_retries=0, max_calls=0)(work)
        self._flights: dict[str, Flight] = {}
        self._rooms: list[NodeRoom] = []
        self._rooms_at = float("-inf")

    def check(self, placements: tuple[Placement, ...]) -> dict[Placement, str]:
        """As ``Engine.check``; a cluster that can grow is believed to."""
        if self._cluster.folder is None:
            _probe(self._setup.lead)
        found = {} if self._setup.join else {each: _ONE_NODE for each in placements if each.nodes > 1}
        if connecting.grows():
            return found
        return refused(placements, self._asked, connecting.rooms()) | found

    def submit(self, batch: Batch) -> list[str]:
        """As ``Engine.submit``."""
        asked = self._asked(batch.placement)
        options = options_of(asked, batch.placement)
        turn_s = turn_of(batch.placement, self._setup.notice_s)
        handles = []
        for index, parcel in enumerate(batch.parcels):
            handle = handle_of(batch.name, index)
            with _answering():
                span = self._span(handle, batch.placement.nodes, asked, options)
                here = options if span is None else in_bundle(span, 0)
                task = self._work.options(name=parcel.title, **here)
                stream = task.remote(self._setup.lead, batch.command[-1], index, handle, turn_s, span)
            self._flights[handle] = Flight(stream, asked, span)
            handles.append(handle)
        return handles

    def look(self, handles: tuple[str, ...]) -> dict[str, Sighting]:
        """As ``Engine.look``."""
        self._hear()
        known = {handle: self._flights[handle] for handle in handles if handle in self._flights}
        # Nobody asks for an end again that has been recorded.
        self._flights = {
            handle: flight for handle, flight in self._flights.items() if handle in known or flight.ended is None
        }
        return {handle: self._sighting(handle, flight) for handle, flight in known.items()}

    def cancel(self, handles: tuple[str, ...]) -> None:
        """As ``Engine.cancel``. Who is asked a second time is ended by force."""
        for handle in handles:
            flight = self._flights.get(handle)
            if flight is not None and flight.ended is None:
                with _answering():
                    ray.cancel(flight.stream, force=flight.cancelled)
                flight.cancelled = True

    def close(self) -> None:
        """Ends what runs, each with its grace, and leaves the cluster."""
        try:
            self._hear()
            self.cancel(tuple(handle for handle, flight in self._flights.items() if not flight.cancelled))
            until = time.monotonic() + _FAREWELL_S
            while time.monotonic() < until and any(each.ended is None for each in self._flights.values()):
                time.sleep(0.05)
                self._hear()
        except EngineAway:
            pass
        finally:
            self._cluster.leave()

    def _span(self, handle: str, nodes: int, asked: Mapping[str, float], options: Mapping[str, Any]) -> Span | None:
        if nodes == 1 or self._setup.join is None:
            return None
        return Span(reserve(handle, nodes, asked), self._setup.join, nodes, options)

    def _asked(self, placement: Placement) -> dict[str, float]:
        return wanted(placement, self._setup.resources, cpus=_TASK_CPUS)

    def _hear(self) -> None:
        """Takes in what tasks have told: first the node, then the exit code, or the error that they ended with."""
        by_stream = {flight.stream: flight for flight in self._flights.values() if flight.ended is None}
        while by_stream:
            with _answering():
                ready, _ = ray.wait(list(by_stream), num_returns=len(by_stream), timeout=0, fetch_local=False)
            if not ready:
                return
            for stream in ready:
                flight = by_stream[stream]
                _take(flight)
                if flight.ended is not None:
                    del by_stream[stream]
                    if flight.span is not None:
                        with _answering():
                            free(flight.span.group)

    def _sighting(self, handle: str, flight: Flight) -> Sighting:
        if flight.ended is not None:
            ended = flight.ended
            return Sighting(handle=handle, phase=ended.phase, reason=ended.reason, end=ended.end, node=flight.node)
        if flight.node is not None:
            return Sighting(handle=handle, phase=Phase.RUNNING, node=flight.node)
        if time.monotonic() >= self._rooms_at + _ROOMS_AGAIN_S:
            self._rooms, self._rooms_at = connecting.rooms(), time.monotonic()
        return Sighting(
            handle=handle,
            phase=Phase.WAITING,
            reason=waits_for(1 if flight.span is None else flight.span.nodes, flight.asked, self._rooms),
        )


def options_of(asked: Mapping[str, float], placement: Placement) -> dict[str, Any]:
    """What a task is given, in the words of ``ray.remote``. CPUs that nobody asked for are Ray's own affair."""
    options: dict[str, Any] = {"num_gpus": asked.get(GPU, 0)}
    if placement.cpus is not None:
        options["num_cpus"] = asked[CPU]
    if MEMORY in asked:
        options["memory"] = int(asked[MEMORY])
    extra = {name: amount for name, amount in asked.items() if name not in (GPU, CPU, MEMORY)}
    return options | ({"resources": extra} if extra else {})


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except (RayError, ConnectionError) as problem:
        raise EngineAway(f"Ray does not answer: {in_short(problem)}") from problem


def _take(flight: Flight) -> None:
    try:
        value = ray.get(next(flight.stream))
    except StopIteration:
        flight.ended = _end(flight, End.CANCELLED if flight.cancelled else End.FAILED, "it ended without a word")
    except RayError as problem:
        flight.ended = _end(flight, *end_of(problem))
    else:
        if isinstance(value, str):
            flight.node = value
            return
        code, time_was_up = value
        end, reason = end_of_leader(code, time_was_up=time_was_up)
        flight.ended = _end(flight, End.CANCELLED if flight.cancelled else end, reason)


def _end(flight: Flight, end: End, reason: str | None) -> Sighting:
    return Sighting(handle="", phase=Phase.ENDED, reason=reason, end=end, node=flight.node)


def _probe(lead: Lead) -> None:
    """Whether the nodes' Python has us. Raises UsageError."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]][:_PROBED_NODES]
    probe = ray.remote(num_cpus=0, max_retries=0)(imports)
    asked = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        name = node["NodeManagerHostname"]
        asked[probe.options(scheduling_strategy=strategy, name="gpuherd: is it here?").remote(lead)] = name
    for answer, name in asked.items():
        try:
            ray.get(answer, timeout=_PROBE_S)
        except GetTimeoutError as problem:
            raise EngineAway(f"Ray has started no worker on {name} within {_PROBE_S:g} s") from problem
        except RayError as problem:
            reason = unfit(problem)
            if reason is None:
                continue
            raise UsageError(
                f"Ray's node {name} can't run gpuherd ({reason}); install the same gpuherd there, in the Python that "
                "Ray runs with"
            ) from problem
