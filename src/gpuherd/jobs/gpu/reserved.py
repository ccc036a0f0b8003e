"""Reservations as a gpuherd that waits for GPUs meets them: which GPUs others have reserved, and which are its own.

Reads the files of reservations, who holds leases on reserved GPUs, and the machine's policy; ``gpus.reservations`` says
what follows, ``scheduler.policy`` which jobs may start all the same. Marks a reservation of one's own as used, or it
would lapse. A problem with the folder never holds up a job: reservations are then as they were last read.
"""

from __future__ import annotations

import os
import select
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

from gpuherd.errors import GpuherdError
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.reservation_files import ReservationFolder, leases_since
from gpuherd.gpus.reservations import Reservation, Standing, State, by_gpu, lapsed_at, sentence, standings
from gpuherd.jobs import clock
from gpuherd.jobs.scheduler.types import GpuView, Reserved
from gpuherd.jobs.settings import NO_SETTINGS, Policy, Settings

if TYPE_CHECKING:
    from gpuherd.jobs.gpu.watch import GpuWatch

# Files are looked at no more often, in seconds; and where there is no folder, it is looked for as often.
_LOOK_EVERY_S = 1.0
# A reservation that is used is marked so often, or four times within the time after which it lapses.
_MARK_EVERY_S = 60.0


def standings_now(
    policy: Policy, now: float, folder: ReservationFolder | None = None, leases: LeaseFolder | None = None
) -> tuple[Standing, ...]:
    """What all reservations of this machine are worth now, in the order in which they begin; () without any.

    ``folder`` and ``leases``: those of the caller, where it has them; else those that are in use here.
    """
    folder = folder or ReservationFolder.existing()
    return () if folder is None else weigh(folder.read(), policy, now, leases)


def weigh(
    reservations: Sequence[Reservation], policy: Policy, now: float, leases: LeaseFolder | None = None
) -> tuple[Standing, ...]:
    """The same of reservations that were read already."""
    names = lru_cache(maxsize=None)(user_name)
    rules = policy.reservation_rules
    # Leases are asked only where they decide.
    doubtful = [each for each in reservations if lapsed_at(each, now, rules.lapse_after_s) and each.until > now]
    return standings(
        reservations,
        now=now,
        rules=rules,
        limits_of=lambda uid: policy.reservation_limits(names(uid)),
        held_since=_held_since(doubtful, leases),
    )


def _held_since(doubtful: Sequence[Reservation], leases: LeaseFolder | None) -> Mapping[str, float]:
    if not doubtful:
        return {}
    with suppress(GpuherdError, OSError):
        there = leases or LeaseFolder.existing()
        if there is not None:
            return leases_since(doubtful, there.holders({uuid for each in doubtful for uuid in each.uuids}))
    return {}


class ReservedGpus:
    """The reservations of this machine, for a dispatcher or ``gpuherd run``."""

    def __init__(self, settings: Settings = NO_SETTINGS) -> None:
        self._settings = settings
        self._uid = os.geteuid()
        self._folder: ReservationFolder | None = None
        self._reservations: tuple[Reservation, ...] = ()
        self._standings: tuple[Standing, ...] = ()
        self._look_at = 0.0
        self._picture: frozenset[tuple[str, frozenset[str], State]] = frozenset()
        self._marked: dict[str, float] = {}
        self._notices: list[str] = []
        self._told: set[str] = set()

    def change(self, settings: Settings) -> None:
        """Sets the settings from now on."""
        self._settings = settings
        self._look_at = 0.0

    @property
    def any_of_others(self) -> bool:
        """Whether another user has GPUs reserved now or later, by the last look."""
        return any(each.reservation.uid != self._uid for each in self._standings)

    def look(self, wall: float, now: float) -> bool:
        """Reads the files, if it is time to. Returns whether a decision may come out otherwise."""
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_EVERY_S
        try:
            self._folder = self._folder if self._folder is not None and self._folder.path.is_dir() else None
            self._folder = self._folder or ReservationFolder.existing()
            self._reservations = () if self._folder is None else self._folder.read()
            found = weigh(self._reservations, self._settings.policy, wall) if self._reservations else ()
        except (GpuherdError, OSError) as problem:
            self._tell_once(f"reservations can't be read: {problem}")
            return False
        self._standings = tuple(each for each in found if each.is_open(wall))
        before, self._picture = (
            self._picture,
            frozenset((each.reservation.id, each.uuids, each.state(wall)) for each in self._standings),
        )
        return before != self._picture

    def watched(self, watch: GpuWatch, ours: Collection[str], now: float, wall: float) -> tuple[GpuView, ...]:
        """The GPUs of the watch with its verdicts and the reservations of others. ``ours``: those of our jobs."""
        watch.preferred, watch.without_turns = self.mine(wall), frozenset(self.in_force(wall))
        return self.views(watch.views(now, ours), wall)

    def views(self, views: Sequence[GpuView], wall: float) -> tuple[GpuView, ...]:
        """The GPUs with the reservations of others: one in force makes a GPU that is free a busy one."""
        if not self._standings:
            return tuple(views)
        of = by_gpu(self._standings, [view.gpu.uuid for view in views], wall)
        return tuple(self._overlaid(view, of[view.gpu.uuid], wall) for view in views)

    def _overlaid(self, view: GpuView, of: Sequence[Standing], wall: float) -> GpuView:
        strange = next((each for each in of if each.reservation.uid != self._uid), None)
        if strange is None:
            return view
        reserved = Reserved(
            strange.reservation.since - wall,
            self._settings.policy.reservation_rules.unknown_horizon_s,
            sentence(strange, user_name(strange.reservation.uid), wall),
        )
        busy = reserved.sentence if reserved.in_s <= 0 and view.busy is None and not view.ours else view.busy
        return replace(view, reserved=reserved, busy=busy)

    def in_force(self, wall: float) -> dict[str, int]:
        """The GPUs that are reserved now, by UUID, and the uid of who has each: no one else takes turns there."""
        return {
            uuid: each.reservation.uid
            for each in self._standings
            if each.state(wall) is State.IN_FORCE
            for uuid in each.uuids
        }

    def mine(self, wall: float) -> frozenset[str]:
        """The GPUs that this user has reserved and may use now, by UUID."""
        return frozenset(uuid for uuid, uid in self.in_force(wall).items() if uid == self._uid)

    def note_use(self, uuids: Collection[str], wall: float, now: float) -> None:
        """Jobs of ours use these GPUs: marks our reservations of them that are in force, now and then."""
        every_s = min(_MARK_EVERY_S, self._settings.policy.reservation_rules.lapse_after_s / 4)
        for each in self._standings:
            one = each.reservation
            if one.uid != self._uid or each.uuids.isdisjoint(uuids) or each.state(wall) is not State.IN_FORCE:
                continue
            if self._folder is None or now - self._marked.get(one.id, -every_s) < every_s:
                continue
            self._marked[one.id] = now
            try:
                self._folder.mark_used(one)
            except OSError as problem:
                self._tell_once(f"reservation {one.id} can't be marked as used, and may lapse: {problem.strerror}")

    def mark_until_the_end(self, uuids: Collection[str]) -> None:
        """For a process that becomes a command on these GPUs: marks our reservations of them until it has ended.

        A process of its own does so, which nothing waits for and which holds no lease. There is none where nothing is
        reserved by us. It ends with the last of the reservations at the latest.
        """
        wall = clock.wall()
        ours = [
            each
            for each in self._standings
            if each.reservation.uid == self._uid and each.reservation.until > wall and not each.uuids.isdisjoint(uuids)
        ]
        if not ours or self._folder is None:
            return
        self.note_use(uuids, wall, clock.mono())
        until = max(each.reservation.until for each in ours)
        with suppress(OSError):
            command = os.pidfd_open(os.getpid())
            try:
                middle = os.fork()
                if middle == 0:
                    self._become_marker(command, uuids, until)
                os.waitpid(middle, 0)
            finally:
                os.close(command)

    def _become_marker(self, command: int, uuids: Collection[str], until: float) -> NoReturn:
        """In a fork: leaves its parent, keeps no file of it, and marks until the command has ended."""
        try:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.chdir("/")
            empty = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(empty, descriptor)
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, of a folder that lives
                if int(name) > 2 and int(name) != command:
                    with suppress(OSError):
                        os.close(int(name))
            every_s = min(_MARK_EVERY_S, self._settings.policy.reservation_rules.lapse_after_s / 4)
            waits = select.poll()
            waits.register(command, select.POLLIN)
            while clock.wall() < until and not waits.poll(every_s * 1000):
                self.look(clock.wall(), clock.mono())
                self.note_use(uuids, clock.wall(), clock.mono())
        finally:
            os._exit(0)

    def fetch_notices(self) -> tuple[str, ...]:
        """Sentences for people, once each."""
        notices, self._notices = tuple(self._notices), []
        return notices

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._notices.append(sentence)
