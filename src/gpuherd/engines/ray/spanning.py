"""A parcel over several nodes: a placement group with a bundle for each (STRICT_SPREAD: no two on one node), one task
in each. The first leads the attempt and starts the others from its worker.

Several GPUs of one node need no group: what a task asks for always comes from one node.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gpuherd.engines.cluster import EngineAway
from gpuherd.engines.ray.ends import in_short
from gpuherd.engines.ray.messages import Join
from gpuherd.engines.ray.worker import join_in
from gpuherd.engines.world import Failure, World


@dataclass(frozen=True, slots=True)
class Span:
    """What the first task must know to start the others. ``options`` are those of each task."""

    group: PlacementGroup
    join: Join
    nodes: int
    options: Mapping[str, Any]


def reserve(handle: str, nodes: int, asked: Mapping[str, float]) -> PlacementGroup:
    """Asks for the bundles. It does not wait for them: a task in the group does."""
    return placement_group([dict(asked) for _ in range(nodes)], strategy="STRICT_SPREAD", name=handle)


def free(group: PlacementGroup) -> None:
    """Gives the bundles back."""
    remove_placement_group(group)


def in_bundle(span: Span, rank: int) -> dict[str, Any]:
    """The options of the task of one node."""
    strategy = PlacementGroupSchedulingStrategy(span.group, placement_group_bundle_index=rank)
    return {**span.options, "scheduling_strategy": strategy}


class Companions:
    """The tasks on the other nodes, for the leader on the first (``engines.world.Others``)."""

    def __init__(self, span: Span, manifest: str, index: int, handle: str):
        self.address: str = get_node_ip_address()
        self.names = _names(span.group)
        self._span = span
        self._manifest = manifest
        self._index = index
        self._handle = handle
        self._open: dict[Any, int] = {}
        self._failure: Failure | None = None
        self._asked = False

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

    def failure(self) -> Failure | None:
        """The first that failed, None while none has."""
        self._hear()
        return self._failure

    def end(self) -> None:
        """Asks them to make room, and when called again ends their workers; what is left there their guardians end."""
        for answer in self._open:
            ray.cancel(answer, force=self._asked)
        self._asked = True

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
    """What the nodes of a group are called, in the order of their bundles; () where Ray does not tell."""
    with suppress(RayError, OSError, KeyError, TypeError, AttributeError):
        called = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
        places = placement_group_table(group)["bundles_to_node_id"]
        return tuple(str(called[places[index]]) for index in sorted(places))
    return ()


def _failure(answer: Any, rank: int) -> Failure | None:
    try:
        told: Failure | None = ray.get(answer)
        return told
    except RayError as problem:
        # What was not cancelled and raised there is its own fault; all else was taken from it.
        own = isinstance(problem, RayTaskError) and not isinstance(problem, TaskCancelledError)
        return Failure(rank, f"of rank {rank}", 1 if own else None)
