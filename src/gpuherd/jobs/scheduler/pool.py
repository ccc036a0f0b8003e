"""The GPUs that may be used, by node, indexed for decisions and kept from one to the next."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from gpuherd.jobs.scheduler.types import GpuView, Limits, WaitingJob, fits, why_never

# Number of kinds of jobs for which counts are cached.
_MOST_CACHED = 64
# On a node with at most this number of GPUs counting anew is cheaper than updating counts.
_SMALL = 32


@dataclass(slots=True, eq=False)
class KindCounts:
    """Numbers of GPUs for one kind of job: ``free``, and those that ``come`` by themselves (free ones included), not
    those that are shared and open to more jobs."""

    free: int = 0
    come: int = 0

    def add(self, view: GpuView, kind: tuple[int, int | None], change: int) -> None:
        """KindCounts a GPU in (1) or out (-1)."""
        if view.will_come and fits(view.gpu, *kind) and _comes(view, kind[1]):
            self.free += change * view.is_free
            self.come += change * (not view.is_open)


@dataclass(slots=True, eq=False)
class Node:
    """GPUs that one job may have together.

    Counts that decisions need again and again are cached and updated with every change of a GPU, so that a node of a
    thousand GPUs costs a decision no more than one of four.

    Attributes:
        place: its number, in order of appearance.
        free: how many of its GPUs are free.
        least_mb: every GPU has had at least this for one job: a request of no more than that is like none.
    """

    name: str
    place: int
    views: dict[str, GpuView] = field(default_factory=dict)
    free: int = 0
    least_mb: float = math.inf
    # GPUs on which more may be promised: (minus the MB, UUID), in order, so that the emptiest come first.
    _open: list[tuple[int, str]] = field(default_factory=list)
    # GPUs that are free, and that will be in a moment.
    _free: dict[str, GpuView] = field(default_factory=dict)
    _returning: dict[str, GpuView] = field(default_factory=dict)
    # By GPUs and memory requested, the first also by GPUs to avoid. It is cleared when a GPU of the node changes, the
    # second updated.
    _sure: dict[tuple[int, int | None, frozenset[str]], float] = field(default_factory=dict)
    _counts: dict[tuple[int, int | None], KindCounts] = field(default_factory=dict)

    def count_coming(self, job: WaitingJob) -> int:
        """How many GPUs the job could use are free, or will be when our own jobs have ended."""
        return sum(comes(view, job) for view in self.usable(job))

    def put(self, view: GpuView) -> None:
        """Adds or updates one of its GPUs."""
        # The hottest code of a simulation, with Pool.update: properties of the views are written out.
        gpu = view.gpu
        uuid = gpu.uuid
        old = self.views.get(uuid)
        self.views[uuid] = view
        if self._sure:
            self._sure.clear()
        if view.busy is None and not view.ours:
            self._free[uuid] = view
            least_mb = gpu.free_mb
        else:
            self._free.pop(uuid, None)
            least_mb = gpu.total_mb if view.room_mb is None else view.room_mb
        if view.returning:
            self._returning[uuid] = view
        elif self._returning:
            self._returning.pop(uuid, None)
        if least_mb < self.least_mb:
            self.least_mb = least_mb
            self._counts.clear()
        if old is not None and old.shareable_mb is not None and old.ours:
            del self._open[bisect_left(self._open, (-(old.shareable_mb or 0), uuid))]
        if view.shareable_mb is not None and view.ours:
            insort(self._open, (-(view.shareable_mb or 0), uuid))
        if self._counts and len(self.views) <= _SMALL:
            self._counts.clear()
        elif self._counts:
            for kind, counts in self._counts.items():
                if old is not None:
                    counts.add(old, kind, -1)
                counts.add(view, kind, 1)

    def take_out(self, uuid: str) -> GpuView:
        """Removes one of its GPUs; returns its last view."""
        self._sure.clear()
        self._counts.clear()
        old = self.views.pop(uuid)
        self._free.pop(uuid, None)
        self._returning.pop(uuid, None)
        if old.is_open:
            del self._open[bisect_left(self._open, (-(old.shareable_mb or 0), uuid))]
        return old

    def count(self, job: WaitingJob) -> KindCounts:
        """How many GPUs the job could use are free, and how many will come without closing a shared one."""
        memory_mb = None if job.memory_mb is None or job.memory_mb <= self.least_mb else job.memory_mb
        kind = (job.gpus, memory_mb)
        if not job.avoid and kind in self._counts:
            return self._counts[kind]
        counts = KindCounts()
        for uuid, view in self.views.items():
            if uuid not in job.avoid:
                counts.add(view, kind, 1)
        if not job.avoid:
            if len(self._counts) >= _MOST_CACHED:
                self._counts.clear()
            self._counts[kind] = counts
        return counts

    def emptiest(self, job: WaitingJob, count: int) -> list[GpuView]:
        """Shared GPUs, open to more jobs, that the job could use were they empty: the most room first."""
        found: list[GpuView] = []
        for _, uuid in self._open if count > 0 else ():
            view = self.views[uuid]
            if uuid not in job.avoid and fits(view.gpu, job.gpus, job.memory_mb):
                found.append(view)
                if len(found) == count:
                    break
        return found

    def sure_at(self, job: WaitingJob) -> float:
        """When the job surely has enough GPUs here, if no other job gets them, by the time limits of our jobs. Minus
        infinity when there are enough now, or in a moment; infinity when that is not known."""
        kind = (job.gpus, job.memory_mb, job.avoid)
        if kind not in self._sure:
            times = []
            for view in self.usable(job):
                if not view.ours and comes(view, job):
                    times.append(-math.inf)
                elif view.over_at is not None and not view.is_open:
                    times.append(view.over_at)
            times.sort()
            self._sure[kind] = times[job.gpus - 1] if len(times) >= job.gpus else math.inf
        return self._sure[kind]

    def usable(self, job: WaitingJob) -> Iterator[GpuView]:
        """Its GPUs that are large enough for the job, without those that it avoids."""
        return _for(self.views, job)

    def free_for(self, job: WaitingJob) -> Iterator[GpuView]:
        """Those of ``usable`` that are free, in no order."""
        return _for(self._free, job)

    def returning_for(self, job: WaitingJob) -> Iterator[GpuView]:
        """Those of ``usable`` that will be free in a moment, in no order."""
        return _for(self._returning, job)


def _for(views: dict[str, GpuView], job: WaitingJob) -> Iterator[GpuView]:
    for uuid, view in views.items():
        if uuid not in job.avoid and fits(view.gpu, job.gpus, job.memory_mb):
            yield view


def comes(view: GpuView, job: WaitingJob) -> bool:
    """Whether a GPU that is large enough for the job is free for it, or will be when our own jobs have ended.

    Not one that is free but has too little free memory; nor one that had too little when it was last free.
    """
    return _comes(view, job.memory_mb)


def _comes(view: GpuView, memory_mb: int | None) -> bool:
    if memory_mb is None or not view.will_come:
        return view.will_come
    return (view.gpu.free_mb if view.is_free else view.largest_mb) >= memory_mb


class Pool:
    """All GPUs with their latest states, indexed by node, by free GPUs and by shareable memory.

    A decision must not cost a look at every GPU of a large cluster; ``update`` moves one GPU in all indexes at once.
    The order of jobs, limits and reservations are not its part.

    Attributes:
        in_use: number of GPUs with jobs of ours.
        free: number of GPUs that a job could have now.
        timed: number of GPUs on which a time limit ends our job.
        reserved: the GPUs that other users have reserved, by UUID.

    >>> from gpuherd.gpus.state import Gpu
    >>> gpu = Gpu(index=0, uuid="GPU-a", name="A100", total_mb=40_000, used_mb=0, free_mb=40_000)
    >>> pool = Pool([GpuView(gpu)])
    >>> pool.free
    1
    >>> pool.update(GpuView(gpu, "our job runs there", ours=True))
    >>> pool.free, pool.in_use
    (0, 1)
    """

    def __init__(self, views: Iterable[GpuView] = ()):
        self.nodes: list[Node] = []
        self.in_use = 0
        self.free = 0
        self.timed = 0
        self.reserved: dict[str, GpuView] = {}
        self._by_name: dict[str, Node] = {}
        self._home: dict[str, Node] = {}
        # Places of the nodes that have so many GPUs free, each list in order.
        self._by_free: list[list[int]] = [[]]
        # (MB that may still be promised, place of the node, UUID), in order.
        self._open: list[tuple[int, int, str]] = []
        self._never: dict[tuple[object, ...], str | None] = {}
        self._enough: dict[tuple[int, int | None, frozenset[str]], frozenset[int]] = {}
        self._least_mb = math.inf
        for view in views:
            self.update(view)

    # --- GPUs ------------------------------------------------------------------------------------------------

    def update(self, view: GpuView) -> None:
        """Adds a GPU, or updates one (which stays in its node)."""
        # The hottest code of a simulation: properties of the views are written out where that saves a call.
        uuid = view.gpu.uuid
        free, is_open = view.busy is None and not view.ours, view.ours and view.shareable_mb is not None
        node = self._home.get(uuid)
        if node is None:
            node = self._home[uuid] = self._node(view.node)
            node.put(view)
            self._never.clear()
            self._enough.clear()
            self.in_use += view.ours
            self.timed += view.over_at is not None
            self._count_free(node, int(free))
        else:
            old = node.views[uuid]
            node.put(view)
            if old.gpu is not view.gpu and _traits(old) != _traits(view):
                self._never.clear()
                self._enough.clear()
            elif _comes_otherwise(old, view):
                self._enough.clear()
            self.in_use += view.ours - old.ours
            self.timed += (view.over_at is not None) - (old.over_at is not None)
            was_free = old.busy is None and not old.ours
            if free is not was_free:
                self._count_free(node, free - was_free)
            if old.ours and old.shareable_mb is not None:
                del self._open[bisect_left(self._open, _sharing_order(old, node))]
        if node.least_mb < self._least_mb:
            self._least_mb = node.least_mb
        if is_open:
            insort(self._open, _sharing_order(view, node))
        if view.reserved is not None:
            self.reserved[uuid] = view
        elif self.reserved:
            self.reserved.pop(uuid, None)

    def remove(self, uuid: str) -> None:
        """Removes a GPU that may not be used any more; does nothing for an unknown one."""
        node = self._home.pop(uuid, None)
        if node is None:
            return
        old = node.take_out(uuid)
        self.reserved.pop(uuid, None)
        self.in_use -= old.ours
        self.timed -= old.over_at is not None
        self._count_free(node, -int(old.is_free))
        if old.is_open:
            del self._open[bisect_left(self._open, _sharing_order(old, node))]
        self._never.clear()
        self._enough.clear()

    def view(self, uuid: str) -> GpuView:
        """The GPU's latest view. Raises KeyError for an unknown one."""
        return self._home[uuid].views[uuid]

    def node_of(self, uuid: str) -> Node:
        """The GPU's node. Raises KeyError for an unknown one."""
        return self._home[uuid]

    def views(self) -> Iterator[GpuView]:
        """All GPUs, node by node."""
        for node in self.nodes:
            yield from node.views.values()

    def __len__(self) -> int:
        """The number of GPUs."""
        return len(self._home)

    # --- queries of a decision ---------------------------------------------------------------------------------

    def why_never(self, job: WaitingJob, limits: Limits) -> str | None:
        """Why the job could never run on any of the nodes, or None when it could."""
        request = (*self._kind(job), job.nodes, job.host_memory_mb)
        kind = (*request, limits.max_gpus, limits.cpu_only, limits.most_ever)
        if kind not in self._never:
            largest = sorted(self.nodes, key=lambda node: -len(node.views)) or [Node("", 0)]
            reasons = [why_never(job, [view.gpu for view in node.views.values()], limits) for node in largest]
            self._never[kind] = None if None in reasons else reasons[0]
        return self._never[kind]

    def with_free(self, least: int) -> Iterator[Node]:
        """Machines with at least so many GPUs free, those with the fewest first: large gaps stay for large jobs."""
        for places in self._by_free[max(1, least) :]:
            for place in places:
                yield self.nodes[place]

    def enough(self, job: WaitingJob) -> Iterator[Node]:
        """Machines with enough GPUs that will come for the job, those with the most free ones first."""
        known = self._with_enough(job)
        for places in reversed(self._by_free):
            for place in places:
                if place in known:
                    yield self.nodes[place]

    def has_enough(self, job: WaitingJob) -> bool:
        """Whether some node has enough GPUs that will come for the job."""
        return bool(self._with_enough(job))

    def overrun_by(self, job: WaitingJob) -> frozenset[str]:
        """The UUIDs of the GPUs that other users have reserved for a time in which the job, started now, may run."""
        if not self.reserved:
            return frozenset()
        return frozenset(
            uuid
            for uuid, view in self.reserved.items()
            if view.reserved is not None and view.reserved.is_overrun_by(job)
        )

    def surest(self, job: WaitingJob, without: Container[int]) -> tuple[Node | None, float | None]:
        """The node on which the job surely has enough GPUs at the earliest, and when; (None, None) when that is known
        of no node. Of equals the one with the most free ones. ``without``: places of nodes to leave out."""
        best, at = None, math.inf
        for node in self.enough(job):
            if node.place not in without and node.sure_at(job) < at:
                best, at = node, node.sure_at(job)
        return (None, None) if best is None else (best, at)

    def open_from(self, least_mb: int) -> Iterator[GpuView]:
        """GPUs on which this much may still be promised to one more sharing job, the fullest first."""
        for place in range(bisect_left(self._open, (least_mb, -1, "")), len(self._open)):
            yield self.view(self._open[place][2])

    def emptiest_open(self) -> Iterator[GpuView]:
        """Shared GPUs that are open to more jobs, the one with the most room first."""
        for _, _, uuid in reversed(self._open):
            yield self.view(uuid)

    @property
    def open_count(self) -> int:
        """The number of shared GPUs that are open to more jobs."""
        return len(self._open)

    # --- indexes ----------------------------------------------------------------------------------------------

    def _node(self, name: str) -> Node:
        if name not in self._by_name:
            node = self._by_name[name] = Node(name, len(self.nodes))
            self.nodes.append(node)
            self._by_free[0].append(node.place)
        return self._by_name[name]

    def _count_free(self, node: Node, change: int) -> None:
        if not change:
            return
        places = self._by_free[node.free]
        del places[bisect_left(places, node.place)]
        node.free += change
        self.free += change
        while len(self._by_free) <= node.free:
            self._by_free.append([])
        insort(self._by_free[node.free], node.place)

    def _kind(self, job: WaitingJob) -> tuple[int, int | None]:
        """GPUs and memory requested: no memory where every GPU always has as much, so that there are few kinds."""
        return (job.gpus, None if job.memory_mb is None or job.memory_mb <= self._least_mb else job.memory_mb)

    def _with_enough(self, job: WaitingJob) -> frozenset[int]:
        kind = (*self._kind(job), job.avoid)
        if kind not in self._enough:
            self._enough[kind] = frozenset(node.place for node in self.nodes if node.count_coming(job) >= job.gpus)
        return self._enough[kind]


def _traits(view: GpuView) -> tuple[int, bool, bool]:
    return (view.gpu.total_mb, bool(view.gpu.mig_instances), view.gpu.mig_parent is None)


def _comes_otherwise(old: GpuView, new: GpuView) -> bool:
    """Whether ``comes`` may now return another value; a wholly empty GPU is the same free or ours."""
    if old.will_come is not new.will_come:
        return True
    if old.gpu is new.gpu and old.gpu.free_mb >= old.gpu.total_mb and old.room_mb is new.room_mb is None:
        return False
    return _tight_mb(old) != _tight_mb(new)


def _tight_mb(view: GpuView) -> int | None:
    most_mb = view.gpu.free_mb if view.is_free else view.largest_mb
    return most_mb if most_mb < view.gpu.total_mb else None


def _sharing_order(view: GpuView, node: Node) -> tuple[int, int, str]:
    return (view.shareable_mb or 0, node.place, view.gpu.uuid)
