"""The GPUs of a cluster as its own scheduler sees them: which are free on which node, and on which nodes a job fits.

Nodes are found by how many of their GPUs are free, so that a job costs the same on ten nodes and on ten thousand. It
knows no jobs and no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from gpuherd.simulate.cluster import Machine


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
