"""A machine of the pool: its GPUs with the latest verdicts, and what a decision asks of them for one kind of job.

What is asked for time and again is counted once and kept right with every change of a GPU, so that a machine of a
thousand GPUs costs a decision no more than one of four.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuherd.jobs.decision import GpuView, WaitingJob, fits

# For so many kinds of jobs counts are kept.
_MOST_TALLIES = 64
# On a machine of so few GPUs it is cheaper to count anew.
_SMALL = 32


@dataclass(slots=True, eq=False)
class Tally:
    """Counts for one kind of job: GPUs that are ``free`` for it, and that will ``come`` for it by themselves (free ones
    among them): not those that are shared and may be added to."""

    free: int = 0
    come: int = 0

    def count(self, view: GpuView, kind: tuple[int, int | None], change: int) -> None:
        """Counts a GPU in (1) or out (-1)."""
        if view.will_come and fits(view.gpu, *kind) and _comes(view, kind[1]):
            self.free += change * view.is_free
            self.come += change * (not view.is_open)


@dataclass(slots=True, eq=False)
class Machine:
    """GPUs that one job may have together.

    ``place``: its rank among the machines, in order of appearance; ``free``: how many of its GPUs are. ``least_mb``: no
    GPU of it ever had less for one job: to ask for no more than that is like asking for nothing.
    """

    name: str
    place: int
    views: dict[str, GpuView] = field(default_factory=dict)
    free: int = 0
    least_mb: float = math.inf
    # Where more may be promised: (minus the MB, UUID), in order, so that the emptiest come first.
    _open: list[tuple[int, str]] = field(default_factory=list)
    # Those that are free, and those that will be in a moment: what a decision asks for most.
    _free: dict[str, GpuView] = field(default_factory=dict)
    _returning: dict[str, GpuView] = field(default_factory=dict)
    # By GPUs and memory asked for. The one is emptied when a GPU of the machine changes, the other kept right.
    _sure: dict[tuple[int, int | None], float] = field(default_factory=dict)
    _tallies: dict[tuple[int, int | None], Tally] = field(default_factory=dict)

    def count_coming(self, job: WaitingJob, barred: frozenset[str]) -> int:
        """How many GPUs the job could use are free, or will be when our own jobs have ended."""
        return sum(comes(view, job) for view in self.usable(job, barred))

    def put(self, view: GpuView) -> None:
        """Takes in what is now known of one of its GPUs."""
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
            self._tallies.clear()
        if old is not None and old.shareable_mb is not None and old.ours:
            del self._open[bisect_left(self._open, (-(old.shareable_mb or 0), uuid))]
        if view.shareable_mb is not None and view.ours:
            insort(self._open, (-(view.shareable_mb or 0), uuid))
        if self._tallies and len(self.views) <= _SMALL:
            self._tallies.clear()
        elif self._tallies:
            for kind, tally in self._tallies.items():
                if old is not None:
                    tally.count(old, kind, -1)
                tally.count(view, kind, 1)

    def take_out(self, uuid: str) -> GpuView:
        """Forgets one of its GPUs, and returns what was known of it."""
        self._sure.clear()
        self._tallies.clear()
        old = self.views.pop(uuid)
        self._free.pop(uuid, None)
        self._returning.pop(uuid, None)
        if old.is_open:
            del self._open[bisect_left(self._open, (-(old.shareable_mb or 0), uuid))]
        return old

    def tally(self, job: WaitingJob, barred: frozenset[str]) -> Tally:
        """How many GPUs the job could use are free, and how many will come without a shared one being closed."""
        memory_mb = None if job.memory_mb is None or job.memory_mb <= self.least_mb else job.memory_mb
        kind = (job.gpus, memory_mb)
        if not barred and kind in self._tallies:
            return self._tallies[kind]
        tally = Tally()
        for uuid, view in self.views.items():
            if uuid not in barred:
                tally.count(view, kind, 1)
        if not barred:
            if len(self._tallies) >= _MOST_TALLIES:
                self._tallies.clear()
            self._tallies[kind] = tally
        return tally

    def emptiest(self, job: WaitingJob, barred: frozenset[str], count: int) -> list[GpuView]:
        """Shared GPUs that the job could use were they empty, of those that may be added to: the most room first."""
        found: list[GpuView] = []
        for _, uuid in self._open if count > 0 else ():
            view = self.views[uuid]
            if uuid not in barred and fits(view.gpu, job.gpus, job.memory_mb):
                found.append(view)
                if len(found) == count:
                    break
        return found

    def sure_at(self, job: WaitingJob, barred: frozenset[str]) -> float:
        """When the job surely has enough GPUs here, if none is given to others: by the time limits of our jobs. Minus
        infinity when there are enough now, or in a moment; infinity when nobody knows."""
        if barred:
            return self._sure_at(job, barred)
        kind = (job.gpus, job.memory_mb)
        if kind not in self._sure:
            self._sure[kind] = self._sure_at(job, barred)
        return self._sure[kind]

    def _sure_at(self, job: WaitingJob, barred: frozenset[str]) -> float:
        times = []
        for view in self.usable(job, barred):
            if not view.ours and comes(view, job):
                times.append(-math.inf)
            elif view.over_at is not None and not view.is_open:
                times.append(view.over_at)
        times.sort()
        return times[job.gpus - 1] if len(times) >= job.gpus else math.inf

    def usable(self, job: WaitingJob, barred: frozenset[str]) -> Iterator[GpuView]:
        """Its GPUs that are large enough for the job, without ``barred``."""
        return _for(self.views, job, barred)

    def free_for(self, job: WaitingJob, barred: frozenset[str]) -> Iterator[GpuView]:
        """Those of ``usable`` that are free, in no order."""
        return _for(self._free, job, barred)

    def returning_for(self, job: WaitingJob, barred: frozenset[str]) -> Iterator[GpuView]:
        """Those of ``usable`` that will be free in a moment, in no order."""
        return _for(self._returning, job, barred)


def _for(views: dict[str, GpuView], job: WaitingJob, barred: frozenset[str]) -> Iterator[GpuView]:
    for uuid, view in views.items():
        if uuid not in barred and fits(view.gpu, job.gpus, job.memory_mb):
            yield view


def comes(view: GpuView, job: WaitingJob) -> bool:
    """Whether a GPU that is large enough for the job is free for it, or will be when our own jobs have ended.

    One that is free, but of whose memory somebody holds a little too much, is not one that comes; nor is one that had
    too little when it was last free.
    """
    return _comes(view, job.memory_mb)


def _comes(view: GpuView, memory_mb: int | None) -> bool:
    if memory_mb is None or not view.will_come:
        return view.will_come
    return (view.gpu.free_mb if view.is_free else view.largest_mb) >= memory_mb
