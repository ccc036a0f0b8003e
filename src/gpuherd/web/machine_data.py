"""What the machine page shows, read in one go: GPUs, who uses and holds them, who waits.

Only what this process's user may read: the driver, the leases' public notes, the policy. A source that can't be read
leaves its part empty and adds a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.idle import Check, IdleRule, check
from gpuherd.gpus.leases import Holder, LeaseFolder
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import is_named


class GpuState(StrEnum):
    """Whether a GPU can be had, as the page marks it."""

    FREE = "free"
    HELD = "held"
    BUSY = "busy"
    EXCLUDED = "excluded"
    SPLIT = "split"
    UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU and what is known of it.

    Attributes:
        gpu: its figures and processes.
        state: whether it can be had.
        reason: why not, as a sentence; "" for a free one.
        holder: who holds its lease.
        idle_since: wall-clock second since when its memory is held without computing; None while it computes, or where
            that is unknown.
    """

    gpu: Gpu
    state: GpuState
    reason: str = ""
    holder: Holder | None = None
    idle_since: float | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A gpuherd that waits for GPUs: of whom, for how many, since which wall-clock second; ``load_h``: GPU-hours that
    its user has used of late, by the rule of turns; ``kept``: labels of GPUs that are free and kept for it."""

    user: str
    gpus: int
    since: float
    load_h: float | None = None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineView:
    """The machine now. ``problem``: why it has no GPUs, if so; ``waiting``: in the order of their turns."""

    gpus: tuple[GpuView, ...] = ()
    problem: str | None = None
    driver_version: str | None = None
    waiting: tuple[Waiting, ...] = ()
    warnings: tuple[str, ...] = ()

    def count(self, state: GpuState) -> int:
        """How many GPUs are in this state."""
        return sum(view.state is state for view in self.gpus)


@dataclass(frozen=True, slots=True)
class DayUse:
    """GPU-seconds held on one day (``2026-11-28``), by user."""

    day: str
    held_s: Mapping[str, float]


def view_of(gpu: Gpu, found: Check, holder: Holder | None, *, excluded: bool, idle_since: float | None) -> GpuView:
    """A GPU for the page, from one look at it."""
    if gpu.mig_instances:
        return GpuView(gpu, GpuState.SPLIT, "split into the MIG instances below")
    if gpu.problem is not None:
        return GpuView(gpu, GpuState.UNUSABLE, gpu.problem, holder)
    if holder is not None:
        unused = "" if not found.free else "nothing runs on it now"
        return GpuView(gpu, GpuState.HELD, unused, holder, idle_since)
    if not found.free:
        return GpuView(gpu, GpuState.BUSY, found.reason, None, idle_since)
    if excluded:
        return GpuView(gpu, GpuState.EXCLUDED, "kept from gpuherd by this machine's policy")
    return GpuView(gpu, GpuState.FREE)


class MachineReader:
    """Reads the machine again and again, through one session of the driver. Called by one thread at a time."""

    def __init__(self) -> None:
        self._driver = GpuReader()

    def read(self) -> MachineView:
        """The machine now."""
        machine = self._driver.snapshot(errors=True)
        warnings: list[str] = []
        holders = _holders([gpu.uuid for gpu in machine.gpus], warnings)
        excluded = _excluded(warnings)
        rule = IdleRule()
        views = tuple(
            view_of(
                gpu,
                check(gpu, rule),
                holders.get(gpu.uuid),
                excluded=is_named(gpu, excluded),
                idle_since=None,
            )
            for gpu in machine.gpus
        )
        return MachineView(views, machine.problem, machine.driver_version, (), tuple(warnings))


def _holders(uuids: Sequence[str], warnings: list[str]) -> Mapping[str, Holder]:
    try:
        folder = LeaseFolder.existing()
    except (CannotWrite, UsageError) as problem:
        warnings.append(f"what gpuherd holds is not known: {problem}")
        return {}
    return {} if folder is None else folder.holders(uuids)


def _excluded(warnings: list[str]) -> tuple[str, ...]:
    """The GPUs that the policy keeps from gpuherd."""
    from gpuherd.jobs.settings import load

    try:
        settings = load()
    except UsageError as problem:
        # A wrong file prevents starting jobs, but not looking at GPUs.
        warnings.append(str(problem))
        return ()
    warnings.extend(settings.warnings)
    return settings.policy.exclude_gpus


def machine_name() -> str:
    """The machine's name for people, without its domain."""
    return os.uname().nodename.partition(".")[0]
