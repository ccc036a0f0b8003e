"""Which waiting job starts now, on which GPUs, and why the others wait: one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from gpuherd.gpus.state import Gpu
from gpuherd.jobs.scheduler.ordering import order_key
from gpuherd.jobs.scheduler.pool import Pool, comes
from gpuherd.jobs.scheduler.reservations import GIVEN, KEPT, Draft, Keeping
from gpuherd.jobs.scheduler.types import Chooser, Decision, GpuView, Limits, Start, Wait, WaitingJob, fits, why_never

# Why a job gets no GPUs in a decision, in words for people. Pure.

# With more GPUs than this in the pool a reason counts them and does not name each.
_MOST_COUNTED = 64


def why_not(draft: Draft, job: WaitingJob, barred: frozenset[str], *, keeps: bool) -> str:
    """Why the job can't have GPUs in this decision, as a sentence. ``keeps``: some are kept for larger jobs."""
    pool, limits = draft.pool, draft.limits
    most = limits.most_gpus
    if draft.budget < job.gpus:
        if most < limits.max_gpus and job.gpus > most:
            return limits.gpus_now_why or f"only {most} GPUs may be used for now"
        if job.share and draft.shared:
            return _no_room(draft, job)
        kept = " or kept for a larger job" if keeps else ""
        return f"{most - max(0, draft.budget)} of at most {most} GPUs are in use{kept}"
    counted = len(pool)
    if counted > _MOST_COUNTED:
        if job.share and draft.shared:
            return _no_room(draft, job)
        return f"{pool.free} of {counted} GPUs are free, our own jobs run on {pool.in_use}"
    reasons, ours = [], []
    for machine in pool.machines:
        for view in machine.usable(job, barred):
            if view.is_open and job.share:
                reasons.append(f"GPU {view.gpu.label}: {view.shareable_mb} of {job.memory_mb} MB can be promised")
            elif view.busy in (GIVEN, KEPT):
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
    return "; ".join(reasons) or f"{pool.free} of {job.gpus} GPUs are free"


def _no_room(draft: Draft, job: WaitingJob) -> str:
    """Why a sharing job fits on none of the GPUs that are shared, where it may not have one of its own."""
    room = next(draft.pool.emptiest_open(), None)
    if room is None:
        left = "nothing more is promised on the shared GPUs, which are kept for a job before this one"
    else:
        left = f"at most {room.shareable_mb} MB are left on a shared GPU"
    free = (
        "no other is free" if draft.budget >= job.gpus else f"no other may be used ({draft.limits.most_gpus} at most)"
    )
    return f"asks for {job.memory_mb} MB; {left}, and {free}"


# It sees the head of the queue, what runs, and each GPU with a verdict (free, or why not); it knows no database, no
# driver and no clock. Rules, in this order:
#
# 1. Priority, then age (or the longest first). A job that could never run here is refused, with the reason.
# 2. No more than the limits at once, and no GPU twice, but for jobs that share.
# 3. A job on several GPUs can't be starved by smaller ones: for the first that waits, when those that it waits for
#   are
#    free or used by our own jobs, the free ones of one machine are kept, and so is their part of the limit. When it
#    waits for other people's GPUs, whose end nobody knows, the smaller ones go first meanwhile. One job is enough:
#   when
#    it has started, the next is the first. A job whose time limit ends it before the first one's GPUs are surely
#    complete, by the time limits of what runs there, may have kept ones meanwhile (EASY backfilling, Lifka 1995): the
#    moment by which the first one surely starts is never put off.
# 4. A job that failed on a GPU gets another one, if there is another that is free or ours.
# 5. A job that shares goes to the fullest GPU on which it fits, so that others stay whole; to a free one when there
#   is
#    none. To the first sharing job that fits nowhere, the shared GPU with the most room is kept: nothing is added
#   there
#    until it fits. For a job that wants GPUs for itself, as many shared ones are closed in this way as it lacks. What
#   is
#    kept for a job only grows emptier while it waits, so that its turn comes.
#
# ``decide`` is for one decision, ``decide_with`` for many on a ``Pool`` that lasts: the same code, at a cost that
# grows with the jobs looked at and not with the GPUs.

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

_NOBODY: frozenset[str] = frozenset()
# What a job is told that waits for GPUs, where nobody asks for more.
_WAITS = "waits for GPUs"


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
        return decision.decision()
    finally:
        decision.draft.put_back()


class _Round:
    """One decision as it goes through the jobs in order: what is left to give, and what is kept for whom.

    While it lasts the pool holds what would be so if all its starts were carried out, with what is kept taken out.
    """

    def __init__(self, pool: Pool, limits: Limits, choose: Chooser, cpu_running: int, explain: bool):
        self.pool = pool
        self.limits = limits
        self.choose = choose
        self.explain = explain
        self.slots = limits.cpu_slots - cpu_running
        self.places = None if limits.max_concurrent is None else limits.max_concurrent - limits.running
        self.draft = Draft(pool, limits)
        self.keeping = Keeping(self.draft)
        self.starts: list[Start] = []
        self.waits: list[Wait] = []
        self.refused: list[Wait] = []
        # Kinds of jobs that wait for GPUs: what is left only becomes less, so that no later job of a kind starts.
        self.stuck: set[tuple[int, int | None, frozenset[str]]] = set()
        # The limit was lowered: what is shared must empty, too, to come down to it.
        for view in list(islice(pool.emptiest_open(), max(0, -self.draft.budget))):
            self.draft.close(view)

    def decision(self) -> Decision:
        """What has come of it."""
        nothing = self.limits.closed is not None or (self.places is not None and self.places <= 0)
        room = next(self.pool.emptiest_open(), None)
        return Decision(
            tuple(self.starts),
            tuple(self.waits),
            tuple(self.refused),
            self.keeping.lends_for_s(),
            gpus_left=0 if nothing else self.draft.gpus_left,
            room_left_mb=0 if nothing or room is None else room.shareable_mb or 0,
        )

    def place(self, job: WaitingJob) -> None:
        """Starts the job, or says why not."""
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
        reason = why_not(self.draft, job, barred, keeps=bool(self.keeping.keeps)) if self.explain else _WAITS
        self.waits.append(Wait(job.id, reason))
        self.keeping.keep_for(job, barred)
        if not self.explain and not job.share and job.limit_s is None:
            self.stuck.add((job.gpus, job.memory_mb, job.avoid))

    def _is_stuck(self, job: WaitingJob) -> bool:
        """Whether a job of its kind waits already, so that this one can neither start nor have anything kept for it."""
        if not self.stuck or job.share or job.limit_s is not None or self.pool.open_count:
            return False
        if job.gpus > 1 and len(self.keeping.keeps) < self.limits.keep_for:
            return False
        return (job.gpus, job.memory_mb, job.avoid) in self.stuck

    def _join(self, job: WaitingJob, barred: frozenset[str]) -> bool:
        """Puts a sharing job beside others, on the fullest GPU that has room for it."""
        need_mb = job.memory_mb or 0
        for view in self.pool.open_from(need_mb):
            if view.gpu.uuid not in barred:
                self.draft.change(replace(view, shareable_mb=(view.shareable_mb or 0) - need_mb))
                self._start(Start(job.id, (view.gpu,), shared=True))
                return True
        return False

    def _take(self, job: WaitingJob, barred: frozenset[str]) -> bool:
        """Gives the job GPUs that are free."""
        chosen = self._choose(job, barred) if 0 < job.gpus <= self.draft.gpus_left else None
        if chosen is None:
            return False
        self.draft.budget -= job.gpus
        for gpu in chosen:
            view = self.pool.view(gpu.uuid)
            left_mb = _promisable_mb(view) - (job.memory_mb or 0) if job.share else None
            over_at = self._over_at(job)
            self.draft.change(replace(view, ours=True, busy=GIVEN, shareable_mb=left_mb, over_at=over_at))
        self._start(Start(job.id, chosen, shared=job.share))
        return True

    def _over_at(self, job: WaitingJob) -> float | None:
        return None if job.limit_s is None or job.share else self.limits.now + job.limit_s

    def _borrow(self, job: WaitingJob, barred: frozenset[str]) -> bool:
        """Gives the job GPUs that are kept for another, which it surely gives back before that one can start."""
        over_at = self._over_at(job)
        if over_at is None:
            return False
        for keep in self.keeping.keeps:
            if keep.until is None or over_at > keep.until or job.gpus > self.draft.budget + keep.part:
                continue
            candidates = [gpu for gpu in keep.gpus.values() if gpu.uuid not in barred]
            candidates = [gpu for gpu in candidates if fits(gpu, job.gpus, job.memory_mb)]
            chosen = self.choose(candidates, job.gpus, job.memory_mb) if len(candidates) >= job.gpus else None
            if chosen is None:
                continue
            for gpu in chosen:
                del keep.gpus[gpu.uuid]
                kept = self.pool.view(gpu.uuid)
                self.draft.change(replace(kept, ours=True, busy=GIVEN, returning=False, over_at=over_at))
            # These come back in time, and with them the part of the limit that was kept.
            keep.part -= job.gpus
            self._start(Start(job.id, chosen))
            return True
        return False

    def _choose(self, job: WaitingJob, barred: frozenset[str]) -> tuple[Gpu, ...] | None:
        for machine in self.pool.with_free(job.gpus):
            candidates = [
                view.gpu
                for view in machine.free_for(job, barred)
                if not job.share or _promisable_mb(view) >= (job.memory_mb or 0)
            ]
            chosen = self.choose(candidates, job.gpus, job.memory_mb) if len(candidates) >= job.gpus else None
            if chosen is not None:
                return chosen
        return None


def _promisable_mb(view: GpuView) -> int:
    """MB that may be promised to sharing jobs on a free GPU."""
    return view.gpu.free_mb if view.shareable_mb is None else view.shareable_mb
