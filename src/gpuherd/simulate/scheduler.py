"""A cluster's own scheduler, modelled simply: first come, first served, with one reservation and backfilling."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from gpuherd.jobs.scheduler.ordering import SEARCHED
from gpuherd.simulate.cluster import Machine
from gpuherd.simulate.state import Standing

# The GPUs of a cluster as its own scheduler sees them: which are free on which node, and on which nodes a job fits.
#
# Nodes are found by how many of their GPUs are free, so that a job costs the same on ten nodes and on ten thousand.
# It knows no jobs and no time.


class Nodes:
    """All nodes, by number from 0. A node's GPUs count as its smallest.

    Attributes:
        free: the numbers of each node's free GPUs, over the whole cluster.
        sizes: how many GPUs each node has; ``memory_mb``: and MB on each.
    """

    def __init__(self, machines: Sequence[Machine]):
        self.free: list[list[int]] = []
        self.sizes = [len(gpus) for gpus in machines]
        self.memory_mb = [min(gpu.total_mb for gpu in gpus) for gpus in machines]
        first = 0
        for size in self.sizes:
            # The lowest number is given first.
            self.free.append(list(range(first + size - 1, first - 1, -1)))
            first += size
        self._aside: set[int] = set()
        # By memory: the nodes that have so many GPUs free, in the order in which they came to have as many.
        self._by_free: dict[int, list[dict[int, None]]] = {
            mb: [{} for _ in range(max(self.sizes) + 1)] for mb in sorted(set(self.memory_mb))
        }
        for node in range(len(self.sizes)):
            self._put(node)

    def could_hold(self, nodes: int, gpus: int, memory_mb: int | None) -> bool:
        """Whether so many nodes have so many GPUs with so much memory, were they empty."""
        return sum(self._suits(node, gpus, memory_mb) for node in range(len(self.sizes))) >= nodes

    def find(self, nodes: int, gpus: int, memory_mb: int | None) -> tuple[int, ...] | None:
        """So many nodes with so many GPUs free, those with the fewest first, without those that are set aside; None
        when there are too few."""
        found: list[int] = []
        for node in self._with_free(gpus, memory_mb):
            found.append(node)
            if len(found) == nodes:
                return tuple(found)
        return None

    def emptiest(self, nodes: int, gpus: int, memory_mb: int | None) -> tuple[int, ...]:
        """So many nodes that are large enough, those with the most GPUs free first, without those set aside."""
        found: list[int] = []
        for free in range(max(self.sizes), -1, -1):
            for mb, by_free in self._by_free.items():
                if mb >= (memory_mb or 0):
                    found += islice((node for node in by_free[free] if self.sizes[node] >= gpus), nodes - len(found))
        return tuple(found)

    def set_aside(self, nodes: Collection[int]) -> None:
        """``find`` passes them over from now on."""
        for node in nodes:
            self._take_out(node)
            self._aside.add(node)

    def put_back(self, nodes: Collection[int]) -> None:
        """``find`` sees them again."""
        for node in nodes:
            self._aside.discard(node)
            self._put(node)

    def take(self, nodes: Collection[int], gpus: int) -> tuple[int, ...]:
        """Takes so many GPUs of each of these nodes into use; their numbers."""
        taken: list[int] = []
        for node in nodes:
            self._take_out(node)
            free = self.free[node]
            taken += [free.pop() for _ in range(gpus)]
            self._put(node)
        return tuple(taken)

    def give_back(self, nodes: Collection[int], gpus: Sequence[int]) -> None:
        """These GPUs, as ``take`` told them, are free again."""
        each = len(gpus) // max(1, len(nodes))
        for place, node in enumerate(nodes):
            self._take_out(node)
            self.free[node] += gpus[place * each : (place + 1) * each]
            self._put(node)

    def _suits(self, node: int, gpus: int, memory_mb: int | None) -> bool:
        return self.sizes[node] >= gpus and self.memory_mb[node] >= (memory_mb or 0)

    def _with_free(self, gpus: int, memory_mb: int | None) -> Iterator[int]:
        for mb, by_free in self._by_free.items():
            if mb >= (memory_mb or 0):
                for nodes in by_free[gpus:]:
                    yield from nodes

    def _put(self, node: int) -> None:
        if node not in self._aside:
            self._by_free[self.memory_mb[node]][len(self.free[node])][node] = None

    def _take_out(self, node: int) -> None:
        self._by_free[self.memory_mb[node]][len(self.free[node])].pop(node, None)


# What SLURM and others do in their plain form: jobs start in the order in which they came. For the first that can't
# start the nodes that it will have are set aside; those behind it start on the others, and on these if their time
# limits end them before all of its nodes are surely free (EASY, Lifka 1995). All that is left out is told in
# docs/what-if.md.


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A job in the cluster's queue. ``array``: with which others it came; ``limit_s``: it is surely over then."""

    standing: Standing
    array: int
    limit_s: float | None

    @property
    def kind(self) -> tuple[int, int, int | None]:
        """What it asks for: nodes, GPUs on each, MB on each of those."""
        return (self.standing.job.nodes, self.standing.gpus, self.standing.memory_mb)


@dataclass(slots=True, eq=False)
class Running:
    """A parcel on its nodes. ``gpus``: by number over the whole cluster; ``over_at``: when it is surely over."""

    parcel: Parcel
    nodes: tuple[int, ...]
    gpus: tuple[int, ...]
    over_at: float


# Parcels that are alike: of which the next can't start when one can't.
_Kind = tuple[int, int, int | None, int]


class Scheduler:
    """The queue of one cluster.

    Args:
        nodes: its GPUs.
        array_limit: how many of one array may run at once, None for any number.
    """

    def __init__(self, nodes: Nodes, array_limit: int | None = None):
        self._nodes = nodes
        self._array_limit = array_limit
        self._lines: dict[_Kind, deque[tuple[int, Parcel]]] = {}
        self._came = 0
        self._of_array: dict[int, int] = defaultdict(int)
        self._on_node: dict[int, dict[Running, None]] = defaultdict(dict)
        self._limits = False
        # For whom nodes are set aside, and by when they are surely free (infinity when nobody knows).
        self._first: Parcel | None = None
        self._aside: tuple[int, ...] = ()
        self._until = math.inf

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._lines)

    def submit(self, parcels: Sequence[Parcel]) -> None:
        """They wait, in this order, behind those that are there."""
        for parcel in parcels:
            array = parcel.array if self._array_limit is not None else 0
            self._lines.setdefault((*parcel.kind, array), deque()).append((self._came, parcel))
            self._came += 1
            self._limits = self._limits or parcel.limit_s is not None

    def over(self, running: Running) -> None:
        """It has ended; its GPUs are free."""
        self._nodes.give_back(running.nodes, running.gpus)
        self._of_array[running.parcel.array] -= 1
        if self._limits:
            for node in running.nodes:
                del self._on_node[node][running]

    def start_what_can(self, now: float, most: float, begin: Callable[[Running], None]) -> bool:
        """One pass over the queue: ``begin`` is told of each that starts, at most so many. Whether it stopped for that
        alone, and more could start."""
        heads = [(line[0][0], kind) for kind, line in self._lines.items()]
        heapq.heapify(heads)
        while heads:
            if most < 1:
                return True
            _, kind = heapq.heappop(heads)
            line = self._lines[kind]
            found = self._place(line[0][1])
            place = 0
            if found is None and self._limits and self._first is not None:
                place, found = self._borrow(line, now)
            if found is None:
                self._reserve(line[0][1], now)
                continue
            parcel = line[place][1]
            del line[place]
            if line:
                heapq.heappush(heads, (line[0][0], kind))
            else:
                del self._lines[kind]
            most -= 1
            begin(self._start(parcel, found, now))
        return False

    def _start(self, parcel: Parcel, nodes: tuple[int, ...], now: float) -> Running:
        if parcel is self._first:
            self._nodes.put_back(self._aside)
            self._first, self._aside = None, ()
        gpus = self._nodes.take(nodes, parcel.standing.gpus)
        running = Running(parcel, nodes, gpus, math.inf if parcel.limit_s is None else now + parcel.limit_s)
        self._of_array[parcel.array] += 1
        if self._limits:
            for node in nodes:
                self._on_node[node][running] = None
        return running

    def _place(self, parcel: Parcel) -> tuple[int, ...] | None:
        """Nodes on which it can start now."""
        if not self._may(parcel):
            return None
        count, gpus, memory_mb = parcel.kind
        if parcel is self._first and all(len(self._nodes.free[node]) >= gpus for node in self._aside):
            return self._aside
        return self._nodes.find(count, gpus, memory_mb)

    def _may(self, parcel: Parcel) -> bool:
        return self._array_limit is None or self._of_array[parcel.array] < self._array_limit

    def _borrow(self, line: deque[tuple[int, Parcel]], now: float) -> tuple[int, tuple[int, ...] | None]:
        """The first of these that is surely over before the nodes that are set aside are needed: its place, and nodes
        for it among those."""
        for place, (_, parcel) in enumerate(islice(line, SEARCHED)):
            if parcel.limit_s is None or now + parcel.limit_s > self._until or parcel is self._first:
                continue
            if not self._may(parcel):
                continue
            count, gpus, memory_mb = parcel.kind
            free = [
                node
                for node in self._aside
                if len(self._nodes.free[node]) >= gpus and self._nodes.memory_mb[node] >= (memory_mb or 0)
            ]
            if len(free) >= count:
                return place, tuple(free[:count])
        return 0, None

    def _reserve(self, parcel: Parcel, now: float) -> None:
        """Sets nodes aside for the first that can't start for want of GPUs; they stay so until it has started."""
        if self._first is not None or not self._may(parcel):
            return
        count, gpus, memory_mb = parcel.kind
        self._first, self._aside = parcel, self._nodes.emptiest(count, gpus, memory_mb)
        self._nodes.set_aside(self._aside)
        self._until = max((self._sure_at(node, gpus, now) for node in self._aside), default=now)

    def _sure_at(self, node: int, gpus: int, now: float) -> float:
        """When so many GPUs of a node are surely free, by the limits of what runs there."""
        lacks = gpus - len(self._nodes.free[node])
        if lacks <= 0:
            return now
        for running in sorted(self._on_node[node], key=lambda each: each.over_at):
            lacks -= running.parcel.standing.gpus
            if lacks <= 0:
                return running.over_at
        return math.inf
