"""Which waiting job starts now, on which GPUs, and why the others wait: one pure function.

It sees the head of the queue, what runs, and each GPU with a verdict (free, or why not); it knows no database, no
driver and no clock. Rules, in this order:

1. Priority, then age (or the longest first). A job that could never run here is refused, with the reason.
2. No more than the limits at once, and no GPU twice, but for jobs that share.
3. A job on several GPUs can't be starved by smaller ones: for the first that waits, when those that it waits for are
   free or used by our own jobs, the free ones of one machine are kept, and so is their part of the limit. When it
   waits for other people's GPUs, whose end nobody knows, the smaller ones go first meanwhile. One job is enough: when
   it has started, the next is the first. A job whose time limit ends it before the first one's GPUs are surely
   complete, by the time limits of what runs there, may have kept ones meanwhile (EASY backfilling, Lifka 1995): the
   moment by which the first one surely starts is never put off.
4. A job that failed on a GPU gets another one, if there is another that is free or ours.
5. A job that shares goes to the fullest GPU on which it fits, so that others stay whole; to a free one when there is
   none. To the first sharing job that fits nowhere, the shared GPU with the most room is kept: nothing is added there
   until it fits. For a job that wants GPUs for itself, as many shared ones are closed in this way as it lacks. What is
   kept for a job only grows emptier while it waits, so that its turn comes.

``decide`` is for one decision, ``decide_with`` for many on a ``Pool`` that lasts: the same code, at a cost that grows
with the jobs looked at and not with the GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from gpuherd.gpus.state import Gpu
from gpuherd.jobs.decision import (
    Chooser,
    Decision,
    GpuView,
    Limits,
    Start,
    Wait,
    WaitingJob,
    fits,
    why_never,
)
from gpuherd.jobs.pool import Machine, Pool, comes

__all__ = [
    "Chooser",
    "Decision",
    "GpuView",
    "Limits",
    "Pool",
    "Start",
    "Wait",
    "WaitingJob",
    "decide",
    "decide_with",
    "order_key",
    "why_never",
]

# With more GPUs than this in the pool a reason counts them and does not name each.
_NAMED = 64
_NOBODY: frozenset[str] = frozenset()
_Rank = tuple[int, int, int]


def decide(
    waiting: Sequence[WaitingJob],
    gpus: Sequence[GpuView],
    limits: Limits,
    choose: Chooser,
    *,
    cpu_running: int = 0,
) -> Decision:
    """What to start now.

    GPUs on which our jobs run are marked ``ours`` in ``gpus`` and count against ``max_gpus``; ``cpu_running`` jobs run
    without a GPU and count against ``cpu_slots``.
    """
    return decide_with(Pool(gpus), waiting, limits, choose, cpu_running=cpu_running)


def decide_with(
    pool: Pool,
    waiting: Sequence[WaitingJob],
    limits: Limits,
    choose: Chooser,
    *,
    cpu_running: int = 0,
    explain: bool = True,
) -> Decision:
    """What to start now, with GPUs that the caller keeps in a pool.

    The pool is as before when this returns: the caller updates it with what has really started. Without ``explain`` a
    job that waits for GPUs is told just that, which saves the time of naming them.
    """
    decision = _Round(pool, limits, choose, cpu_running, explain)
    try:
        for job in sorted(waiting, key=lambda job: order_key(job, limits)):
            decision.place(job)
    finally:
        decision.put_back()
    return Decision(tuple(decision.starts), tuple(decision.waits), tuple(decision.refused), decision.lends_for_s())


def order_key(job: WaitingJob, limits: Limits) -> tuple[int, float, int]:
    """Sorts waiting jobs: the one to be looked at first is the least."""
    cost = -job.cost if limits.longest_first and job.cost is not None else float(limits.longest_first)
    return (-job.priority, cost, job.id)


class _Round:
    """One decision as it goes through the jobs in order: what is left to give, and what is kept for whom.

    While it lasts the pool holds what would be so if all its starts were carried out, with what is kept taken out.
    """

    def __init__(self, pool: Pool, limits: Limits, choose: Chooser, cpu_running: int, explain: bool):
        self.pool = pool
        self.limits = limits
        self.choose = choose
        self.explain = explain
        # May fall below 0 when a large job's part is kept for it.
        self.budget = limits.most_gpus - pool.in_use
        self.slots = limits.cpu_slots - cpu_running
        self.places = None if limits.max_concurrent is None else limits.max_concurrent - limits.running
        self.promised = 0
        self.keeps: list[_Keep] = []
        self.claims: dict[int, int] = {}
        # By what jobs ask for and the place of the machine; forgotten when something changes there.
        self._ranks: dict[tuple[int, int | None, frozenset[str]], dict[int, _Rank]] = {}
        self.kept_for_sharing = False
        self.given: set[str] = set()
        self.originals: list[GpuView] = []
        self.starts: list[Start] = []
        self.waits: list[Wait] = []
        self.refused: list[Wait] = []
        # The limit was lowered: what is shared must empty, too, to come down to it.
        for view in list(islice(pool.emptiest_open(), max(0, -self.budget))):
            self._close(view)

    def put_back(self) -> None:
        """Leaves the pool as it was."""
        for view in reversed(self.originals):
            self.pool.update(view)

    def place(self, job: WaitingJob) -> None:
        """Starts the job, or says why not."""
        never = self.pool.why_never(job, self.limits)
        if never is not None:
            self.refused.append(Wait(job.id, never))
        elif self.limits.closed is not None:
            self.waits.append(Wait(job.id, self.limits.closed))
        elif self.places is not None and self.places <= 0:
            self.waits.append(Wait(job.id, f"{self.limits.max_concurrent} jobs run, which is the most at once"))
        elif job.gpus == 0 or self.limits.cpu_only:
            self._place_on_cpu(job)
        else:
            self._place_on_gpus(job)

    # --- giving -----------------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        self.starts.append(start)
        if self.places is not None:
            self.places -= 1

    def _place_on_cpu(self, job: WaitingJob) -> None:
        if self.slots > 0:
            self.slots -= 1
            self._start(Start(job.id))
        else:
            self.waits.append(Wait(job.id, f"all {self.limits.cpu_slots} places for jobs on the CPU are taken"))

    def _place_on_gpus(self, job: WaitingJob) -> None:
        barred = _NOBODY
        if job.avoid and self.pool.has_enough(job, job.avoid):
            barred = job.avoid
        if (job.share and self._join(job, barred)) or self._take(job, barred) or self._borrow(job, barred):
            return
        reason = self._why(job, barred) if self.explain else "waits for GPUs"
        self.waits.append(Wait(job.id, reason))
        self._keep_for(job, barred)

    def _join(self, job: WaitingJob, barred: frozenset[str]) -> bool:
        """Puts a sharing job beside others, on the fullest GPU that has room for it."""
        need_mb = job.memory_mb or 0
        for view in self.pool.open_from(need_mb):
            if view.gpu.uuid not in barred:
                self._change(replace(view, shareable_mb=(view.shareable_mb or 0) - need_mb))
                self._start(Start(job.id, (view.gpu,), shared=True))
                return True
        return False

    def _take(self, job: WaitingJob, barred: frozenset[str]) -> bool:
        """Gives the job GPUs that are free."""
        chosen = self._choose(job, barred) if 0 < job.gpus <= min(self.budget, self.pool.free) else None
        if chosen is None:
            return False
        self.budget -= job.gpus
        for gpu in chosen:
            view = self.pool.view(gpu.uuid)
            left_mb = _promisable_mb(view) - (job.memory_mb or 0) if job.share else None
            over_at = self._over_at(job)
            self._change(replace(view, ours=True, busy=_GIVEN, shareable_mb=left_mb, over_at=over_at))
        self._start(Start(job.id, chosen, shared=job.share))
        return True

    def _over_at(self, job: WaitingJob) -> float | None:
        return None if job.limit_s is None or job.share else self.limits.now + job.limit_s

    def _borrow(self, job: WaitingJob, barred: frozenset[str]) -> bool:
        """Gives the job GPUs that are kept for another, which it surely gives back before that one can start."""
        over_at = self._over_at(job)
        if over_at is None:
            return False
        for keep in self.keeps:
            if keep.until is None or over_at > keep.until or job.gpus > self.budget + keep.part:
                continue
            candidates = [gpu for gpu in keep.gpus.values() if gpu.uuid not in barred]
            candidates = [gpu for gpu in candidates if fits(gpu, job.gpus, job.memory_mb)]
            chosen = self.choose(candidates, job.gpus, job.memory_mb) if len(candidates) >= job.gpus else None
            if chosen is None:
                continue
            for gpu in chosen:
                del keep.gpus[gpu.uuid]
                kept = self.pool.view(gpu.uuid)
                self._change(replace(kept, ours=True, busy=_GIVEN, returning=False, over_at=over_at))
            # These come back in time, and with them the part of the limit that was kept.
            keep.part -= job.gpus
            self._start(Start(job.id, chosen))
            return True
        return False

    def _choose(self, job: WaitingJob, barred: frozenset[str]) -> tuple[Gpu, ...] | None:
        for machine in self.pool.with_free(job.gpus):
            candidates = [
                view.gpu
                for view in machine.usable(job, barred)
                if view.is_free and (not job.share or _promisable_mb(view) >= (job.memory_mb or 0))
            ]
            chosen = self.choose(candidates, job.gpus, job.memory_mb) if len(candidates) >= job.gpus else None
            if chosen is not None:
                return chosen
        return None

    # --- keeping ----------------------------------------------------------------------------------------------

    def lends_for_s(self) -> float | None:
        """For how many seconds kept GPUs can still be lent, None when none can be."""
        until = [keep.until for keep in self.keeps if keep.gpus and keep.until is not None]
        return max((at - self.limits.now for at in until if at > self.limits.now), default=None)

    def _keep_for(self, job: WaitingJob, barred: frozenset[str]) -> None:
        """Sees to it that a job that waits for our own GPUs gets them before those that come after it."""
        if job.gpus > self.limits.most_gpus:
            return  # It waits for the hour, not for GPUs.
        if job.share:
            self._keep_room(job, barred)
        elif job.gpus > 1 or self.pool.open_count:
            self._keep_gpus(job, barred)

    def _keep_room(self, job: WaitingJob, barred: frozenset[str]) -> None:
        """For the first sharing job that fits nowhere: nothing is added to the shared GPU with the most room."""
        if self.kept_for_sharing:
            return
        for view in self.pool.emptiest_open():
            if view.largest_mb >= (job.memory_mb or 0) and view.gpu.uuid not in barred:
                self._close(view)
                self.kept_for_sharing = True
                return

    def _keep_gpus(self, job: WaitingJob, barred: frozenset[str]) -> None:
        if job.gpus > 1 and len(self.keeps) >= self.limits.keep_for:
            return  # Its turn comes.
        machine, until = self._machine_for(job, barred)
        if machine is None:
            return  # It waits for other people's GPUs.
        if job.gpus > 1:
            self._keep_free(job, barred, machine, until)
        self.promised += job.gpus
        if self.pool.open_count:
            self._close_shared(job, barred, machine)
        self.claims[machine.place] = self.claims.get(machine.place, 0) + job.gpus
        self._forget_rank(machine)

    def _keep_free(self, job: WaitingJob, barred: frozenset[str], machine: Machine, until: float | None) -> None:
        """Keeps what is free on the machine, and as much of the limit. The rest of its part is in use there, and comes
        back with the GPUs."""
        usable = list(machine.usable(job, barred))
        free = [view for view in usable if view.is_free and comes(view, job)]
        part = min(job.gpus, len(free) + sum(view.returning for view in usable))
        self.budget -= part
        self.keeps.append(_Keep(until, part, {view.gpu.uuid: view.gpu for view in free}))
        for view in free:
            self._change(_kept(view))

    def _machine_for(self, job: WaitingJob, barred: frozenset[str]) -> tuple[Machine | None, float | None]:
        """The machine on which GPUs are kept for the job, and when it surely has enough of them, if that is known.

        First the one that surely has enough at the earliest. Where no time limits say so: where the job could have the
        most now; then where it lacks the fewest, were the shared ones closed to others; then where those are the
        emptiest. On that machine all this only gets better while GPUs are kept there, and only a better one takes its
        place: so the keeping can't go to and fro without end.
        """
        if job.gpus > 1 and self.pool.timed:
            machine, until = self.pool.surest(job, barred, self.claims)
            if machine is not None:
                return machine, until
        best, rank = None, (-1, 0, 0)
        for machine in self.pool.enough(job, barred):
            if machine.free < rank[0] or (machine.free == rank[0] and not self.pool.open_count):
                break  # No machine from here on can be better.
            found = self._rank(job, barred, machine)
            if found > rank:
                best, rank = machine, found
            if rank == (machine.free, 0, 0):
                break
        return best, None

    def _rank(self, job: WaitingJob, barred: frozenset[str], machine: Machine) -> _Rank:
        """How good a machine is for the job: GPUs free, lacking (negative), and MB of room on those that lack."""
        known = self._ranks.setdefault((job.gpus, job.memory_mb, barred), {})
        if machine.place not in known:
            usable = list(machine.usable(job, barred))
            free = sum(view.is_free and comes(view, job) for view in usable)
            lacks = self._lacks(job, machine, usable) if self.pool.open_count else 0
            rooms = sorted((view.shareable_mb or 0 for view in usable if view.is_open), reverse=True) if lacks else []
            known[machine.place] = (free, -lacks, sum(rooms[:lacks]))
        return known[machine.place]

    def _forget_rank(self, machine: Machine) -> None:
        for known in self._ranks.values():
            known.pop(machine.place, None)

    def _lacks(self, job: WaitingJob, machine: Machine, usable: Sequence[GpuView]) -> int:
        """How many shared GPUs of the machine must be closed for the job, beside those that come anyway."""
        coming = sum(comes(view, job) and not view.is_open for view in usable)
        return max(0, job.gpus + self.claims.get(machine.place, 0) - coming)

    def _close_shared(self, job: WaitingJob, barred: frozenset[str], machine: Machine) -> None:
        """Closes shared GPUs, those with the most room first, until enough will come and the limit allows them."""
        usable = list(machine.usable(job, barred))
        shared = [view for view in usable if view.is_open]
        shared.sort(key=lambda view: (-(view.shareable_mb or 0), view.gpu.uuid))
        for view in shared[: self._lacks(job, machine, usable)]:
            self._close(view)
        while self.pool.open_count and self.pool.open_count + self.promised > self.limits.most_gpus:
            self._close(next(self.pool.emptiest_open()))

    def _close(self, view: GpuView) -> None:
        self._change(replace(view, shareable_mb=None, busy=_KEPT))

    def _change(self, view: GpuView) -> None:
        uuid = view.gpu.uuid
        if uuid not in self.given:
            self.given.add(uuid)
            self.originals.append(self.pool.view(uuid))
        self.pool.update(view)
        if self._ranks:
            self._forget_rank(self.pool.machine_of(uuid))

    # --- saying why -------------------------------------------------------------------------------------------

    def _why(self, job: WaitingJob, barred: frozenset[str]) -> str:
        most = self.limits.most_gpus
        if self.budget < job.gpus:
            if most < self.limits.max_gpus and job.gpus > most:
                return self.limits.gpus_now_why or f"only {most} GPUs may be used for now"
            kept = " or kept for a larger job" if self.keeps else ""
            return f"{most - max(0, self.budget)} of at most {most} GPUs are in use{kept}"
        counted = sum(len(machine.views) for machine in self.pool.machines)
        if counted > _NAMED:
            return f"{self.pool.free} of {counted} GPUs are free, our own jobs run on {self.pool.in_use}"
        reasons, ours = [], []
        for machine in self.pool.machines:
            for view in machine.usable(job, barred):
                if view.is_open and job.share:
                    reasons.append(f"GPU {view.gpu.label}: {view.shareable_mb} of {job.memory_mb} MB can be promised")
                elif view.busy in (_GIVEN, _KEPT):
                    reasons.append(f"GPU {view.gpu.label}: {view.busy}")
                elif view.ours and not comes(view, job):
                    reasons.append(f"GPU {view.gpu.label}: {view.largest_mb} of {job.memory_mb} MB are free at best")
                elif view.ours:
                    ours.append(view.gpu.label)
                elif view.busy is not None:
                    reasons.append(f"GPU {view.gpu.label}: {view.busy}")
                elif job.memory_mb is not None and view.gpu.free_mb < job.memory_mb:
                    reasons.append(f"GPU {view.gpu.label}: {view.gpu.free_mb} of {job.memory_mb} MB are free")
        if ours:
            reasons.append(f"our own jobs run on GPU {', '.join(ours)}")
        return "; ".join(reasons) or f"{self.pool.free} of {job.gpus} GPUs are free"


@dataclass(slots=True, eq=False)
class _Keep:
    """What is kept for a job: ``gpus`` that are free, by UUID, and ``part`` of the limit; it surely has enough at
    ``until``, None when nobody knows."""

    until: float | None
    part: int
    gpus: dict[str, Gpu]


_GIVEN = "goes to a job before this one"
_KEPT = "kept for a job before this one"


def _kept(view: GpuView) -> GpuView:
    """A free GPU as one that is kept. Not by ``replace``, which is a fifth of the time of a decision in a cluster."""
    return GpuView(view.gpu, _GIVEN, view.ours, view.shareable_mb, True, view.machine, room_mb=view.room_mb)


def _promisable_mb(view: GpuView) -> int:
    """MB that may be promised to sharing jobs on a free GPU."""
    return view.gpu.free_mb if view.shareable_mb is None else view.shareable_mb
