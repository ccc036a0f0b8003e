"""The data of a decision: jobs, GPUs and limits as its input, starts and reasons as its output; the order of jobs.

Also two checks that need no queue: could a job run on this GPU (``fits``), and could it ever run here (``why_never``).
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuherd.engines.registry import LOCAL, names
from gpuherd.gpus.state import Gpu

# The data of a decision: jobs, GPUs and limits as its input, starts and reasons as its output. Plain frozen data.
#
# Also two checks that need no queue: could a job run on this GPU (``fits``), and could it ever run here
# (``why_never``).

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
    """

    gpu: Gpu
    busy: str | None = None
    ours: bool = False
    shareable_mb: int | None = None
    returning: bool = False
    node: str = ""
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


# The order in which waiting jobs are considered, and how many of them. Pure.

# The order of waiting jobs is by priority, then by age or by rank ("the longest first"). The rank is the binary
# logarithm of a job's cost, plus one for each hour that it has waited. So a cost counts double for every hour of
# waiting, in whatever unit it is, and no short job starves behind an endless stream of longer ones: one whose cost is a
# thousandth of theirs goes before those that arrive ten hours after it. Both of two jobs age alike, so their order
# never changes: the rank is stored once, when the job is submitted, and the queue's order is an index.

# A cost counts double for every so many seconds of waiting.
DOUBLES_EVERY_S = 3600.0
# The cost of a job of unknown cost, or of none: so little that it goes last, and still ages.
_LEAST_COST = 2.0**-30


def rank(cost: float | None, submitted_at: float) -> float:
    """The rank of a job: the higher goes first. ``submitted_at``: second, by a clock that all jobs have in common.

    >>> rank(8.0, 0.0) > rank(4.0, 0.0) > rank(None, 0.0)
    True
    >>> rank(4.0, 0.0) > rank(7.0, 3600.0)
    True
    """
    return math.log2(max(cost or 0.0, _LEAST_COST)) - submitted_at / DOUBLES_EVERY_S


def order_key(job: WaitingJob, limits: Limits) -> tuple[int, float, int]:
    """Key to sort waiting jobs by: the first job has the least."""
    return (-job.priority, -job.rank if limits.longest_first else 0.0, job.id)


# Lookahead: how far into the queue a decision looks. It looks at a bounded number of jobs, and yet no job that could
# start stays hidden. At first these are the foremost jobs: as many as there are free places, and a few beyond. In two
# cases that is not enough:
#
# * GPUs are left over that none of those jobs can have (they request more GPUs or memory than are available just now,
#   in quiet hours or next to external users): then also the first jobs of every *kind*. Jobs with the same request are
#   alike: where the first can't start, the next can't either. Kinds that are too large just now are among them, so that
#   a large job which waits for our own GPUs is seen, and GPUs are reserved for it.
# * A short job could backfill GPUs that are reserved for a large one: then more of the foremost.

# How many more jobs than there are free places one decision looks at, to go past jobs that can't start yet.
BEYOND = 8
# And when reserved GPUs could be backfilled.
SEARCHED = 64
# Number of kinds that are looked at, for one number of GPUs: those that request the least memory.
MOST_KINDS = 16


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How far a decision looks.

    Attributes:
        backfills: reserved GPUs can be backfilled.
        by_kind: also the first jobs of every kind.
    """

    backfills: bool = False
    by_kind: bool = False

    def foremost(self, places: int) -> int:
        """How many of the foremost jobs to look at, with this number of free places."""
        return BEYOND + places + (SEARCHED if self.backfills else 0)

    def after(self, decision: Decision, *, unseen: bool) -> Lookahead:
        """The lookahead of the next decision. ``unseen``: there may be jobs on GPUs behind the foremost.

        Further in one way is never less far in the other: else two decisions that start no job could follow each other
        without end. (One sees a large job and reserves GPUs for it; the other does not see it and leaves them.)
        """
        left = decision.gpus_left > 0 or decision.room_left_mb > 0
        next_one = Lookahead(decision.backfill_s is not None, unseen and left)
        if not next_one.is_beyond(self):
            return next_one
        return Lookahead(self.backfills or next_one.backfills, self.by_kind or next_one.by_kind)

    def is_beyond(self, other: Lookahead) -> bool:
        """Whether it sees jobs that the other does not."""
        return (self.backfills and not other.backfills) or (self.by_kind and not other.by_kind)
