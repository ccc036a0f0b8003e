"""Turns between users as a gpuherd that waits for GPUs takes them: its own ticket, those of others, and which of the
GPUs that it could take are meant for somebody else.

Reads tickets, leases and what users have used of late; ``gpuherd.gpus.turns`` decides. While no other user waits,
nothing is kept from us, and a look costs one list of the folder of leases. A failure of any of these files holds
nothing up: then there are no turns.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from gpuherd.errors import GpuherdError, clean
from gpuherd.gpus.lease_files import base_name, user_name
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.gpus.tickets import Need, OwnTicket, TicketReader
from gpuherd.gpus.turns import Assignment, Load, Ticket, assign, decayed, goes_on
from gpuherd.jobs import clock
from gpuherd.jobs.scheduler.limits import WEEK_HALF_LIFE_S
from gpuherd.jobs.settings import Settings, TurnPolicy
from gpuherd.units import counted

# A gpuherd that waits for less than this leaves no ticket, unless others wait.
_LEAVE_AFTER_S = 0.5
# The age from which on tickets and leases are read again for a decision, while others wait and while none does.
_STALE_S, _STALE_ALONE_S = 0.1, 1.0
# What users have used is read again after so long.
_USED_EVERY_S = 1.0
_WEEK_EVERY_S = 10.0
# After a longer time than this without a look, what users held meanwhile is unknown.
_LONGEST_HOLE_S = 30.0
# For so long after our job has left a GPU we may go on with it before our turn.
_LEFT_S = 5.0
# A GPU that a user could have had and let lapse is not kept for them again for so long.
_LAPSED_S = 600.0


class UsedByUser(Protocol):
    """Knows what users have used of late: ``gpuherd.ledger.Shares`` is one."""

    def used_by_user(self, now: float, half_life_s: float) -> Mapping[int, float]:
        """GPU-seconds by uid, decayed, at this second since 1970."""
        ...


class WeekUse:
    """What users have used of the GPU-hours of a week, by the machine's ledger (``scheduler.limits``)."""

    def __init__(self, shares: UsedByUser | None = None) -> None:
        self._shares = shares
        self._used: Mapping[int, float] = {}
        self._read_at = -math.inf

    def of(self, uid: int) -> float:
        """GPU-seconds of this user, faded to now; as of some seconds ago at most. 0 where no ledger can be read."""
        now = clock.mono()
        if now - self._read_at > _WEEK_EVERY_S:
            self._read_at = now
            if self._shares is None:
                from gpuherd.ledger import Shares  # only where the policy has such a limit

                self._shares = Shares()
            with suppress(OSError, GpuherdError):
                self._used = self._shares.used_by_user(clock.wall(), WEEK_HALF_LIFE_S)
        return self._used.get(uid, 0.0)


class SeenUse:
    """What users were seen to hold since this gpuherd began to look, for where no ledger tells."""

    def __init__(self) -> None:
        self._used: dict[int, float] = {}
        self._held: Mapping[int, int] = {}
        self._at = -math.inf

    def look(self, held: Mapping[int, int], now: float, half_life_s: float) -> None:
        """``held``: GPUs by uid now. Counts what was held since the last look, unless that is too long ago."""
        since_s = now - self._at
        if since_s > 0:
            self._used = {uid: decayed(used_s, since_s, half_life_s) for uid, used_s in self._used.items()}
        if 0 < since_s <= _LONGEST_HOLE_S:
            for uid, gpus in self._held.items():
                self._used[uid] = self._used.get(uid, 0.0) + gpus * since_s
        self._held, self._at = held, now

    def used(self) -> Mapping[int, float]:
        """GPU-seconds by uid, decayed to the last look."""
        return self._used


class Lapses:
    """GPUs that were kept for a user until the grace was over, though the user could have taken them.

    They are not kept for that user again for a while: else a gpuherd that can't use a GPU for a reason that its ticket
    does not say (or pretends to wait) would delay each job of others by the grace. It ends as soon as the user takes
    any GPU.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, float]] = {}
        self._until: dict[tuple[int, str], float] = {}

    def without(self, tickets: Iterable[Ticket], uuids: Collection[str], now: float) -> list[Ticket]:
        """The tickets, each without those of these GPUs that its user has let lapse."""
        self._until = {key: until for key, until in self._until.items() if now < until}
        if not self._until:
            return list(tickets)
        gone = {uid: {uuid for other, uuid in self._until if other == uid} for uid, _ in self._until}
        return [
            replace(ticket, usable=(frozenset(uuids) if ticket.usable is None else ticket.usable) - gone[ticket.uid])
            if ticket.uid in gone
            else ticket
            for ticket in tickets
        ]

    def note(self, given: Assignment, free: Collection[str], me: str, now: float) -> None:
        """One decision: for whom GPUs are kept now, and which of those of the last time were not taken."""
        waiting = {ticket.uid for ticket in given.order}
        for uuid, (uid, until) in self._kept.items():
            if uuid in free and uid in waiting and now >= until:
                self._until[uid, uuid] = now + _LAPSED_S
        self._kept = {
            uuid: (ticket.uid, given.until[ticket.key])
            for ticket in given.ahead_of(me)
            # Those that are kept until others give more back can't be taken yet.
            if len(given.to[ticket.key]) >= ticket.smallest
            for uuid in given.to[ticket.key]
        }

    def look(self, free: Collection[str]) -> None:
        """Only these GPUs are free now: the others that were kept have been taken."""
        self._kept = {uuid: kept for uuid, kept in self._kept.items() if uuid in free}

    def took(self, uid: int) -> None:
        """This user has taken a GPU."""
        self._until = {key: until for key, until in self._until.items() if key[0] != uid}


@dataclass(frozen=True, slots=True)
class Line:
    """Who waits for GPUs on this machine, for people.

    Attributes:
        tickets: of all gpuherds that wait, in the order of their users' loads.
        loads: by uid, of all users who wait or hold GPUs.
        holders: who holds which GPU; by the name of its lease's files.
        at: seconds since boot.
        policy: the machine's rules.
    """

    tickets: tuple[Ticket, ...]
    loads: Mapping[int, Load]
    holders: Mapping[str, int | None]
    at: float
    policy: TurnPolicy


def line_now(settings: Settings, folder: LeaseFolder | None = None, shares: UsedByUser | None = None) -> Line | None:
    """Who waits for GPUs on this machine now; None for no one. Raises CannotWrite as ``LeaseFolder``."""
    folder = folder or LeaseFolder.existing()
    if folder is None:
        return None
    there = folder
    turns = GpuTurns(settings, lambda: there, shares)
    return turns.line(clock.mono())


class GpuTurns:
    """The turns of one gpuherd that waits, or only looks.

    Args:
        settings: weights, and whether there are turns at all.
        folder: the folder of leases; called when it is needed first.
        shares: what users have used of late, by default by the machine's ledger.
    """

    def __init__(self, settings: Settings, folder: Callable[[], LeaseFolder], shares: UsedByUser | None = None) -> None:
        self._policy = settings.policy.turns
        self._folder = folder
        self._shares = shares
        self._uid = os.geteuid()
        self._own = OwnTicket()
        self._place: Path | None = None  # the folder of leases, while it can be read
        self._reader = TicketReader()
        self._seen = SeenUse()
        self._lapses = Lapses()
        self._need: Need | None = None
        self._since: float | None = None
        self._tickets: tuple[Ticket, ...] = ()
        self._held: Mapping[str, int | None] = {}
        self._ours: frozenset[str] = frozenset()
        self._read_at = -math.inf
        self._free: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._known: Mapping[int, float] = {}
        self._used_at = -math.inf
        self._names: dict[int, str] = {}
        self._notices: list[str] = []
        self._reported = False

    def change(self, settings: Settings) -> None:
        """Sets the settings from now on."""
        self._policy = settings.policy.turns
        if not self._policy.enabled:
            self.rest()
            self._tickets = ()

    @property
    def others_wait(self) -> bool:
        """Whether gpuherds of other users wait, as of the last look."""
        return any(ticket.uid != self._uid for ticket in self._tickets)

    # --- what we wait for -------------------------------------------------------------------------------------

    def wait(self, need: Need, now: float) -> None:
        """We wait for this, since now unless we waited already."""
        self._need = need
        if self._since is None:
            self._since = now

    def took(self, now: float) -> None:
        """A job of ours has taken its GPUs: what still waits counts as waiting since now."""
        if self._since is not None:
            self._since = now

    def left(self, uuids: Iterable[str], now: float) -> None:
        """Our own jobs have just left these GPUs."""
        self._left = {uuid: at for uuid, at in self._left.items() if now - at <= _LEFT_S}
        self._left.update(dict.fromkeys(uuids, now))

    def rest(self) -> None:
        """We wait no more."""
        self._need = self._since = None
        self._own.withdraw()
        self._free.clear()

    def fetch_notices(self) -> tuple[str, ...]:
        """Sentences for people, once each."""
        notices, self._notices = tuple(self._notices), []
        return notices

    # --- looking ----------------------------------------------------------------------------------------------

    def line(self, now: float) -> Line | None:
        """All who wait now; None for no one."""
        try:
            folder = self._folder()
            self._tickets = self._reader.read(folder.path, now)
            self._held = folder.held_uids() if self._tickets else {}
        except OSError:
            return None
        if not self._tickets:
            return None
        loads = self._loads(())
        order = assign({}, self._tickets, loads, now=now, rules=self._policy.rules).order
        return Line(order, loads, self._held, now, self._policy)

    def look(self, now: float, ours: Collection[str]) -> None:
        """One look, with each full look at the GPUs: brings our ticket up to date and reads those of others. ``ours``:
        GPUs that our jobs hold."""
        if not self._policy.enabled:
            return
        self._read(now, ours)
        need, since, place = self._need, self._since, self._place
        if need is None or since is None or place is None:
            return
        if need.gpus < need.smallest:
            self._own.withdraw()  # our own limit is reached
        elif self.others_wait or now - since >= _LEAVE_AFTER_S:
            self._own.keep(place, need, since)
            if self._own.problem is not None and not self._reported:
                self._reported = True
                self._notices.append(f"others don't see that we wait: {self._own.problem}")

    def _read(self, now: float, ours: Collection[str]) -> None:
        self._read_at = now
        try:
            folder = self._folder()
            self._place = folder.path
            self._tickets = self._reader.read(folder.path, now, self._own.name)
            held = folder.held_uids() if self.others_wait else {}
        except (GpuherdError, OSError):
            self._tickets, held, self._place = (), {}, None
        before = {(name, uid) for name, uid in self._held.items()}
        for name, uid in held.items():
            if uid is not None and (name, uid) not in before:
                self._lapses.took(uid)
        self._held, self._ours = held, frozenset(map(base_name, ours))
        if held:
            self._seen.look(_by_user(held), now, self._policy.rules.half_life_s)

    # --- deciding ---------------------------------------------------------------------------------------------

    def kept(
        self, free: Collection[str], ours: Collection[str], now: float, coming: Collection[str] = ()
    ) -> Mapping[str, str]:
        """Which of the GPUs that we could take are kept for others, by UUID, with a sentence each.

        Args:
            free: UUIDs of the GPUs that may be taken as far as their own state goes.
            ours: UUIDs of the GPUs that our jobs hold.
            coming: UUIDs of GPUs without users, though they are not free for long enough yet.
        """
        if not self._policy.enabled:
            return {}
        self._free = {uuid: self._free.get(uuid, now) for uuid in free}
        self._lapses.look(free)
        if not free:
            return {}
        if now - self._read_at > (_STALE_S if self.others_wait else _STALE_ALONE_S):
            self._read(now, ours)
        if not self.others_wait:
            return {}
        me, loads = self._own.name, self._loads(ours)
        mine = (self._need or Need()).ticket(me, self._uid, now if self._since is None else self._since)
        if mine.gpus < mine.smallest:
            mine = replace(mine, gpus=mine.smallest)
        held = {*self._held, *ours, *coming}.difference(free)
        tickets = self._lapses.without((*self._tickets, mine), {*free, *held}, now)
        given = assign(self._free, tickets, loads, now=now, me=me, held=held, rules=self._policy.rules)
        self._lapses.note(given, free, me, now)
        kept = self._not_gone_on(given.kept_for_others(me), len(given.to.get(me, ())), loads, now)
        return {uuid: self._sentence(ticket, given, loads) for uuid, ticket in kept.items()}

    def _not_gone_on(
        self, kept: Mapping[str, Ticket], more: int, loads: Mapping[int, Load], now: float
    ) -> dict[str, Ticket]:
        """The same without the GPUs that our own jobs have just left, and with which we go on for a while.

        ``more``: how many are meant for us.
        """
        found = {}
        for uuid, ticket in kept.items():
            is_left = now - self._left.get(uuid, -math.inf) <= _LEFT_S
            if is_left and goes_on(loads[self._uid], loads[ticket.uid], more, self._policy.rules):
                more += 1
            else:
                found[uuid] = ticket
        return found

    def _loads(self, ours: Collection[str]) -> dict[int, Load]:
        # Of our own we know better than the last look.
        held = Counter(_by_user({name: uid for name, uid in self._held.items() if name not in self._ours}))
        if ours:
            held[self._uid] += len(ours)
        used = dict(self._seen.used())
        for uid, used_s in self._used().items():
            used[uid] = max(used_s, used.get(uid, 0.0))
        return {
            uid: Load(used.get(uid, 0.0), held[uid], self._policy.weight(self._name(uid)))
            for uid in {self._uid, *held, *(ticket.uid for ticket in self._tickets)}
        }

    def _used(self) -> Mapping[int, float]:
        now = clock.mono()
        if now - self._used_at > _USED_EVERY_S:
            self._used_at = now
            with suppress(OSError, GpuherdError):
                self._known = self._ledger.used_by_user(clock.wall(), self._policy.rules.half_life_s)
        return self._known

    @cached_property
    def _ledger(self) -> UsedByUser:
        if self._shares is not None:
            return self._shares
        from gpuherd.ledger import Shares  # only where others wait

        return Shares()

    def _name(self, uid: int) -> str:
        if uid not in self._names:
            self._names[uid] = user_name(uid)
        return self._names[uid]

    def _sentence(self, ticket: Ticket, given: Assignment, loads: Mapping[int, Load]) -> str:
        who = clean(self._name(ticket.uid))
        if len(given.to[ticket.key]) < ticket.smallest:
            return f"kept for {who}, who waits for {counted(ticket.smallest, 'GPU')} at once"
        theirs, ours = (loads.get(uid, Load()).used_s / 3600 for uid in (ticket.uid, self._uid))
        return f"it is {who}'s turn ({theirs:.1f} GPU-hours of late, you {ours:.1f})"


def _by_user(held: Mapping[str, int | None]) -> dict[int, int]:
    return dict(Counter(uid for uid in held.values() if uid is not None))
