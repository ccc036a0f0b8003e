"""Which waiting job starts now, on which GPUs, and why the others wait: one pure function.

It sees the head of the queue, what runs, and each GPU with a verdict (free, or why not); it knows no database, no
driver and no clock. Rules, in this order:

1. Priority, then age. A job that could never run on this machine is refused, with the reason.
2. No more than ``max_gpus`` GPUs at once, and no GPU twice.
3. A job on several GPUs can't be starved by smaller ones: when those that it waits for are free or used by our own
   jobs, the free ones are kept for it, and so is its part of ``max_gpus``. When it waits for other people's GPUs,
   whose end nobody knows, the smaller ones go first meanwhile.
4. A job that failed on a GPU gets another one, if there is another that is free or ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuherd.gpus.state import Gpu

# Chooses ``count`` of the candidates, or None: gpuherd.gpus.choose.choose with the user's preference filled in.
Chooser = Callable[[Sequence[Gpu], int, int | None], tuple[Gpu, ...] | None]


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """What the decision needs of a waiting job. ``id`` rises with age; ``avoid`` are GPUs on which it failed."""

    id: int
    gpus: int
    memory_mb: int | None = None
    priority: int = 0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU that we may use, with the verdict on it: ``busy`` is None when it is free, else a sentence.

    ``ours``: one of our own jobs runs on it, so that it will come back to us.
    """

    gpu: Gpu
    busy: str | None = None
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once: ``max_gpus`` GPUs, and ``cpu_slots`` jobs without a GPU.

    ``cpu_only``: the machine has no GPUs, and jobs that ask for one run on the CPU.
    """

    max_gpus: int
    cpu_slots: int
    cpu_only: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Start this job now on these GPUs (() for the CPU)."""

    job: int
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """This job can't start now, for this reason. ``refused``: nor ever, on this machine with these options."""

    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. The three parts together name every waiting job that was looked at, once."""

    starts: tuple[Start, ...] = ()
    waits: tuple[Wait, ...] = ()
    refused: tuple[Wait, ...] = ()


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
    table = _Table(gpus, limits, choose, cpu_running)
    for job in sorted(waiting, key=lambda job: (-job.priority, job.id)):
        table.place(job)
    return Decision(tuple(table.starts), tuple(table.waits), tuple(table.refused))


class _Table:
    """What is left to give while one decision goes through the jobs in order."""

    def __init__(self, gpus: Sequence[GpuView], limits: Limits, choose: Chooser, cpu_running: int):
        self.views = gpus
        self.limits = limits
        self.choose = choose
        self.free = {view.gpu.uuid: view.gpu for view in gpus if view.busy is None and not view.ours}
        # May fall below 0 when a large job's part is kept for it.
        self.budget = limits.max_gpus - sum(view.ours for view in gpus)
        self.slots = limits.cpu_slots - cpu_running
        self.starts: list[Start] = []
        self.waits: list[Wait] = []
        self.refused: list[Wait] = []

    def place(self, job: WaitingJob) -> None:
        never = why_never(job, [view.gpu for view in self.views], self.limits)
        if never is not None:
            self.refused.append(Wait(job.id, never))
        elif job.gpus == 0 or self.limits.cpu_only:
            self._place_on_cpu(job)
        else:
            self._place_on_gpus(job)

    def _place_on_cpu(self, job: WaitingJob) -> None:
        if self.slots > 0:
            self.slots -= 1
            self.starts.append(Start(job.id))
        else:
            self.waits.append(Wait(job.id, f"all {self.limits.cpu_slots} places for jobs on the CPU are taken"))

    def _place_on_gpus(self, job: WaitingJob) -> None:
        usable = self._usable(job)
        candidates = [gpu for uuid, gpu in self.free.items() if uuid in usable]
        chosen = self.choose(candidates, job.gpus, job.memory_mb) if self.budget >= job.gpus else None
        if chosen is not None:
            for gpu in chosen:
                del self.free[gpu.uuid]
            self.budget -= job.gpus
            self.starts.append(Start(job.id, chosen))
            return
        self.waits.append(Wait(job.id, self._why(job, usable)))
        if job.gpus > 1 and self._will_come(usable) >= job.gpus:
            self.budget -= job.gpus
            for uuid in usable & self.free.keys():
                del self.free[uuid]

    def _usable(self, job: WaitingJob) -> set[str]:
        """GPUs large enough for the job, without those on which it failed, unless too few would be left to come."""
        fitting = {view.gpu.uuid for view in self.views if _fits(view.gpu, job)}
        others = fitting - job.avoid
        return others if self._will_come(others) >= job.gpus else fitting

    def _will_come(self, uuids: set[str]) -> int:
        """How many of these GPUs are free, or will be when our own jobs end."""
        return sum(view.gpu.uuid in uuids and (view.ours or view.busy is None) for view in self.views)

    def _why(self, job: WaitingJob, usable: set[str]) -> str:
        if self.budget < job.gpus:
            return f"{self.limits.max_gpus - max(0, self.budget)} of at most {self.limits.max_gpus} GPUs are in use"
        reasons, ours = [], []
        for view in self.views:
            if view.gpu.uuid not in usable:
                continue
            if view.ours:
                ours.append(view.gpu.label)
            elif view.busy is not None:
                reasons.append(f"GPU {view.gpu.label}: {view.busy}")
            elif view.gpu.uuid not in self.free:
                reasons.append(f"GPU {view.gpu.label}: goes to a job before this one")
            elif job.memory_mb is not None and view.gpu.free_mb < job.memory_mb:
                reasons.append(f"GPU {view.gpu.label}: {view.gpu.free_mb} of {job.memory_mb} MB are free")
        if ours:
            reasons.append(f"our own jobs run on GPU {', '.join(ours)}")
        return "; ".join(reasons) or f"{len(self.free)} of {job.gpus} GPUs are free"


def why_never(job: WaitingJob, gpus: Sequence[Gpu], limits: Limits) -> str | None:
    """Why the job could never run with these GPUs and limits, as a sentence, or None when it could."""
    if job.gpus == 0:
        return None
    if limits.cpu_only:
        return None if job.gpus == 1 else f"asks for {job.gpus} GPUs; this machine has none"
    whole = [gpu for gpu in gpus if not gpu.mig_instances]
    if job.gpus > len(whole):
        return f"asks for {job.gpus} GPUs; there are {len(whole)} to use"
    if job.gpus > limits.max_gpus:
        return f"asks for {job.gpus} GPUs; max_gpus is {limits.max_gpus}"
    large = sum(_fits(gpu, job) for gpu in whole)
    if job.gpus > 1 and sum(gpu.mig_parent is None for gpu in whole) < job.gpus:
        return f"asks for {job.gpus} GPUs; there are not so many whole ones, and a job gets one MIG instance at most"
    if large < job.gpus:
        return f"asks for {job.memory_mb} MB on {job.gpus} GPUs; {large} of the GPUs have as much"
    return None


def _fits(gpu: Gpu, job: WaitingJob) -> bool:
    """Whether the job could run on this GPU, were it free. CUDA never uses two MIG instances in one process."""
    if gpu.mig_instances or (job.gpus > 1 and gpu.mig_parent is not None):
        return False
    return job.memory_mb is None or gpu.total_mb >= job.memory_mb
