"""Which waiting job starts now, on which GPUs, and why the others wait: one pure function."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice

from gpuherd.gpus.state import Gpu
from gpuherd.jobs.scheduler.ordering import order_key
from gpuherd.jobs.scheduler.pool import Node, Pool, comes
from gpuherd.jobs.scheduler.types import Chooser, Decision, GpuView, Limits, Start, Wait, WaitingJob, fits

# A decision sees the head of the queue, the running jobs, and each GPU with a verdict (free, or why not); it knows no
# database, no driver and no clock. Rules, in this order:
#
# 1. Priority, then age (or the longest first). A job that could never run here is refused, with the reason.
# 2. No more than the limits at once, and no GPU twice, except for jobs that share.
# 3. A job on several GPUs can't be starved by smaller ones: for the first that waits, when the GPUs that it waits for
#    are free or used by our own jobs, the free ones of one node are reserved, and its part of the limit. When it waits
#    for other users' GPUs, whose end is not known, the smaller jobs go first meanwhile. One reservation is enough: when
#    its job has started, the next job is the first. A job whose time limit ends it before the first one's GPUs are
#    surely complete, by the time limits of the jobs there, may use reserved GPUs meanwhile (EASY backfilling, Lifka
#    1995): the moment by which the first one surely starts is never delayed.
# 4. A job that failed on a GPU gets another one, if there is another that is free or ours.
# 5. A job that shares goes to the fullest GPU on which it fits, so that others stay whole; to a free one when there is
#    none. For the first sharing job that fits nowhere, the shared GPU with the most room is closed until it fits. For a
#    job that wants GPUs for itself, as many shared ones are closed as it lacks. What is reserved for a job only grows
#    emptier while it waits, so that its turn comes.
# 6. A GPU that another user has reserved (``gpuherd.gpus.reservations``) is none for a job that may still run when that
#    begins: as if the job had failed on it, but for good.
#
# ``decide`` is for one decision, ``decide_with`` for many on a ``Pool`` that lasts: the same code, at a cost that grows
# with the jobs looked at and not with the GPUs.

# Why a GPU is not free, by the decision that is being made.
GIVEN = "goes to a job before this one"
RESERVED = "reserved for a job before this one"

# The reason of a job that waits for GPUs, where no other is wanted.
_WAITS = "waits for GPUs"
# With more GPUs than this in the pool a reason counts them and does not name each.
_MOST_COUNTED = 64

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

    def reserve_for(self, job: WaitingJob) -> None:
        """Ensures that a job that waits for our own GPUs gets them before those behind it."""
        if job.gpus > self._schedule.limits.most_gpus:
            return  # It waits for the hour, not for GPUs.
        if job.share:
            self._reserve_shared_gpu(job)
        elif job.gpus > 1 or self._schedule.pool.open_count:
            self._reserve_gpus(job)

    def _reserve_shared_gpu(self, job: WaitingJob) -> None:
        """For the first sharing job that fits nowhere: closes the shared GPU with the most room."""
        if self._has_reserved_room:
            return
        for view in self._schedule.pool.emptiest_open():
            if view.largest_mb >= (job.memory_mb or 0) and view.gpu.uuid not in job.avoid:
                self._schedule.close(view)
                self._has_reserved_room = True
                return

    def _reserve_gpus(self, job: WaitingJob) -> None:
        if job.gpus > 1 and len(self.made) >= self._schedule.limits.reservations:
            return  # Its turn comes.
        node, until = self._node_for(job)
        if node is None:
            return  # It waits for other users' GPUs.
        if job.gpus > 1:
            self._reserve_free(job, node, until)
        self._promised += job.gpus
        if self._schedule.pool.open_count:
            self._close_shared(job, node)
        self._claims[node.place] = self._claims.get(node.place, 0) + job.gpus
        self._schedule.remove_rank(node)

    def _reserve_free(self, job: WaitingJob, node: Node, until: float | None) -> None:
        """Reserves the free GPUs of the node, and as much of the limit. The rest of the job's part is in use there, and
        comes back with the GPUs."""
        free = [view for view in node.free_for(job) if comes(view, job)]
        part = min(job.gpus, len(free) + sum(1 for _ in node.returning_for(job)))
        self._schedule.budget -= part
        self.made.append(Reservation(until, part, {view.gpu.uuid: view.gpu for view in free}))
        for view in free:
            self._schedule.change(_reserved(view))

    def _node_for(self, job: WaitingJob) -> tuple[Node | None, float | None]:
        """The node on which GPUs are reserved for the job, and when it surely has enough of them, if that is known.

        First the node that surely has enough at the earliest. Where no time limits tell: where the job could have the
        most now; then where it lacks the fewest, were the shared ones closed to others; then where those are the
        emptiest. On that node all this only improves while GPUs are reserved there, and only a better one takes its
        place: so reservations can't alternate between nodes without end.
        """
        pool = self._schedule.pool
        if job.gpus > 1 and pool.timed:
            node, until = pool.surest(job, self._claims)
            if node is not None:
                return node, until
        best, rank = None, (-1, 0, 0)
        for node in pool.enough(job):
            if node.free < rank[0] or (node.free == rank[0] and not pool.open_count):
                break  # No node from here on can be better.
            found = self._rank_of(job, node)
            if found > rank:
                best, rank = node, found
            if rank == (node.free, 0, 0):
                break
        return best, None

    def _rank_of(self, job: WaitingJob, node: Node) -> Rank:
        """How good a node is for the job: GPUs free, lacking (negative), and MB of room on those that lack."""
        known = self._schedule.ranks.setdefault((job.gpus, job.memory_mb, job.avoid), {})
        if node.place not in known:
            lacks = self._lacks(job, node) if self._schedule.pool.open_count else 0
            rooms = sum(view.shareable_mb or 0 for view in node.emptiest(job, lacks))
            known[node.place] = (node.count(job).free, -lacks, rooms)
        return known[node.place]

    def _lacks(self, job: WaitingJob, node: Node) -> int:
        """How many shared GPUs of the node must be closed for the job, besides those that come anyway."""
        return max(0, job.gpus + self._claims.get(node.place, 0) - node.count(job).come)

    def _close_shared(self, job: WaitingJob, node: Node) -> None:
        """Closes shared GPUs, those with the most room first, until enough will come and the limit allows them."""
        for view in node.emptiest(job, self._lacks(job, node)):
            self._schedule.close(view)
        pool, most = self._schedule.pool, self._schedule.limits.most_gpus
        while pool.open_count and pool.open_count + self._promised > most:
            self._schedule.close(next(pool.emptiest_open()))


def _reserved(view: GpuView) -> GpuView:
    """A free GPU as a reserved one. Not by ``replace``, which is a fifth of the time of a decision in a cluster."""
    return GpuView(
        view.gpu, GIVEN, view.ours, view.shareable_mb, True, view.node, room_mb=view.room_mb, reserved=view.reserved
    )


def explain_wait(
    schedule: TentativeSchedule, job: WaitingJob, *, reserved: bool, overrun: Set[str] = frozenset()
) -> str:
    """Why the job gets no GPUs in this decision, as a sentence.

    ``reserved``: some are reserved for larger jobs; ``overrun``: those that others have reserved (``job`` avoids them).
    """
    pool, limits = schedule.pool, schedule.limits
    most = limits.most_gpus
    if schedule.budget < job.gpus:
        if most < limits.max_gpus and job.gpus > most:
            return limits.gpus_now_why or f"only {most} GPUs may be used for now"
        if job.share and schedule.shared:
            return _why_not_shared(schedule, job)
        also = " or reserved for a larger job" if reserved else ""
        return f"{most - max(0, schedule.budget)} of at most {most} GPUs are in use{also}"
    counted = len(pool)
    if counted > _MOST_COUNTED:
        if job.share and schedule.shared:
            return _why_not_shared(schedule, job)
        others = f", others have reserved {len(overrun)}" if overrun else ""
        return f"{pool.free} of {counted} GPUs are free, our own jobs run on {pool.in_use}{others}"
    labels: dict[str, list[str]] = {}
    for view in (pool.view(uuid) for uuid in pool.reserved if uuid in overrun):
        if view.reserved is not None and fits(view.gpu, job.gpus, job.memory_mb):
            may = ", and the job may still run then" if view.reserved.in_s > 0 else ""
            labels.setdefault(f"{view.reserved.sentence}{may}", []).append(view.gpu.label)
    ours = []
    for node in pool.nodes:
        for view in node.usable(job):
            if view.is_open and job.share:
                reason = f"{view.shareable_mb} of {job.memory_mb} MB can be promised"
            elif view.ours and view.busy not in (GIVEN, RESERVED):
                if comes(view, job):
                    ours.append(view.gpu.label)
                    continue
                reason = f"{view.largest_mb} of {job.memory_mb} MB are free at best"
            elif view.busy is not None:
                reason = view.busy
            elif job.memory_mb is not None and view.gpu.free_mb < job.memory_mb:
                reason = f"{view.gpu.free_mb} of {job.memory_mb} MB are free"
            else:
                continue
            labels.setdefault(reason, []).append(view.gpu.label)
    reasons = [f"GPU {', '.join(gpus)}: {reason}" for reason, gpus in labels.items()]
    if ours:
        reasons.append(f"our own jobs run on GPU {', '.join(ours)}")
    return "; ".join(reasons) or f"{pool.free} of {job.gpus} GPUs are free"


def _why_not_shared(schedule: TentativeSchedule, job: WaitingJob) -> str:
    """Why a sharing job fits on none of the GPUs that are shared, where it may not have one of its own."""
    room = next(schedule.pool.emptiest_open(), None)
    if room is None:
        left = "nothing more is promised on the shared GPUs, which are kept for a job before this one"
    else:
        left = f"at most {room.shareable_mb} MB are left on a shared GPU"
    free = (
        "no other is free"
        if schedule.budget >= job.gpus
        else f"no other may be used ({schedule.limits.most_gpus} at most)"
    )
    return f"asks for {job.memory_mb} MB; {left}, and {free}"


def decide(
    waiting: Sequence[WaitingJob],
    gpus: Sequence[GpuView],
    limits: Limits,
    choose: Chooser,
    *,
    cpu_running: int = 0,
) -> Decision:
    """Decides which jobs start now.

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
    """Decides which jobs start now, with GPUs that the caller keeps in a pool.

    The pool is as before when this returns: the caller updates it with the jobs that have really started. Without
    ``explain`` the reason of a job that waits for GPUs does not name them, which saves time.
    """
    decision = _DecisionPass(pool, limits, choose, cpu_running, explain)
    try:
        for job in sorted(waiting, key=lambda job: order_key(job, limits)):
            decision.place(job)
        return decision.decision()
    finally:
        decision.schedule.undo()


class _DecisionPass:
    """One decision as it goes through the jobs in order: what is left, and what is reserved.

    While it lasts the pool is as it would be if all its starts were carried out, without the reserved GPUs.
    """

    def __init__(self, pool: Pool, limits: Limits, choose: Chooser, cpu_running: int, explain: bool):
        self.pool = pool
        self.limits = limits
        self.choose = choose
        self.explain = explain
        self.slots = limits.cpu_slots - cpu_running
        self.places = None if limits.max_concurrent is None else limits.max_concurrent - limits.running
        self.schedule = TentativeSchedule(pool, limits)
        self.reservations = Reservations(self.schedule)
        self.starts: list[Start] = []
        self.waits: list[Wait] = []
        self.refused: list[Wait] = []
        # Kinds of jobs that wait for GPUs: what is left only decreases, so that no later job of a kind starts.
        self.stuck: set[tuple[int, int | None, frozenset[str]]] = set()
        # The limit was lowered: shared GPUs must empty, too, to come down to it.
        for view in list(islice(pool.emptiest_open(), max(0, -self.schedule.budget))):
            self.schedule.close(view)

    def decision(self) -> Decision:
        """The decision."""
        nothing = self.limits.closed is not None or (self.places is not None and self.places <= 0)
        room = next(self.pool.emptiest_open(), None)
        return Decision(
            tuple(self.starts),
            tuple(self.waits),
            tuple(self.refused),
            self._backfill_s(),
            gpus_left=0 if nothing else self.schedule.gpus_left,
            room_left_mb=0 if nothing or room is None else room.shareable_mb or 0,
        )

    def _backfill_s(self) -> float | None:
        """For how many seconds GPUs are left that are reserved for later, None for none."""
        times = [view.reserved.in_s for view in self.pool.reserved.values() if view.is_free and view.reserved]
        ours = self.reservations.backfill_s()
        return max((at for at in (*times, *([] if ours is None else [ours])) if at > 0), default=None)

    def place(self, job: WaitingJob) -> None:
        """Starts the job, or adds the reason why not."""
        if not self.explain and self._is_stuck(job):
            self.waits.append(Wait(job.id, _WAITS))
            return
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

    # --- starts -----------------------------------------------------------------------------------------------

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
        kind = (job.gpus, job.memory_mb, job.avoid)
        failed, overrun = job.avoid, self.pool.overrun_by(job)
        if overrun:
            job = replace(job, avoid=failed | overrun)
        if failed and not self.pool.has_enough(job):
            job = replace(job, avoid=overrun)
        if (job.share and self._join(job)) or self._take(job) or self._backfill(job):
            return
        reason = _WAITS
        if self.explain:
            reason = explain_wait(self.schedule, job, reserved=bool(self.reservations.made), overrun=overrun)
        self.waits.append(Wait(job.id, reason))
        self.reservations.reserve_for(job)
        if not self.explain and not job.share and job.limit_s is None:
            self.stuck.add(kind)

    def _is_stuck(self, job: WaitingJob) -> bool:
        """Whether a job of its kind waits already, so that this one can neither start nor get a reservation."""
        if not self.stuck or job.share or job.limit_s is not None or self.pool.open_count or self.pool.reserved:
            return False
        if job.gpus > 1 and len(self.reservations.made) < self.limits.reservations:
            return False
        return (job.gpus, job.memory_mb, job.avoid) in self.stuck

    def _join(self, job: WaitingJob) -> bool:
        """Adds a sharing job to the fullest shared GPU that has room for it."""
        need_mb = job.memory_mb or 0
        for view in self.pool.open_from(need_mb):
            if view.gpu.uuid not in job.avoid:
                self.schedule.change(replace(view, shareable_mb=(view.shareable_mb or 0) - need_mb))
                self._start(Start(job.id, (view.gpu,), shared=True))
                return True
        return False

    def _take(self, job: WaitingJob) -> bool:
        """Gives the job GPUs that are free."""
        chosen = self._choose(job) if 0 < job.gpus <= self.schedule.gpus_left else None
        if chosen is None:
            return False
        self.schedule.budget -= job.gpus
        for gpu in chosen:
            view = self.pool.view(gpu.uuid)
            left_mb = _promisable_mb(view) - (job.memory_mb or 0) if job.share else None
            over_at = self._over_at(job)
            self.schedule.change(replace(view, ours=True, busy=GIVEN, shareable_mb=left_mb, over_at=over_at))
        self._start(Start(job.id, chosen, shared=job.share))
        return True

    def _over_at(self, job: WaitingJob) -> float | None:
        return None if job.limit_s is None or job.share else self.limits.now + job.limit_s

    def _backfill(self, job: WaitingJob) -> bool:
        """Gives the job GPUs that are reserved for another, which it surely gives back before that one can start."""
        over_at = self._over_at(job)
        if over_at is None:
            return False
        for reservation in self.reservations.made:
            if (
                reservation.until is None
                or over_at > reservation.until
                or job.gpus > self.schedule.budget + reservation.part
            ):
                continue
            candidates = [gpu for gpu in reservation.gpus.values() if gpu.uuid not in job.avoid]
            candidates = [gpu for gpu in candidates if fits(gpu, job.gpus, job.memory_mb)]
            chosen = self.choose(candidates, job.gpus, job.memory_mb) if len(candidates) >= job.gpus else None
            if chosen is None:
                continue
            for gpu in chosen:
                del reservation.gpus[gpu.uuid]
                reserved = self.pool.view(gpu.uuid)
                self.schedule.change(replace(reserved, ours=True, busy=GIVEN, returning=False, over_at=over_at))
            # These come back in time, and with them the reserved part of the limit.
            reservation.part -= job.gpus
            self._start(Start(job.id, chosen))
            return True
        return False

    def _choose(self, job: WaitingJob) -> tuple[Gpu, ...] | None:
        for node in self.pool.with_free(job.gpus):
            candidates = [
                view.gpu for view in node.free_for(job) if not job.share or _promisable_mb(view) >= (job.memory_mb or 0)
            ]
            chosen = self.choose(candidates, job.gpus, job.memory_mb) if len(candidates) >= job.gpus else None
            if chosen is not None:
                return chosen
        return None


def _promisable_mb(view: GpuView) -> int:
    """MB that may be promised to sharing jobs on a free GPU."""
    return view.gpu.free_mb if view.shareable_mb is None else view.shareable_mb
