"""What the machine page shows: GPUs, who uses and holds them, who waits, and how much was used in the last days.

Only what this process's user may read: the driver, the leases' public notes, tickets, reservations, the ledger, the
policy. A source that can't be read leaves its part empty and adds a warning.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from gpuherd.errors import CannotWrite, GpuherdError, UsageError
from gpuherd.gpus.idle import Check, IdleRule, check
from gpuherd.gpus.idle_held import IdleGpu
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.leases import Holder, LeaseFolder
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.reservations import Standing, State, sentence
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import is_named
from gpuherd.jobs import clock
from gpuherd.jobs.gpu.reserved import standings_now
from gpuherd.jobs.gpu.turns import line_now
from gpuherd.jobs.monitor.idle import IdleGpus
from gpuherd.jobs.monitor.turns import WaitingUser, waiting_users
from gpuherd.jobs.settings import NO_SETTINGS, Settings, load
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.records import Use
from gpuherd.ledger.shares import Shares
from gpuherd.ledger.usage import days


class GpuState(StrEnum):
    """Whether a GPU can be had, as the page marks it."""

    FREE = "free"
    HELD = "held"
    BUSY = "busy"
    RESERVED = "reserved"
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
        idle: for how long its memory has been held without being used; None where it is used, or not for long.
        reservations: sentences about the reservations of it that are in force, lapsed or to come, one each.
    """

    gpu: Gpu
    state: GpuState
    reason: str = ""
    holder: Holder | None = None
    idle: IdleGpu | None = None
    reservations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineView:
    """The machine now. ``problem``: why it has no GPUs, if so; ``waiting``: in the order of their turns."""

    gpus: tuple[GpuView, ...] = ()
    problem: str | None = None
    driver_version: str | None = None
    waiting: tuple[WaitingUser, ...] = ()
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


def view_of(
    gpu: Gpu,
    found: Check,
    holder: Holder | None,
    *,
    excluded: bool = False,
    reserved: Sequence[Standing] = (),
    idle: IdleGpu | None = None,
    now: float = 0.0,
) -> GpuView:
    """A GPU for the page, from one look at it. ``reserved``: its reservations; ``now``: wall-clock seconds."""
    uid = os.geteuid()
    words = tuple(sentence(each, _owner(each, uid), now) for each in reserved)
    view = GpuView(gpu, GpuState.FREE, holder=holder, idle=idle, reservations=words)
    if gpu.mig_instances:
        return replace(view, state=GpuState.SPLIT, reason="split into the MIG instances below")
    if gpu.problem is not None:
        return replace(view, state=GpuState.UNUSABLE, reason=gpu.problem)
    if holder is not None:
        return replace(view, state=GpuState.HELD, reason="nothing runs on it now" if found.free else "")
    if not found.free:
        return replace(view, state=GpuState.BUSY, reason=found.reason)
    if excluded:
        return replace(view, state=GpuState.EXCLUDED, reason="kept from gpuherd by this machine's policy")
    for each, text in zip(reserved, words, strict=True):
        if each.state(now) is State.IN_FORCE and each.reservation.uid != uid:
            return replace(view, state=GpuState.RESERVED, reason=text)
    return view


def _owner(standing: Standing, uid: int) -> str:
    return "you" if standing.reservation.uid == uid else user_name(standing.reservation.uid)


class MachineReader:
    """Reads the machine again and again, through one session of the driver. Called by one thread at a time."""

    def __init__(self) -> None:
        self._driver = GpuReader()
        self._idle = IdleGpus()
        self._shares = Shares()

    def read(self) -> MachineView:
        """The machine now."""
        machine = self._driver.snapshot(errors=True)
        warnings: list[str] = []
        settings = _settings(warnings)
        folder = _lease_folder(warnings)
        holders = {} if folder is None else folder.holders([gpu.uuid for gpu in machine.gpus])
        now = clock.wall()
        standings = _standings(settings, now, folder, warnings)
        idle = self._idle.look(machine.gpus)
        rule = IdleRule()
        views = tuple(
            view_of(
                gpu,
                check(gpu, rule),
                holders.get(gpu.uuid),
                excluded=is_named(gpu, settings.policy.exclude_gpus),
                reserved=[each for each in standings if gpu.uuid in each.uuids],
                idle=idle.get(gpu.uuid),
                now=now,
            )
            for gpu in machine.gpus
        )
        waiting = () if folder is None else waiting_users(line_now(settings, folder, self._shares))
        return MachineView(views, machine.problem, machine.driver_version, waiting, tuple(warnings))


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


def _settings(warnings: list[str]) -> Settings:
    try:
        settings = load()
    except UsageError as problem:
        # A wrong file prevents starting jobs, but not looking at GPUs.
        warnings.append(str(problem))
        return NO_SETTINGS
    warnings.extend(settings.warnings)
    return settings


def _standings(settings: Settings, now: float, folder: LeaseFolder | None, warnings: list[str]) -> tuple[Standing, ...]:
    """Reservations that are in force, have lapsed or are to come."""
    try:
        found = standings_now(settings.policy, now, leases=folder)
    except (GpuherdError, OSError) as problem:
        warnings.append(f"reservations can't be read: {problem}")
        return ()
    return tuple(each for each in found if each.state(now) in (State.IN_FORCE, State.LAPSED, State.TO_COME))


def machine_name() -> str:
    """The machine's name for people, without its domain."""
    return os.uname().nodename.partition(".")[0]
