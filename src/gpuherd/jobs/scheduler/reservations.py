"""The tentative schedule that a decision fills in, and the GPUs that it reserves for jobs that wait. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuherd.gpus.state import Gpu
from gpuherd.jobs.scheduler.pool import Node, Pool, comes
from gpuherd.jobs.scheduler.types import GpuView, Limits, WaitingJob

# Why a GPU is not free, by the decision that is being made.
GIVEN = "goes to a job before this one"
RESERVED = "reserved for a job before this one"

# How good a node is for a job: GPUs free, lacking (negative), and MB of room on those that lack.
Rank = tuple[int, int, int]


class TentativeSchedule:
    """The pool as it would be if the decision so far were carried out, without the GPUs that are reserved.

    Changes are made in the pool itself, which saves a copy of it, and are undone when the decision is made. It knows
    how much is left, and no rule by which to give it.

    Attributes:
        budget: GPUs that may still be taken into use; below 0 when a large job's part of the limit is reserved.
        shared: there are GPUs on which sharing jobs run.
        ranks: how good nodes are, by request and the node's place; removed when something changes there.
    """

    def __init__(self, pool: Pool, limits: Limits):
        self.pool = pool
        self.limits = limits
        self.budget = limits.most_gpus - pool.in_use
        self.shared = pool.open_count > 0
        self.ranks: dict[tuple[int, int | None, frozenset[str]], dict[int, Rank]] = {}
        self._changed: set[str] = set()
        self._originals: list[GpuView] = []

    @property
    def gpus_left(self) -> int:
        """How many GPUs one more job could have for itself, as far as their number goes."""
        return max(0, min(self.budget, self.pool.free))

    def change(self, view: GpuView) -> None:
        """Changes a GPU."""
        uuid = view.gpu.uuid
        if uuid not in self._changed:
            self._changed.add(uuid)
            self._originals.append(self.pool.view(uuid))
        self.pool.update(view)
        if self.ranks:
            self.remove_rank(self.pool.node_of(uuid))

    def close(self, view: GpuView) -> None:
        """Closes a shared GPU to further jobs."""
        self.change(replace(view, shareable_mb=None, busy=RESERVED))

    def remove_rank(self, node: Node) -> None:
        """Drops what is known of a node that has changed."""
        for known in self.ranks.values():
            known.pop(node.place, None)

    def undo(self) -> None:
        """Leaves the pool as it was."""
        for view in reversed(self._originals):
            self.pool.update(view)


@dataclass(slots=True, eq=False)
class Reservation:
    """GPUs that are reserved for a job.

    Attributes:
        until: when the job surely has enough GPUs, None when that is not known.
        part: its part of the limit.
        gpus: those that are free, by UUID.
    """

    until: float | None
    part: int
    gpus: dict[str, Gpu]


class Reservations:
    """What is reserved for jobs that wait for our own GPUs, so that smaller ones behind them can't starve them.

    For the first large jobs that wait: the free GPUs of one node, with their part of the limit, and as many shared ones
    closed as they lack. For the first sharing job that fits nowhere: the shared GPU with the most room. Which job may
    backfill what is reserved is decided in ``policy``.

    Attributes:
        made: the reservations so far, in the order of the jobs.
    """

    def __init__(self, schedule: TentativeSchedule):
        self._schedule = schedule
        self.made: list[Reservation] = []
        self._promised = 0
        self._claims: dict[int, int] = {}
        self._has_reserved_room = False

    def backfill_s(self) -> float | None:
        """For how many seconds reserved GPUs can still be backfilled, None when none can be."""
        now = self._schedule.limits.now
        until = [each.until for each in self.made if each.gpus and each.until is not None]
        return max((at - now for at in until if at > now), default=None)

    def reserve_for(self, job: WaitingJob, barred: frozenset[str]) -> None:
        """Ensures that a job that waits for our own GPUs gets them before those behind it."""
        if job.gpus > self._schedule.limits.most_gpus:
            return  # It waits for the hour, not for GPUs.
        if job.share:
            self._reserve_room(job, barred)
        elif job.gpus > 1 or self._schedule.pool.open_count:
            self._reserve_gpus(job, barred)

    def _reserve_room(self, job: WaitingJob, barred: frozenset[str]) -> None:
        """For the first sharing job that fits nowhere: closes the shared GPU with the most room."""
        if self._has_reserved_room:
            return
        for view in self._schedule.pool.emptiest_open():
            if view.largest_mb >= (job.memory_mb or 0) and view.gpu.uuid not in barred:
                self._schedule.close(view)
                self._has_reserved_room = True
                return

    def _reserve_gpus(self, job: WaitingJob, barred: frozenset[str]) -> None:
        if job.gpus > 1 and len(self.made) >= self._schedule.limits.reservations:
            return  # Its turn comes.
        node, until = self._node_for(job, barred)
        if node is None:
            return  # It waits for other users' GPUs.
        if job.gpus > 1:
            self._reserve_free(job, barred, node, until)
        self._promised += job.gpus
        if self._schedule.pool.open_count:
            self._close_shared(job, barred, node)
        self._claims[node.place] = self._claims.get(node.place, 0) + job.gpus
        self._schedule.remove_rank(node)

    def _reserve_free(self, job: WaitingJob, barred: frozenset[str], node: Node, until: float | None) -> None:
        """Reserves the free GPUs of the node, and as much of the limit. The rest of the job's part is in use there, and
        comes back with the GPUs."""
        free = [view for view in node.free_for(job, barred) if comes(view, job)]
        part = min(job.gpus, len(free) + sum(1 for _ in node.returning_for(job, barred)))
        self._schedule.budget -= part
        self.made.append(Reservation(until, part, {view.gpu.uuid: view.gpu for view in free}))
        for view in free:
            self._schedule.change(_reserved(view))

    def _node_for(self, job: WaitingJob, barred: frozenset[str]) -> tuple[Node | None, float | None]:
        """The node on which GPUs are reserved for the job, and when it surely has enough of them, if that is known.

        First the node that surely has enough at the earliest. Where no time limits tell: where the job could have the
        most now; then where it lacks the fewest, were the shared ones closed to others; then where those are the
        emptiest. On that node all this only improves while GPUs are reserved there, and only a better one takes its
        place: so reservations can't alternate between nodes without end.
        """
        pool = self._schedule.pool
        if job.gpus > 1 and pool.timed:
            node, until = pool.surest(job, barred, self._claims)
            if node is not None:
                return node, until
        best, rank = None, (-1, 0, 0)
        for node in pool.enough(job, barred):
            if node.free < rank[0] or (node.free == rank[0] and not pool.open_count):
                break  # No node from here on can be better.
            found = self._rank_of(job, barred, node)
            if found > rank:
                best, rank = node, found
            if rank == (node.free, 0, 0):
                break
        return best, None

    def _rank_of(self, job: WaitingJob, barred: frozenset[str], node: Node) -> Rank:
        """How good a node is for the job: GPUs free, lacking (negative), and MB of room on those that lack."""
        known = self._schedule.ranks.setdefault((job.gpus, job.memory_mb, barred), {})
        if node.place not in known:
            lacks = self._lacks(job, barred, node) if self._schedule.pool.open_count else 0
            rooms = sum(view.shareable_mb or 0 for view in node.emptiest(job, barred, lacks))
            known[node.place] = (node.count(job, barred).free, -lacks, rooms)
        return known[node.place]

    def _lacks(self, job: WaitingJob, barred: frozenset[str], node: Node) -> int:
        """How many shared GPUs of the node must be closed for the job, besides those that come anyway."""
        return max(0, job.gpus + self._claims.get(node.place, 0) - node.count(job, barred).come)

    def _close_shared(self, job: WaitingJob, barred: frozenset[str], node: Node) -> None:
        """Closes shared GPUs, those with the most room first, until enough will come and the limit allows them."""
        for view in node.emptiest(job, barred, self._lacks(job, barred, node)):
            self._schedule.close(view)
        pool, most = self._schedule.pool, self._schedule.limits.most_gpus
        while pool.open_count and pool.open_count + self._promised > most:
            self._schedule.close(next(pool.emptiest_open()))


def _reserved(view: GpuView) -> GpuView:
    """A free GPU as a reserved one. Not by ``replace``, which is a fifth of the time of a decision in a cluster."""
    return GpuView(view.gpu, GIVEN, view.ours, view.shareable_mb, True, view.node, room_mb=view.room_mb)
