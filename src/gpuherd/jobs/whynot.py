"""Why a job gets no GPUs in a decision, in words for people. Pure."""

from __future__ import annotations

from gpuherd.jobs.decision import WaitingJob
from gpuherd.jobs.draft import GIVEN, KEPT, Draft
from gpuherd.jobs.pool import comes

# With more GPUs than this in the pool a reason counts them and does not name each.
_NAMED = 64


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
    if counted > _NAMED:
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
