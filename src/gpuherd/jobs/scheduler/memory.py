"""GPU memory that jobs share, and estimates of what the next jobs need. Pure; MB is 2^20 bytes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuherd.jobs.job import Job

if TYPE_CHECKING:
    from gpuherd.gpus.state import Gpu

# Memory that may still be promised on a GPU that several of our jobs share, and jobs that use more than they declared.
#
# A job that starts allocates its memory only after a while, so free memory says little. What counts is each job's
# expected use: the maximum of what it declared, of the measured peak of its family, and of its own measured use. Memory
# in use by other processes is added. MB are 2^20 bytes, as the driver counts them: a process's context on the GPU (some
# 300 to 600 MB) is part of what a job uses and should be part of what it declares.


def could_share(job: Job) -> bool:
    """Whether the job shares its GPU in a run with ``--share``: it requests one GPU, and declares its memory."""
    return job.share or (job.gpus == 1 and job.memory_mb is not None)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A job of ours on a shared GPU.

    Attributes:
        job: its name.
        declared_mb: its request.
        learned_mb: the highest measured peak of its family, None if none was measured.
        now_mb: the current use of its processes, None where the driver does not report it.
    """

    job: str
    declared_mb: int
    learned_mb: int | None = None
    now_mb: int | None = None

    @property
    def promised_mb(self) -> int:
        """MB that are promised to it."""
        return max(expected_mb(self.declared_mb, self.learned_mb), self.now_mb or 0)


@dataclass(frozen=True, slots=True)
class Overuse:
    """A job that uses more than it declared."""

    job: str
    declared_mb: int
    used_mb: int

    @property
    def sentence(self) -> str:
        """The warning for users."""
        return (
            f"uses {self.used_mb} MB and declared {self.declared_mb}; "
            f"others on its GPU may run out of memory: declare mem={self.used_mb}MB or more"
        )


def expected_mb(declared_mb: int, learned_mb: int | None) -> int:
    """Expected use of a job on a GPU: what it declared, or more where its family was measured to use more."""
    return declared_mb if learned_mb is None else max(declared_mb, learned_mb)


def baseline_mb(gpu: Gpu, tenants: Sequence[Tenant], idle_mb: int | None = None) -> int:
    """MB in use by other processes than the tenants': the driver's own part and external users'.

    Where the driver does not report the use of a tenant, ``idle_mb`` is taken: MB in use before the first tenant came,
    None if that is not known (then all memory in use counts, which is safe and wasteful).
    """
    known = [tenant.now_mb for tenant in tenants if tenant.now_mb is not None]
    rest = max(0, gpu.used_mb - sum(known))
    if len(known) == len(tenants) or idle_mb is None:
        return rest
    return min(rest, idle_mb)


def shareable_mb(gpu: Gpu, tenants: Sequence[Tenant], idle_mb: int | None = None) -> int:
    """MB that may still be promised on this GPU, never more than are free now. 0 when more is promised than exists.

    The value of ``types.GpuView.shareable_mb`` for a GPU where only sharing jobs of ours run.

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


# Measured memory corrects the requests of later jobs. A job's declaration is an estimate, by its owner or a memory
# plan; measurements are not:
#
# - A job that ran out of memory requests next time a quarter more than it requested and was measured to use.
# - Jobs of one ``family`` are alike. Once one was measured to use more than the others declare, those request as much;
#   once one ran out of memory, a quarter more than it had.
# - Once two of a family have succeeded and used much less than declared, the others request the measured maximum and a
#   quarter more, so that smaller GPUs suffice and shared ones hold more jobs.
#
# A request never exceeds 97 % of what a GPU of the run could have free, so that no estimate keeps a job from running,
# or ties it to the one GPU that has a few MB more free than its neighbours. Memory is polled every few seconds, so that
# a short peak may be missed: hence the quarter, and two jobs, not one.

# In whole numbers: five quarters of the measured use.
_MORE, _OF = 5, 4
# About a process's context on the GPU, for jobs so small that a quarter of them is no margin.
_MARGIN_MB = 256
# A smaller request must save at least a tenth.
_WORTH = 0.9
MEASURED_BEFORE_LESS = 2
# The driver keeps a part of each GPU, which is not known before the GPU was seen empty, and differs between GPUs.
_OF_A_GPU = 0.97


@dataclass(frozen=True, slots=True)
class FamilyMemory:
    """Measured memory of the jobs of a family.

    Attributes:
        peak_mb: the maximum that one of them used; None if none was measured.
        measured: how many succeeded and were measured.
        ran_out_mb: the maximum that one had, or had requested, when it ran out of memory; None if none did.
    """

    peak_mb: int | None = None
    measured: int = 0
    ran_out_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """The memory that a job requests on each GPU; ``because``: why that is not what it declared, for people."""

    memory_mb: int | None
    because: str | None = None


def learned(
    before: FamilyMemory | None, *, peak_mb: int | None, well: bool = False, ran_out_mb: int | None = None
) -> FamilyMemory:
    """The family's measurements after one more of its jobs.

    Args:
        peak_mb: the job's measured maximum, None where it was not measured.
        well: it succeeded.
        ran_out_mb: MB that it had when it ran out of GPU memory, None if it didn't.
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
    """The job's request, by what it declares and what was measured of its family.

    Args:
        declared_mb: None for a job that declares no memory; it requests none.
        most_mb: the maximum that as many GPUs as it needs could have free, None if that is not known.
        less: it may request less than it declares.

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
    """The request of a job that ran out of memory: a quarter more than it requested and was measured to use, as far as
    a GPU could have that free. The same request as before where that is not known (``most_mb`` None).

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
