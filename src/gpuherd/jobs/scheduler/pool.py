"""The GPUs that may be used, by node, indexed for decisions and kept from one to the next."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from gpuherd.jobs.scheduler.types import GpuView, Limits, WaitingJob, fits, why_never

# A machine of the pool: its GPUs with the latest verdicts, and what a decision asks of them for one kind of job.
#
# What is asked for time and again is counted once and kept right with every change of a GPU, so that a machine of a
# thousand GPUs costs a decision no more than one of four.

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


# The GPUs that may be used, kept from one decision to the next and indexed for it.
#
# A decision must not cost a look at every GPU of a large cluster. So the pool keeps, by machine, which GPUs are free,
# the machines by how many they have free, and the GPUs that are shared by how much may still be promised on them;
# ``update`` moves one GPU in all of these at once. It knows nothing of jobs' order, limits or reservations: those are
# ``policy``'s.

__all__ = ["Machine", "Pool", "comes"]


class Pool:
    """All GPUs with the latest verdicts.

    ``in_use``: how many of them our jobs are on; ``free``: how many a job could have now; ``timed``: on how many it is
    known when our job is surely over.

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
        self.machines: list[Machine] = []
        self.in_use = 0
        self.free = 0
        self.timed = 0
        self._by_name: dict[str, Machine] = {}
        self._home: dict[str, Machine] = {}
        # Places of the machines that have so many GPUs free, each list in order.
        self._by_free: list[list[int]] = [[]]
        # (MB that may still be promised, place of the machine, UUID), in order.
        self._open: list[tuple[int, int, str]] = []
        self._never: dict[tuple[object, ...], str | None] = {}
        self._enough: dict[tuple[int, int | None], frozenset[int]] = {}
        self._least_mb = math.inf
        for view in views:
            self.update(view)

    # --- what there is ----------------------------------------------------------------------------------------

    def update(self, view: GpuView) -> None:
        """Takes in a GPU, or what is now known of one that is there (which stays in its machine)."""
        # The hottest code of a simulation: properties of the views are written out where that saves a call.
        uuid = view.gpu.uuid
        free, is_open = view.busy is None and not view.ours, view.ours and view.shareable_mb is not None
        machine = self._home.get(uuid)
        if machine is None:
            machine = self._home[uuid] = self._machine(view.machine)
            machine.put(view)
            self._never.clear()
            self._enough.clear()
            self.in_use += view.ours
            self.timed += view.over_at is not None
            self._count_free(machine, int(free))
        else:
            old = machine.views[uuid]
            machine.put(view)
            if old.gpu is not view.gpu and _traits(old) != _traits(view):
                self._never.clear()
                self._enough.clear()
            elif _comes_otherwise(old, view):
                self._enough.clear()
            self.in_use += view.ours - old.ours
            self.timed += (view.over_at is not None) - (old.over_at is not None)
            was_free = old.busy is None and not old.ours
            if free is not was_free:
                self._count_free(machine, free - was_free)
            if old.ours and old.shareable_mb is not None:
                del self._open[bisect_left(self._open, _room(old, machine))]
        if machine.least_mb < self._least_mb:
            self._least_mb = machine.least_mb
        if is_open:
            insort(self._open, _room(view, machine))

    def remove(self, uuid: str) -> None:
        """Forgets a GPU that may not be used any more; nothing for one that is not there."""
        machine = self._home.pop(uuid, None)
        if machine is None:
            return
        old = machine.take_out(uuid)
        self.in_use -= old.ours
        self.timed -= old.over_at is not None
        self._count_free(machine, -int(old.is_free))
        if old.is_open:
            del self._open[bisect_left(self._open, _room(old, machine))]
        self._never.clear()
        self._enough.clear()

    def view(self, uuid: str) -> GpuView:
        """The GPU as it was last described. Raises KeyError for one that is not there."""
        return self._home[uuid].views[uuid]

    def machine_of(self, uuid: str) -> Machine:
        """The machine in which the GPU is. Raises KeyError for one that is not there."""
        return self._home[uuid]

    def views(self) -> Iterator[GpuView]:
        """All of them, machine by machine."""
        for machine in self.machines:
            yield from machine.views.values()

    def __len__(self) -> int:
        """How many GPUs there are."""
        return len(self._home)

    # --- what a decision asks ---------------------------------------------------------------------------------

    def why_never(self, job: WaitingJob, limits: Limits) -> str | None:
        """Why the job could never run on any of the machines, or None when it could."""
        wishes = (*self._kind(job), job.nodes, job.host_memory_mb)
        kind = (*wishes, limits.max_gpus, limits.cpu_only, limits.most_ever)
        if kind not in self._never:
            largest = sorted(self.machines, key=lambda machine: -len(machine.views)) or [Machine("", 0)]
            reasons = [why_never(job, [view.gpu for view in machine.views.values()], limits) for machine in largest]
            self._never[kind] = None if None in reasons else reasons[0]
        return self._never[kind]

    def with_free(self, least: int) -> Iterator[Machine]:
        """Machines with at least so many GPUs free, those with the fewest first: large gaps stay for large jobs."""
        for places in self._by_free[max(1, least) :]:
            for place in places:
                yield self.machines[place]

    def enough(self, job: WaitingJob, barred: frozenset[str]) -> Iterator[Machine]:
        """Machines with enough GPUs that will come for the job, those with the most free ones first."""
        known = self._with_enough(job) if not barred else None
        for places in reversed(self._by_free):
            for place in places:
                machine = self.machines[place]
                if place in known if known is not None else machine.count_coming(job, barred) >= job.gpus:
                    yield machine

    def has_enough(self, job: WaitingJob, barred: frozenset[str]) -> bool:
        """Whether some machine has enough GPUs that will come for the job, without ``barred``."""
        if not barred:
            return bool(self._with_enough(job))
        return any(machine.count_coming(job, barred) >= job.gpus for machine in self.machines)

    def surest(
        self, job: WaitingJob, barred: frozenset[str], without: Container[int]
    ) -> tuple[Machine | None, float | None]:
        """The machine on which the job surely has enough GPUs at the earliest, and when; (None, None) when nobody
        knows of any. Of equals the one with the most free ones. ``without``: places of machines to leave out."""
        best, at = None, math.inf
        for machine in self.enough(job, barred):
            if machine.place not in without and machine.sure_at(job, barred) < at:
                best, at = machine, machine.sure_at(job, barred)
        return (None, None) if best is None else (best, at)

    def open_from(self, least_mb: int) -> Iterator[GpuView]:
        """GPUs on which so much may still be promised to one more sharing job, the fullest first."""
        for place in range(bisect_left(self._open, (least_mb, -1, "")), len(self._open)):
            yield self.view(self._open[place][2])

    def emptiest_open(self) -> Iterator[GpuView]:
        """GPUs that are shared and may be added to, the one with the most room first."""
        for _, _, uuid in reversed(self._open):
            yield self.view(uuid)

    @property
    def open_count(self) -> int:
        """How many GPUs are shared and may be added to."""
        return len(self._open)

    # --- plumbing ---------------------------------------------------------------------------------------------

    def _machine(self, name: str) -> Machine:
        if name not in self._by_name:
            machine = self._by_name[name] = Machine(name, len(self.machines))
            self.machines.append(machine)
            self._by_free[0].append(machine.place)
        return self._by_name[name]

    def _count_free(self, machine: Machine, change: int) -> None:
        if not change:
            return
        places = self._by_free[machine.free]
        del places[bisect_left(places, machine.place)]
        machine.free += change
        self.free += change
        while len(self._by_free) <= machine.free:
            self._by_free.append([])
        insort(self._by_free[machine.free], machine.place)

    def _kind(self, job: WaitingJob) -> tuple[int, int | None]:
        """What the job asks for: no memory where every GPU always has as much, so that there are few kinds."""
        return (job.gpus, None if job.memory_mb is None or job.memory_mb <= self._least_mb else job.memory_mb)

    def _with_enough(self, job: WaitingJob) -> frozenset[int]:
        kind = self._kind(job)
        if kind not in self._enough:
            nothing: frozenset[str] = frozenset()
            self._enough[kind] = frozenset(
                machine.place for machine in self.machines if machine.count_coming(job, nothing) >= job.gpus
            )
        return self._enough[kind]


def _traits(view: GpuView) -> tuple[int, bool, bool]:
    return (view.gpu.total_mb, bool(view.gpu.mig_instances), view.gpu.mig_parent is None)


def _comes_otherwise(old: GpuView, new: GpuView) -> bool:
    """Whether ``comes`` may now say something else; a wholly empty GPU is the same free or ours."""
    if old.will_come is not new.will_come:
        return True
    if old.gpu is new.gpu and old.gpu.free_mb >= old.gpu.total_mb and old.room_mb is new.room_mb is None:
        return False
    return _tight_mb(old) != _tight_mb(new)


def _tight_mb(view: GpuView) -> int | None:
    most_mb = view.gpu.free_mb if view.is_free else view.largest_mb
    return most_mb if most_mb < view.gpu.total_mb else None


def _room(view: GpuView, machine: Machine) -> tuple[int, int, str]:
    return (view.shareable_mb or 0, machine.place, view.gpu.uuid)
