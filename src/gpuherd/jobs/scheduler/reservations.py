"""GPUs kept for jobs that wait, and the tentative schedule that a decision fills in. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuherd.gpus.state import Gpu
from gpuherd.jobs.scheduler.pool import Machine, Pool, comes
from gpuherd.jobs.scheduler.types import GpuView, Limits, WaitingJob

# The pool as it would be if the decision so far were carried out, with what is kept for somebody taken out.
#
# Changes are made in the pool itself, which saves a copy of it, and are taken back when the decision is made. It
# knows how much is left to give, and no rule by which to give it.

# Why a GPU is not free, by the decision that is being made.
GIVEN = "goes to a job before this one"
KEPT = "kept for a job before this one"

# How good a machine is for a job: GPUs free, lacking (negative), and MB of room on those that lack.
Rank = tuple[int, int, int]


class Draft:
    """One decision's view of a pool.

    Attributes:
        budget: GPUs that may still be taken into use; below 0 when a large job's part of the limit is kept for it.
        shared: there are GPUs on which sharing jobs run.
        ranks: how good machines are, by what jobs ask for and the machine's place; forgotten when something changes
            there.
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
        """Takes in what a GPU is to be."""
        uuid = view.gpu.uuid
        if uuid not in self._changed:
            self._changed.add(uuid)
            self._originals.append(self.pool.view(uuid))
        self.pool.update(view)
        if self.ranks:
            self.forget_rank(self.pool.machine_of(uuid))

    def close(self, view: GpuView) -> None:
        """Nothing more is added to a shared GPU."""
        self.change(replace(view, shareable_mb=None, busy=KEPT))

    def forget_rank(self, machine: Machine) -> None:
        """Something has changed on this machine."""
        for known in self.ranks.values():
            known.pop(machine.place, None)

    def put_back(self) -> None:
        """Leaves the pool as it was."""
        for view in reversed(self._originals):
            self.pool.update(view)


# What is kept for jobs that wait for our own GPUs, so that smaller ones that come after can't starve them.
#
# For the first large jobs that wait: the free GPUs of one machine, with their part of the limit, and as many shared
# ones closed as they lack. For the first sharing job that fits nowhere: the shared GPU with the most room. Which
# machine it is and when the job surely has enough there is decided here; who may borrow what is kept meanwhile is
# ``policy``'s part.


@dataclass(slots=True, eq=False)
class Keep:
    """What is kept for a job: ``gpus`` that are free, by UUID, and ``part`` of the limit; it surely has enough at
    ``until``, None when nobody knows."""

    until: float | None
    part: int
    gpus: dict[str, Gpu]


class Keeping:
    """What one decision keeps. ``keeps``: what for each large job, the first first."""

    def __init__(self, draft: Draft):
        self._draft = draft
        self.keeps: list[Keep] = []
        self._promised = 0
        self._claims: dict[int, int] = {}
        self._kept_for_sharing = False

    def lends_for_s(self) -> float | None:
        """For how many seconds kept GPUs can still be lent, None when none can be."""
        until = [keep.until for keep in self.keeps if keep.gpus and keep.until is not None]
        return max((at - self._draft.limits.now for at in until if at > self._draft.limits.now), default=None)

    def keep_for(self, job: WaitingJob, barred: frozenset[str]) -> None:
        """Sees to it that a job that waits for our own GPUs gets them before those that come after it."""
        if job.gpus > self._draft.limits.most_gpus:
            return  # It waits for the hour, not for GPUs.
        if job.share:
            self._keep_room(job, barred)
        elif job.gpus > 1 or self._draft.pool.open_count:
            self._keep_gpus(job, barred)

    def _keep_room(self, job: WaitingJob, barred: frozenset[str]) -> None:
        """For the first sharing job that fits nowhere: nothing is added to the shared GPU with the most room."""
        if self._kept_for_sharing:
            return
        for view in self._draft.pool.emptiest_open():
            if view.largest_mb >= (job.memory_mb or 0) and view.gpu.uuid not in barred:
                self._draft.close(view)
                self._kept_for_sharing = True
                return

    def _keep_gpus(self, job: WaitingJob, barred: frozenset[str]) -> None:
        if job.gpus > 1 and len(self.keeps) >= self._draft.limits.keep_for:
            return  # Its turn comes.
        machine, until = self._machine_for(job, barred)
        if machine is None:
            return  # It waits for other people's GPUs.
        if job.gpus > 1:
            self._keep_free(job, barred, machine, until)
        self._promised += job.gpus
        if self._draft.pool.open_count:
            self._close_shared(job, barred, machine)
        self._claims[machine.place] = self._claims.get(machine.place, 0) + job.gpus
        self._draft.forget_rank(machine)

    def _keep_free(self, job: WaitingJob, barred: frozenset[str], machine: Machine, until: float | None) -> None:
        """Keeps what is free on the machine, and as much of the limit. The rest of its part is in use there, and comes
        back with the GPUs."""
        free = [view for view in machine.free_for(job, barred) if comes(view, job)]
        part = min(job.gpus, len(free) + sum(1 for _ in machine.returning_for(job, barred)))
        self._draft.budget -= part
        self.keeps.append(Keep(until, part, {view.gpu.uuid: view.gpu for view in free}))
        for view in free:
            self._draft.change(_kept(view))

    def _machine_for(self, job: WaitingJob, barred: frozenset[str]) -> tuple[Machine | None, float | None]:
        """The machine on which GPUs are kept for the job, and when it surely has enough of them, if that is known.

        First the one that surely has enough at the earliest. Where no time limits say so: where the job could have the
        most now; then where it lacks the fewest, were the shared ones closed to others; then where those are the
        emptiest. On that machine all this only gets better while GPUs are kept there, and only a better one takes its
        place: so the keeping can't go to and fro without end.
        """
        if job.gpus > 1 and self._draft.pool.timed:
            machine, until = self._draft.pool.surest(job, barred, self._claims)
            if machine is not None:
                return machine, until
        best, rank = None, (-1, 0, 0)
        for machine in self._draft.pool.enough(job, barred):
            if machine.free < rank[0] or (machine.free == rank[0] and not self._draft.pool.open_count):
                break  # No machine from here on can be better.
            found = self._rank_of(job, barred, machine)
            if found > rank:
                best, rank = machine, found
            if rank == (machine.free, 0, 0):
                break
        return best, None

    def _rank_of(self, job: WaitingJob, barred: frozenset[str], machine: Machine) -> Rank:
        """How good a machine is for the job: GPUs free, lacking (negative), and MB of room on those that lack."""
        known = self._draft.ranks.setdefault((job.gpus, job.memory_mb, barred), {})
        if machine.place not in known:
            lacks = self._lacks(job, barred, machine) if self._draft.pool.open_count else 0
            rooms = sum(view.shareable_mb or 0 for view in machine.emptiest(job, barred, lacks))
            known[machine.place] = (machine.tally(job, barred).free, -lacks, rooms)
        return known[machine.place]

    def _lacks(self, job: WaitingJob, barred: frozenset[str], machine: Machine) -> int:
        """How many shared GPUs of the machine must be closed for the job, beside those that come anyway."""
        return max(0, job.gpus + self._claims.get(machine.place, 0) - machine.tally(job, barred).come)

    def _close_shared(self, job: WaitingJob, barred: frozenset[str], machine: Machine) -> None:
        """Closes shared GPUs, those with the most room first, until enough will come and the limit allows them."""
        for view in machine.emptiest(job, barred, self._lacks(job, barred, machine)):
            self._draft.close(view)
        pool, most = self._draft.pool, self._draft.limits.most_gpus
        while pool.open_count and pool.open_count + self._promised > most:
            self._draft.close(next(pool.emptiest_open()))


def _kept(view: GpuView) -> GpuView:
    """A free GPU as one that is kept. Not by ``replace``, which is a fifth of the time of a decision in a cluster."""
    return GpuView(view.gpu, GIVEN, view.ours, view.shareable_mb, True, view.machine, room_mb=view.room_mb)
