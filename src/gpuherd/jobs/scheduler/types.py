"""The data of a decision: jobs, GPUs and limits as its input, starts and reasons as its output. Plain frozen data.

Also two checks that need no queue: could a job run on this GPU (``fits``), and could it ever run here (``why_never``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuherd.engines.registry import LOCAL, names
from gpuherd.gpus.state import Gpu

# Chooses ``count`` of the candidates, or None: gpuherd.gpus.choose.choose with the user's preference filled in. The
# candidates are all of one node; their order has no meaning.
Chooser = Callable[[Sequence[Gpu], int, int | None], tuple[Gpu, ...] | None]


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A waiting job, as far as the decision needs it.

    Attributes:
        id: rises with age.
        gpus: how many it requests, all on one node; 0 for the CPU.
        memory_mb: MB that must be free on each. For a job that shares, which must have it: its expected use
            (``memory.expected_mb``).
        priority: higher first.
        avoid: UUIDs of GPUs on which it failed.
        share: it may share a GPU with others that share.
        rank: the higher goes first (``ordering.rank``). Read when ``Limits.longest_first``.
        limit_s: after this many seconds it is killed; None without a time limit.
        expected_s: how long jobs like it take at most, as far as the queue has learnt; None where it has not.
        nodes: how many nodes it spans; more than one is for a cluster.
        host_memory_mb: main memory that it needs; None without a request.
    """

    id: int
    gpus: int
    memory_mb: int | None = None
    priority: int = 0
    avoid: frozenset[str] = frozenset()
    share: bool = False
    rank: float = 0.0
    limit_s: float | None = None
    nodes: int = 1
    host_memory_mb: int | None = None
    expected_s: float | None = None

    @property
    def longest_s(self) -> float | None:
        """How long it will run at most, in seconds; None where that is not known."""
        known = [length for length in (self.limit_s, self.expected_s) if length is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Another user's reservation of a GPU (``gpuherd.gpus.reservations``).

    Attributes:
        in_s: seconds until it begins; 0 or less while it is in force.
        unknown_s: a job of unknown length is not started less than so many seconds before it.
        sentence: whose it is, and from or until when.
    """

    in_s: float
    unknown_s: float
    sentence: str

    def is_overrun_by(self, job: WaitingJob) -> bool:
        """Whether the job, started now, may still run when it begins."""
        length_s = job.longest_s
        return self.in_s <= 0 or (self.in_s < self.unknown_s if length_s is None else self.in_s < length_s)


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU that we may use, with the verdict on it.

    Attributes:
        busy: None when it is free, else a sentence.
        ours: a job of ours runs on it, so it will come back to us. It counts against ``max_gpus``.
        shareable_mb: on a GPU of ours with sharing jobs only and no external user: MB that may still be promised there
            (``memory.shareable_mb``), None when no job may be added (an exclusive job, an adopted one, an external
            user). On a free GPU: MB that may be promised, None for all that is free.
        returning: our job has just left it and its memory drains: not free yet, but it will be in a moment.
        node: the node it is in, where there are several: a job gets GPUs of one node.
        room_mb: MB that were free on it when it was last seen without users: all but the driver's own part. None
            where it has not been seen like that.
        over_at: on a GPU that our job has for itself: when its time limit ends it, by the clock of ``Limits.now``; None
            without a limit, while it is paused, and on a shared GPU, to which others may be added.
        reserved: the next reservation of it by another user; None without one.
    """

    gpu: Gpu
    busy: str | None = None
    ours: bool = False
    shareable_mb: int | None = None
    returning: bool = False
    node: str = ""
    room_mb: int | None = None
    over_at: float | None = None
    kept: bool = False
    reserved: Reserved | None = None

    @property
    def is_free(self) -> bool:
        """Whether a job may have it for itself now."""
        return self.busy is None and not self.ours

    @property
    def largest_mb(self) -> int:
        """The most memory that a job could ever find free on it, in MB."""
        return self.gpu.total_mb if self.room_mb is None else self.room_mb

    @property
    def is_open(self) -> bool:
        """Whether sharing jobs run on it to which another may be added."""
        return self.ours and self.shareable_mb is not None

    @property
    def will_come(self) -> bool:
        """Whether it is free, or will be when our own jobs have ended."""
        return self.ours or self.returning or self.busy is None


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may run at once.

    Attributes:
        max_gpus: GPUs; a job that asks for more can never run.
        cpu_slots: jobs without a GPU.
        cpu_only: the machine has no GPUs, and jobs that ask for one run on the CPU.
        max_concurrent: jobs, on GPUs or not; None for no limit.
        running: how many of those run now.
        closed: a sentence when no job at all may start now (no disk space, drained), else None.
        gpus_now: GPUs for the time being (quiet hours): a job that requests more waits until the limit changes.
        gpus_now_why: the sentence for that.
        most_ever: the most GPUs that the user may hold at the best of times; None for no such limit.
        longest_first: of one priority the job of the highest rank goes first; else the oldest.
        reservations: for this many jobs on several GPUs, the first that wait, GPUs are reserved. With one none starves.
        now: the moment of the decision, by the clock of ``GpuView.over_at``.
        host_memory_mb: main memory of the machine, or our part of it; None where that is not known.
    """

    max_gpus: int
    cpu_slots: int
    cpu_only: bool = False
    max_concurrent: int | None = None
    running: int = 0
    closed: str | None = None
    gpus_now: int | None = None
    gpus_now_why: str | None = None
    longest_first: bool = False
    most_ever: int | None = None
    reservations: int = 1
    now: float = 0.0
    host_memory_mb: int | None = None

    @property
    def most_gpus(self) -> int:
        """GPUs that may be in use now."""
        return self.max_gpus if self.gpus_now is None else min(self.max_gpus, self.gpus_now)


@dataclass(frozen=True, slots=True)
class Start:
    """Start this job now on these GPUs (() for the CPU). ``shared``: others that share may be there, or be added."""

    job: int
    gpus: tuple[Gpu, ...] = ()
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """A job that can't start now, and the reason; a refused one never can, on this machine with these options."""

    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. ``starts``, ``waits`` and ``refused`` together name every waiting job that was looked at, once.

    The other fields say whether looking at more of the queue is worth while.

    Attributes:
        backfill_s: a job that is over within this time could have reserved GPUs; None when none could.
        gpus_left: GPUs that one more job could have, as far as their number goes.
        room_left_mb: MB that could still be promised on a shared GPU.
    """

    starts: tuple[Start, ...] = ()
    waits: tuple[Wait, ...] = ()
    refused: tuple[Wait, ...] = ()
    backfill_s: float | None = None
    gpus_left: int = 0
    room_left_mb: int = 0


def fits(gpu: Gpu, gpus: int, memory_mb: int | None) -> bool:
    """Whether a job on ``gpus`` GPUs could run on this one, were it free.

    CUDA never uses two MIG instances in one process.
    """
    if gpu.mig_instances or (gpus > 1 and gpu.mig_parent is not None):
        return False
    return memory_mb is None or gpu.total_mb >= memory_mb


def why_never(job: WaitingJob, gpus: Sequence[Gpu], limits: Limits) -> str | None:
    """Why the job could never run with these GPUs of one node, as a sentence, or None when it could."""
    if job.nodes > 1:
        clusters = " or ".join(f"--engine {name}" for name in names() if name != LOCAL)
        return f"spans {job.nodes} nodes, and this is one machine; use {clusters}"
    if limits.host_memory_mb is not None and (job.host_memory_mb or 0) > limits.host_memory_mb:
        return f"asks for {job.host_memory_mb} MB of main memory; there are {limits.host_memory_mb} MB to use"
    if job.gpus == 0:
        return None
    if limits.cpu_only:
        return None if job.gpus == 1 else f"asks for {job.gpus} GPUs; this machine has none"
    whole = [gpu for gpu in gpus if not gpu.mig_instances]
    if job.gpus > len(whole):
        return f"asks for {job.gpus} GPUs; there are {len(whole)} to use"
    if job.gpus > limits.max_gpus:
        return f"asks for {job.gpus} GPUs; max_gpus is {limits.max_gpus}"
    if limits.most_ever is not None and job.gpus > limits.most_ever:
        return f"asks for {job.gpus} GPUs; you may hold {limits.most_ever}, by your settings or this machine's policy"
    large = sum(fits(gpu, job.gpus, job.memory_mb) for gpu in whole)
    if job.gpus > 1 and sum(gpu.mig_parent is None for gpu in whole) < job.gpus:
        return f"asks for {job.gpus} GPUs; there are not so many whole ones, and a job gets one MIG instance at most"
    if large < job.gpus:
        each = "a GPU" if job.gpus == 1 else f"each of {job.gpus} GPUs"
        most = max(gpu.total_mb for gpu in whole)
        having = f"the largest has {most} MB" if large == 0 else f"{large} of {len(whole)} have as much"
        return f"asks for {job.memory_mb} MB on {each}; {having}"
    return None
