"""How much memory may still be promised on a GPU that several of our jobs share, and who uses more than it said.

A job that starts takes its memory only after a while, so what is free says little. What counts is what each job may
come to use: the most of what it declared, what others of its family were seen to use (their peak), and what it is seen
to use itself. On top comes what is used by nobody that we know. Pure; MB is 2^20 bytes, as the driver counts them: a
process's CUDA context (some 300 to 600 MB) is part of what a job uses and should be part of what it declares.

>>> from gpuherd.gpus.state import Gpu
>>> gpu = Gpu(index=0, uuid="GPU-a", name="A100", total_mb=40_000, used_mb=9_100, free_mb=30_900)
>>> shareable_mb(gpu, [Tenant("a", 10_000, now_mb=9_000), Tenant("b", 4_000, learned_mb=6_000, now_mb=0)])
23900
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.gpus.state import Gpu
from gpuherd.jobs.job import Job


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
