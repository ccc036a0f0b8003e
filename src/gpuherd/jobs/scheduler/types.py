"""The words of a decision: what ``policy`` is told of jobs, GPUs and limits, and what it answers. Plain frozen data.

Also the two questions that need no queue: could this job run on this GPU, and could it ever run here at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuherd.engines.registry import LOCAL, names
from gpuherd.gpus.state import Gpu

# Chooses ``count`` of the candidates, or None: gpuherd.gpus.choose.choose with the user's preference filled in. The
# candidates are all of one machine; their order says nothing.
Chooser = Callable[[Sequence[Gpu], int, int | None], tuple[Gpu, ...] | None]


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """What the decision needs of a waiting job.

    Attributes:
        id: rises with age.
        gpus: how many it asks for, all on one machine; 0 for the CPU.
        memory_mb: what must be free on each. For a job that shares: what it is expected to use
            (``sharing.expected_mb``); such a job must say it.
        priority: higher first.
        avoid: UUIDs of GPUs on which it failed.
        share: it may have a GPU together with others that share.
        rank: the higher goes first (``ordering.rank``). Read when ``Limits.longest_first``.
        limit_s: after so many seconds it is surely over, since it is killed then; None when nothing ends it.
        nodes: how many machines it spans; more than one is for a cluster.
        host_memory_mb: main memory that it needs; None where nothing is said.
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


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU that we may use, with the verdict on it.

    Attributes:
        busy: None when it is free, else a sentence.
        ours: a job of ours runs on it, so that it will come back to us. It counts against ``max_gpus``.
        shareable_mb: on a GPU of ours where only sharing jobs run, and no stranger: MB that may still be promised there
            (``sharing.shareable_mb``), None when nothing may be added (an exclusive job, an adopted one, a stranger).
            On a free GPU: MB that may be promised, None for all that is free.
        returning: our job has just left it and its memory drains: not free yet, but it will be in a moment.
        machine: which machine it is in, where there are several: a job gets GPUs of one machine.
        room_mb: MB that were free on it when it was last seen with nobody on it: all but the driver's own part. None
            where it has not been seen so.
        over_at: on a GPU that our job has for itself: when that is surely over, by the clock of ``Limits.now``; None
            when nothing ends it, while it is paused, and on a shared GPU, to which others may be added.
    """

    gpu: Gpu
    busy: str | None = None
    ours: bool = False
    shareable_mb: int | None = None
    returning: bool = False
    machine: str = ""
    room_mb: int | None = None
    over_at: float | None = None

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
    """How much at once.

    Attributes:
        max_gpus: GPUs; a job that asks for more can never run.
        cpu_slots: jobs without a GPU.
        cpu_only: the machine has no GPUs, and jobs that ask for one run on the CPU.
        max_concurrent: jobs, on GPUs or not; None for no limit.
        running: how many of those run now.
        closed: a sentence when nothing at all may start now (no disk, drained), else None.
        gpus_now: only so many GPUs for the time being (quiet hours): a job that asks for more waits for better times.
        gpus_now_why: the sentence for that.
        most_ever: the most GPUs that the user may hold at the best of times; None for no such limit.
        longest_first: of one priority the job of the highest rank goes first; else the oldest.
        keep_for: for so many jobs on several GPUs, the first that wait, GPUs are kept. One is enough that none starves.
        now: the moment of the decision, by the clock of ``GpuView.over_at``.
        host_memory_mb: main memory of the machine, or what of it is ours at most; None where that is not known.
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
    keep_for: int = 1
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
    """This job can't start now, for this reason; one that is refused can't ever, on this machine with these options."""

    job: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. ``starts``, ``waits`` and ``refused`` together name every waiting job that was looked at, once.

    Some GPUs may be left over, so that it may be worth while to look at more of the queue. ``lends_for_s``: GPUs are
    kept that a job could have which is over in so many seconds; None when none are to be had. ``gpus_left``: so many
    GPUs one more job could have as far as their number goes. ``room_left_mb``: so much could be promised on a shared
    GPU.
    """

    starts: tuple[Start, ...] = ()
    waits: tuple[Wait, ...] = ()
    refused: tuple[Wait, ...] = ()
    lends_for_s: float | None = None
    gpus_left: int = 0
    room_left_mb: int = 0


def fits(gpu: Gpu, gpus: int, memory_mb: int | None) -> bool:
    """Whether a job on so many GPUs could run on this one, were it free.

    CUDA never uses two MIG instances in one process.
    """
    if gpu.mig_instances or (gpus > 1 and gpu.mig_parent is not None):
        return False
    return memory_mb is None or gpu.total_mb >= memory_mb


def why_never(job: WaitingJob, gpus: Sequence[Gpu], limits: Limits) -> str | None:
    """Why the job could never run with these GPUs of one machine, as a sentence, or None when it could."""
    if job.nodes > 1:
        clusters = " or ".join(f"--engine {name}" for name in names() if name != LOCAL)
        return f"spans {job.nodes} nodes, and this is one machine; say {clusters}"
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
