"""Parcels as tasks of Ray, on one node or over several; runs in the process next to Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError, TaskCancelledError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gpuherd.engines.base import Batch, End, EngineAway, Phase, Placement, Sighting
from gpuherd.engines.ray import driver
from gpuherd.engines.ray.cluster import CPU, GPU, MEMORY, NodeCapacity, refused, resources_per_node, turn_of, waits_for
from gpuherd.engines.ray.driver import end_of, end_of_leader, in_short, unfit
from gpuherd.engines.ray.engine import Setup, handle_of
from gpuherd.engines.ray.worker import imports, join_in, work
from gpuherd.engines.world import Join, Lead, NodeFailure, World
from gpuherd.errors import UsageError

# A parcel over several nodes: a placement group with a bundle for each (STRICT_SPREAD: no two on one node), one task
# in each. The first leads the attempt and starts the others from its worker.
#
# Several GPUs of one node need no group: the resources of a task always come from one node.


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """What the first task needs to start the others. ``options`` are those of each task."""

    group: PlacementGroup
    join: Join
    nodes: int
    options: Mapping[str, Any]


def in_bundle(span: TaskGroup, rank: int) -> dict[str, Any]:
    """The options of the task of one node."""
    strategy = PlacementGroupSchedulingStrategy(span.group, placement_group_bundle_index=rank)
    return {**span.options, "scheduling_strategy": strategy}


class Companions:
    """The tasks on the other nodes, for the leader on the first (``engines.world.Others``)."""

    def __init__(self, span: TaskGroup, manifest: str, index: int, handle: str):
        self.address: str = get_node_ip_address()
        self.names = _names(span.group)
        self._span = span
        self._manifest = manifest
        self._index = index
        self._handle = handle
        self._open: dict[Any, int] = {}
        self._failure: NodeFailure | None = None
        self._cancelled = False

    def begin(self, port: int) -> None:
        """Starts them. Raises EngineAway."""
        task = ray.remote(max_retries=0, max_calls=0)(join_in)
        try:
            for rank in range(1, self._span.nodes):
                world = World(rank, self._span.nodes, self.address, port)
                options = in_bundle(self._span, rank) | {"name": f"{self._handle} node {rank}"}
                answer = task.options(**options).remote(self._span.join, self._manifest, self._index, world)
                self._open[answer] = rank
        except (RayError, ValueError) as problem:
            raise EngineAway(f"Ray does not start the other nodes: {in_short(problem)}") from problem

    def over(self) -> bool:
        """Whether all of them have ended."""
        self._hear()
        return not self._open

    def failure(self) -> NodeFailure | None:
        """The first that failed, None while none has."""
        self._hear()
        return self._failure

    def end(self) -> None:
        """Asks them to make room; a second call ends their workers. Their guardians end what is left."""
        for answer in self._open:
            ray.cancel(answer, force=self._cancelled)
        self._cancelled = True

    def _hear(self) -> None:
        if not self._open:
            return
        ready, _ = ray.wait(list(self._open), num_returns=len(self._open), timeout=0)
        for answer in ready:
            rank = self._open.pop(answer)
            failure = _failure(answer, rank)
            if self._failure is None:
                self._failure = failure


def _names(group: PlacementGroup) -> tuple[str, ...]:
    """The names of a group's nodes in the order of their bundles; () where Ray does not give them."""
    with suppress(RayError, OSError, KeyError, TypeError, AttributeError):
        called = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        places = placement_group_table(group)["bundles_to_node_id"]
        return tuple(str(called[places[index]]) for index in sorted(places))
    return ()


def _failure(answer: Any, rank: int) -> NodeFailure | None:
    try:
        failure: NodeFailure | None = ray.get(answer)
        return failure
    except RayError as problem:
        # An error that was raised there without a cancellation is the job's own; in all other cases it lost its worker.
        own = isinstance(problem, RayTaskError) and not isinstance(problem, TaskCancelledError)
        return NodeFailure(rank, f"of rank {rank}", 1 if own else None)


# Parcels as tasks of Ray: one task leads one attempt. They run in the process next to Ray, which is their driver: they
# live no longer than it does.
#
# A task never runs twice: another try is another attempt, and that is decided elsewhere (``max_retries=0``). Its worker
# takes the next task when it has ended (``max_calls=0``). For a task with GPUs Ray starts a process each, so that the
# next one finds no GPU memory in use; ours never uses a GPU, the job is a process of its own.

_TASK_CPUS = 1.0
_ROOMS_AGAIN_S = 2.0
_ONE_NODE = "there is no way here to lead a job over several nodes"
_PROBE_S = 60.0
_PROBED_NODES = 16
# The leader's grace for a job that is asked to make room, and a little more.
_FAREWELL_S = 20.0


@dataclass
class Flight:
    """A parcel that is a task of Ray. ``node`` is known when it runs, ``ended`` (how, and why) when it has ended."""

    stream: Any
    asked: Mapping[str, float]
    span: TaskGroup | None = None
    node: str | None = None
    ended: tuple[End, str | None] | None = None
    cancelled: bool = False


class Tasks:
    """The tasks of one driver. Raises as ``driver.connect``."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._cluster = driver.connect(setup.address, setup.folder)
        self._work = ray.remote(num_returns="streaming", max_retries=0, max_calls=0)(work)
        self._flights: dict[str, Flight] = {}
        self._rooms: list[NodeCapacity] = []
        self._rooms_at = float("-inf")

    def check(self, placements: tuple[Placement, ...]) -> dict[Placement, str]:
        """As ``Engine.check``; a cluster with an autoscaler is expected to grow."""
        if self._cluster.folder is None:
            _probe(self._setup.lead)
        found = {} if self._setup.join else {each: _ONE_NODE for each in placements if each.nodes > 1}
        if driver.grows():
            return found
        return refused(placements, self._resources, driver.rooms()) | found

    def submit(self, batch: Batch) -> list[str]:
        """As ``Engine.submit``."""
        asked = self._resources(batch.placement)
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
        # An end that has been recorded is not asked for again.
        self._flights = {
            handle: flight for handle, flight in self._flights.items() if handle in known or flight.ended is None
        }
        return {handle: self._sighting(handle, flight) for handle, flight in known.items()}

    def cancel(self, handles: tuple[str, ...]) -> None:
        """As ``Engine.cancel``. A second call ends them by force."""
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

    def _span(
        self, handle: str, nodes: int, asked: Mapping[str, float], options: Mapping[str, Any]
    ) -> TaskGroup | None:
        if nodes == 1 or self._setup.join is None:
            return None
        # This does not wait for the bundles: a task in the group does.
        group = placement_group([dict(asked) for _ in range(nodes)], strategy="STRICT_SPREAD", name=handle)
        return TaskGroup(group, self._setup.join, nodes, options)

    def _resources(self, placement: Placement) -> dict[str, float]:
        return resources_per_node(placement, self._setup.resources, cpus=_TASK_CPUS)

    def _hear(self) -> None:
        """Reads the tasks' messages: first the node, then the exit code, or the error that they ended with."""
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
                            remove_placement_group(flight.span.group)

    def _sighting(self, handle: str, flight: Flight) -> Sighting:
        if flight.ended is not None:
            end, reason = flight.ended
            return Sighting(handle=handle, phase=Phase.ENDED, reason=reason, end=end, node=flight.node)
        if flight.node is not None:
            return Sighting(handle=handle, phase=Phase.RUNNING, node=flight.node)
        if time.monotonic() >= self._rooms_at + _ROOMS_AGAIN_S:
            self._rooms, self._rooms_at = driver.rooms(), time.monotonic()
        return Sighting(
            handle=handle,
            phase=Phase.WAITING,
            reason=waits_for(1 if flight.span is None else flight.span.nodes, flight.asked, self._rooms),
        )


def options_of(asked: Mapping[str, float], placement: Placement) -> dict[str, Any]:
    """The options of a task for ``ray.remote``. Where no CPUs are requested, Ray's default holds."""
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
        flight.ended = (End.CANCELLED if flight.cancelled else End.FAILED, "it ended without a word")
    except RayError as problem:
        flight.ended = end_of(problem)
    else:
        if isinstance(value, str):
            flight.node = value
            return
        code, time_was_up = value
        end, reason = end_of_leader(code, time_was_up=time_was_up)
        flight.ended = (End.CANCELLED if flight.cancelled else end, reason)


def _probe(lead: Lead) -> None:
    """Checks that the nodes' Python has gpuherd. Raises UsageError, EngineAway."""
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
