"""What the machine page shows: GPUs, who uses and holds them, who waits, and how much was used in the last days.

Only what this process's user may read: the driver, the leases' public notes, tickets, the ledger, the policy. A source
that can't be read leaves its part empty and adds a warning.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.idle import Check, IdleRule, check
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.leases import Holder, LeaseFolder
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.tickets import TicketReader
from gpuherd.gpus.turns import Load, Ticket, assign
from gpuherd.gpus.visible import is_named
from gpuherd.jobs import clock
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.records import Use
from gpuherd.ledger.shares import Shares
from gpuherd.ledger.usage import days


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
    """GPU-seconds held on one local day that begins at ``since`` (wall-clock seconds), by user."""

    since: float
    held_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """GPU-seconds of all users."""
        return sum(self.held_s.values())


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
        self._tickets = TicketReader()
        self._shares = Shares()
        self._free_since: dict[str, float] = {}

    def read(self) -> MachineView:
        """The machine now."""
        machine = self._driver.snapshot(errors=True)
        warnings: list[str] = []
        folder = _lease_folder(warnings)
        holders = {} if folder is None else folder.holders([gpu.uuid for gpu in machine.gpus])
        excluded = _excluded(warnings)
        ledger = Ledger.existing()
        idle = {} if ledger is None else idle_since([record.use for record in ledger.open_uses()])
        rule = IdleRule()
        views = tuple(
            view_of(
                gpu,
                check(gpu, rule),
                holders.get(gpu.uuid),
                excluded=is_named(gpu, excluded),
                idle_since=idle.get(gpu.uuid),
            )
            for gpu in machine.gpus
        )
        waiting = () if folder is None else self._waiting(folder, views, warnings)
        return MachineView(views, machine.problem, machine.driver_version, waiting, tuple(warnings))

    def _waiting(self, folder: LeaseFolder, views: Sequence[GpuView], warnings: list[str]) -> tuple[Waiting, ...]:
        now = clock.mono()
        free = [view.gpu.uuid for view in views if view.state is GpuState.FREE]
        self._free_since = {uuid: self._free_since.get(uuid, now) for uuid in free}
        try:
            tickets = self._tickets.read(folder.path, now)
        except OSError as problem:
            warnings.append(f"who waits is not known: {folder.path} can't be read: {problem.strerror}")
            return ()
        if not tickets:
            return ()
        used = self._shares.used_by_user(clock.wall())
        return waiting_in_order(tickets, views, self._free_since, used, now)


def waiting_in_order(
    tickets: Sequence[Ticket],
    views: Sequence[GpuView],
    free_since: Mapping[str, float],
    used_s: Mapping[int, float],
    now: float,
) -> tuple[Waiting, ...]:
    """Who waits, in the order of the rule of turns, and which free GPUs are meant for whom.

    Args:
        free_since: by UUID, the GPUs that are free, and since when.
        used_s: GPU-seconds of late by uid, as the ledger has them.
        now: seconds since boot, as are all other times here.
    """
    names = {ticket.uid: user_name(ticket.uid) for ticket in tickets}
    holders = [view.holder.user for view in views if view.holder is not None]
    loads = {uid: Load(used_s.get(uid, 0.0), holders.count(name)) for uid, name in names.items()}
    held = frozenset(view.gpu.uuid for view in views if view.holder is not None)
    assignment = assign(free_since, tickets, loads, now=now, held=held)
    labels = {view.gpu.uuid: view.gpu.label for view in views}
    wall = clock.wall()
    return tuple(
        Waiting(
            user=names[ticket.uid],
            gpus=ticket.gpus,
            since=wall - (now - ticket.since),
            load_h=loads[ticket.uid].used_s / 3600,
            kept=tuple(sorted(labels[uuid] for uuid in assignment.to[ticket.key])),
        )
        for ticket in assignment.order
    )


def idle_since(uses: Iterable[Use]) -> dict[str, float]:
    """By UUID, since which wall-clock second all who use a GPU hold its memory without computing. GPUs on which one of
    them computes, or nobody is known, are missing."""
    found: dict[str, float | None] = {}
    for use in uses:
        since = use.idle_since
        before = found.get(use.gpu, since)
        found[use.gpu] = None if since is None or before is None else max(since, before)
    return {uuid: since for uuid, since in found.items() if since is not None}


def read_days(count: int) -> tuple[DayUse, ...]:
    """How much was held on each of the last ``count`` days, today the last; () without a ledger."""
    ledger = Ledger.existing()
    if ledger is None:
        return ()
    now = clock.wall()
    since = next(days(now - (count - 1) * 86_400, now))[0]
    records = believed(ledger.read(since, now), ledger.reader_uid)
    return by_day([record.use for record in records], since, now)


def by_day(uses: Iterable[Use], since: float, until: float) -> tuple[DayUse, ...]:
    """The GPU-seconds of each user on each local day between two wall-clock seconds."""
    sums: dict[float, dict[str, float]] = {first: {} for first, _ in days(since, until)}
    names = lru_cache(maxsize=None)(user_name)  # a look-up may ask a server
    for use in uses:
        part = use.within(since, until)
        if part is None:
            continue
        user = names(use.uid)
        for first, last in days(part.since, part.until):
            of_day = part.within(first, last)
            if of_day is not None and first in sums:
                sums[first][user] = sums[first].get(user, 0.0) + of_day.held_s
    return tuple(DayUse(first, held_s) for first, held_s in sums.items())


def _lease_folder(warnings: list[str]) -> LeaseFolder | None:
    try:
        return LeaseFolder.existing()
    except (CannotWrite, UsageError) as problem:
        warnings.append(f"what gpuherd holds is not known: {problem}")
        return None


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
