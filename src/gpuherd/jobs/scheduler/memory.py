"""GPU memory that jobs share, and estimates of what the next jobs need. Pure; MB is 2^20 bytes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuherd.jobs.job import Job

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu

# How much memory may still be promised on a GPU that several of our jobs share, and who uses more than it said.
#
# A job that starts takes its memory only after a while, so what is free says little. What counts is what each job may
# come to use: the most of what it declared, what others of its family were seen to use (their peak), and what it is
# seen to use itself. On top comes what is used by nobody that we know. Pure; MB is 2^20 bytes, as the driver counts
# them: a process's CUDA context (some 300 to 600 MB) is part of what a job uses and should be part of what it
# declares.


def could_share(job: Job) -> bool:
    """Whether the job shares its GPU in a run with ``--share``: it wants one, and says how much memory it needs."""
    return job.share or (job.gpus == 1 and job.memory_mb is not None)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A job of ours on a shared GPU.

    Attributes:
        job: its name.
        declared_mb: what it said that it needs.
        learned_mb: the highest peak that a job of its family was seen to reach, None if none was seen.
        now_mb: what its processes use now, None where the driver does not say.
    """

    job: str
    declared_mb: int
    learned_mb: int | None = None
    now_mb: int | None = None

    @property
    def promised_mb(self) -> int:
        """What has to be kept for it."""
        return max(expected_mb(self.declared_mb, self.learned_mb), self.now_mb or 0)


@dataclass(frozen=True, slots=True)
class Overuse:
    """A job that uses more than was kept for it when it started. ``sentence`` is for people."""

    job: str
    declared_mb: int
    used_mb: int

    @property
    def sentence(self) -> str:
        """What to tell the user."""
        return (
            f"uses {self.used_mb} MB and declared {self.declared_mb}; "
            f"others on its GPU may run out of memory: declare mem={self.used_mb}MB or more"
        )


def expected_mb(declared_mb: int, learned_mb: int | None) -> int:
    """What a job is expected to use on a GPU: what it declared, or more where its family was seen to use more."""
    return declared_mb if learned_mb is None else max(declared_mb, learned_mb)


def baseline_mb(gpu: Gpu, tenants: Sequence[Tenant], idle_mb: int | None = None) -> int:
    """MB in use by nobody that we know: the driver's own, and strangers'.

    Where the driver does not say what a tenant uses, ``idle_mb`` is taken: what was in use before the first of them
    came, None if that is not known (then all that is in use counts, which is safe and wasteful).
    """
    known = [tenant.now_mb for tenant in tenants if tenant.now_mb is not None]
    rest = max(0, gpu.used_mb - sum(known))
    if len(known) == len(tenants) or idle_mb is None:
        return rest
    return min(rest, idle_mb)


def shareable_mb(gpu: Gpu, tenants: Sequence[Tenant], idle_mb: int | None = None) -> int:
    """MB that may still be promised on this GPU, never more than are free now. 0 when more is promised than there is.

    It is what ``policy.GpuView.shareable_mb`` wants for a GPU where only sharing jobs of ours run.

    >>> from gpuherd.gpus.state import Gpu
    >>> gpu = Gpu(index=0, uuid="GPU-a", name="A100", total_mb=40_000, used_mb=9_100, free_mb=30_900)
    >>> shareable_mb(gpu, [Tenant("a", 10_000, now_mb=9_000), Tenant("b", 4_000, learned_mb=6_000, now_mb=0)])
    23900
    """
    if gpu.problem is not None or gpu.mig_instances:
        return 0
    promised = sum(tenant.promised_mb for tenant in tenants)
    return max(0, min(gpu.free_mb, gpu.total_mb - baseline_mb(gpu, tenants, idle_mb) - promised))


def overuses(tenants: Sequence[Tenant], allowance_mb: int = 0) -> tuple[Overuse, ...]:
    """The jobs that use more than they declared, by more than ``allowance_mb``."""
    return tuple(
        Overuse(tenant.job, tenant.declared_mb, tenant.now_mb)
        for tenant in tenants
        if tenant.now_mb is not None and tenant.now_mb > tenant.declared_mb + allowance_mb
    )


# What jobs were seen to use corrects what the next ones ask for. Pure; MB is 2^20 bytes on one GPU.
#
# What a job says that it needs is an estimate: its owner's, or a memory plan's. What is seen while jobs run is not:
#
# - A job that ran out of memory asks next time for a quarter more than it asked for and was seen to use.
# - Jobs of one ``family`` are alike. Once one was seen to use more than the others declare, those ask for as much;
#   once
#   one ran out of memory, for a quarter more than it had.
# - Once two of a family have ended well and used much less than declared, the others ask for the most that was seen
#   and
#   a quarter more, so that smaller GPUs will do, and shared ones hold more jobs.
#
# Never is more asked for than 97 % of what a GPU of the run could have free, so that nothing that is learned keeps a
# job from running, nor to the one GPU that has a few MB more free than its neighbours. Memory is looked at every few
# seconds, so that a short peak may be missed: hence the quarter, and two jobs, not one.

# In whole numbers: five quarters of what was seen.
_MORE, _OF = 5, 4
# A CUDA context more or less, for jobs so small that a quarter of them is nothing.
_MARGIN_MB = 256
# Nothing that would save less than a tenth is worth a smaller promise.
_WORTH = 0.9
MEASURED_BEFORE_LESS = 2
# The driver keeps a little of each GPU, which is not known before it was seen empty, and on some more than on others.
_OF_A_GPU = 0.97


@dataclass(frozen=True, slots=True)
class FamilyMemory:
    """What was seen of the jobs of a family.

    Attributes:
        peak_mb: the most that one of them was seen to use; None if none was seen.
        measured: how many ended well and were seen.
        ran_out_mb: the most that one had, or had asked for, when it ran out of memory; None if none did.
    """

    peak_mb: int | None = None
    measured: int = 0
    ran_out_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a job asks to be free on each GPU; ``because``: why that is not what it declared, for people."""

    memory_mb: int | None
    because: str | None = None


def learned(
    before: FamilyMemory | None, *, peak_mb: int | None, well: bool = False, ran_out_mb: int | None = None
) -> FamilyMemory:
    """What is known of a family after one more of its jobs.

    Args:
        peak_mb: the most that it was seen to use, None where nobody looked.
        well: it ended well.
        ran_out_mb: what it had when it ran out of GPU memory, None if it didn't.
    """
    known = before or FamilyMemory()
    if ran_out_mb is not None and ran_out_mb > 0:
        known = replace(known, ran_out_mb=max(known.ran_out_mb or 0, ran_out_mb))
    if peak_mb is None or peak_mb < 1:
        return known
    return replace(known, peak_mb=max(known.peak_mb or 0, peak_mb), measured=known.measured + well)


def asks_for(
    declared_mb: int | None, family: FamilyMemory | None, most_mb: int | None = None, *, less: bool = True
) -> Ask:
    """What a job asks for, by what it declares and what was seen of its family.

    Args:
        declared_mb: None for a job that says nothing of memory; it asks for none.
        most_mb: the most that so many GPUs as it needs could have free, None if that is not known.
        less: it may ask for less than it declares.

    >>> asks_for(30_000, FamilyMemory(peak_mb=9_000, measured=2)).memory_mb
    11506
    >>> asks_for(30_000, FamilyMemory(peak_mb=34_000), 40_000)
    Ask(memory_mb=34000, because='others of its family used up to 34000 MB')
    """
    if declared_mb is None or family is None:
        return Ask(declared_mb)
    seen = _within(family.peak_mb or 0, most_mb)
    room = 0 if family.ran_out_mb is None else _within(_quarter_more(family.ran_out_mb), most_mb)
    if max(seen, room) > declared_mb:
        if room > seen:
            return Ask(room, f"one of its family ran out of memory with {family.ran_out_mb} MB")
        return Ask(seen, f"others of its family used up to {family.peak_mb} MB")
    enough = max(_quarter_more(family.peak_mb or 0) + _MARGIN_MB, room)
    if less and family.measured >= MEASURED_BEFORE_LESS and enough < _WORTH * declared_mb:
        return Ask(enough, f"{family.measured} of its family used at most {family.peak_mb} MB")
    return Ask(declared_mb)


def after_running_out(asked_mb: int | None, peak_mb: int | None, most_mb: int | None) -> int | None:
    """What a job asks for after it ran out of memory: a quarter more than it asked for and was seen to use, as far as a
    GPU could have that free. What it asked for before where that is not known (``most_mb`` None).

    >>> after_running_out(10_000, 12_000, 40_000), after_running_out(10_000, 39_900, 40_000)
    (15000, 38800)
    """
    had = max(asked_mb or 0, peak_mb or 0)
    if had == 0 or most_mb is None:
        return asked_mb
    return max(asked_mb or 0, _within(_quarter_more(had), most_mb))


def _quarter_more(mb: int) -> int:
    return -(-_MORE * mb // _OF)


def _within(mb: int, most_mb: int | None) -> int:
    return mb if most_mb is None else min(mb, int(_OF_A_GPU * most_mb))
