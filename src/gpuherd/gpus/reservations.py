"""Reservations of GPUs: who has which GPUs from when to when, by rules that all gpuherds of a machine follow alike.

A reservation is a file of its owner's (``gpuherd.gpus.reservation_files``); it names the GPUs that were chosen for it
when it was made. From the same files everybody computes the same by ``standings``:

1. Reservations count in the order in which they were made, by the kernel's time. One that is altered later counts as
   made then.
2. What is beyond its owner's limits is not honoured, nor is a GPU that an earlier reservation has at that time. So
   making or cancelling one never moves the GPUs of another.
3. A reservation lapses for good when its owner's gpuherd does not use it for ``lapse_after_s`` after it began, or
   leaves it for as long. A lease that its owner took before then and still holds keeps it.

Pure: the caller passes times, in seconds since 1970, and the limits of users.

>>> DAY = 86400.0
>>> first = Reservation("1-a", 1, 1, ("GPU-0",), since=2 * DAY, until=3 * DAY, made=1.0)
>>> second = Reservation("2-b", 2, 2, ("GPU-0", "GPU-1"), since=2.5 * DAY, until=3 * DAY, made=2.0)
>>> [sorted(each.uuids) for each in standings([second, first], now=DAY)]
[['GPU-0'], ['GPU-1']]
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpuherd.units import counted, duration

if TYPE_CHECKING:
    from datetime import datetime

_DAY_S = 86400.0
_HOUR_S = 3600.0
# A reservation may be written a moment after its beginning was computed.
_SLACK_S = 60.0
NONE_HELD: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation as its file has it.

    Attributes:
        id: unique on the machine; begins with the owner's uid.
        uid: of its owner, by the kernel.
        gpus: how many GPUs.
        uuids: which; as many as ``gpus``.
        since, until: seconds since 1970.
        name: for people; "" without one.
        made: when its file was last changed, by the kernel.
        used: when its owner's gpuherd last marked that it uses it; None for never.
    """

    id: str
    uid: int
    gpus: int
    uuids: tuple[str, ...]
    since: float
    until: float
    name: str = ""
    made: float = 0.0
    used: float | None = None


@dataclass(frozen=True, slots=True)
class ReservationLimits:
    """The most that one user may reserve: GPUs at once (None for all), and seconds: of one reservation, and from its
    making to its beginning."""

    max_gpus: int | None = None
    max_s: float = 7 * _DAY_S
    max_ahead_s: float = 28 * _DAY_S


LIMITS = ReservationLimits()


@dataclass(frozen=True, slots=True)
class ReservationRules:
    """The machine's rules; an administrator sets them in its policy.

    Attributes:
        enabled: reservations are made and honoured.
        limits: of users who have none of their own.
        limits_of: by user name.
        lapse_after_s: a reservation that is not used for so long lapses.
        unknown_horizon_s: a job of unknown length is not started so shortly before another user's reservation.
    """

    enabled: bool = True
    limits: ReservationLimits = LIMITS
    limits_of: Mapping[str, ReservationLimits] = field(default_factory=dict)
    lapse_after_s: float = 1800.0
    unknown_horizon_s: float = 7200.0

    def of(self, user: str) -> ReservationLimits:
        """The limits of the user of this name."""
        return self.limits_of.get(user, self.limits)


RULES = ReservationRules()


class State(Enum):
    """The state of a reservation at some time."""

    TO_COME = "to come"
    IN_FORCE = "in force"
    LAPSED = "lapsed"
    ENDED = "ended"
    NOT_HONOURED = "not honoured"


@dataclass(frozen=True, slots=True)
class Standing:
    """A reservation, and what it is worth.

    Attributes:
        uuids: the GPUs that are reserved by it.
        problem: why these are none, or fewer than it names, as a sentence; None when they are all.
        lapsed_at: when it lapsed; None when it has not.
    """

    reservation: Reservation
    uuids: frozenset[str]
    problem: str | None = None
    lapsed_at: float | None = None

    @property
    def until(self) -> float:
        """When its GPUs are or were free for others again: at its end, or when it lapsed."""
        return self.reservation.until if self.lapsed_at is None else self.lapsed_at

    def state(self, now: float) -> State:
        """Its state at this time."""
        if now >= self.reservation.until:
            return State.ENDED
        if not self.uuids:
            return State.NOT_HONOURED
        if self.lapsed_at is not None:
            return State.LAPSED
        return State.IN_FORCE if now >= self.reservation.since else State.TO_COME

    def is_open(self, now: float) -> bool:
        """Whether GPUs are reserved by it now or later."""
        return self.state(now) in (State.TO_COME, State.IN_FORCE)


def standings(
    reservations: Iterable[Reservation],
    *,
    now: float,
    rules: ReservationRules = RULES,
    limits_of: Callable[[int], ReservationLimits] | None = None,
    held_since: Mapping[str, float] = NONE_HELD,
) -> tuple[Standing, ...]:
    """What each reservation is worth now, in the order in which they begin.

    Args:
        limits_of: the limits of a user, by uid; without it those of all users.
        held_since: by id, since when its owner holds a GPU of it by a lease; missing where none is held.
    """
    spans = _Spans()
    found = []
    for each in sorted(reservations, key=lambda each: (each.made, each.id)):
        lapsed = lapsed_at(each, now, rules.lapse_after_s, held_since.get(each.id))
        limits = rules.limits if limits_of is None else limits_of(each.uid)
        off = None if rules.enabled else "is not honoured: this machine's policy turns reservations off"
        problem = off or why_refused(each, limits) or spans.too_many(each, limits)
        uuids = frozenset[str]() if problem else spans.take(each, each.until if lapsed is None else lapsed)
        if problem is None and len(uuids) < each.gpus:
            lost = each.gpus - len(uuids)
            problem = f"{lost} of its {counted(each.gpus, 'GPU')} had been reserved before"
        found.append(Standing(each, uuids, problem, lapsed))
    return tuple(sorted(found, key=lambda each: (each.reservation.since, each.reservation.id)))


def why_refused(reservation: Reservation, limits: ReservationLimits) -> str | None:
    """Why a reservation by itself is beyond these limits, as a sentence without its subject; None if it is not."""
    length_s = reservation.until - reservation.since
    if length_s > limits.max_s:
        return f"lasts {duration(length_s)}; at most {duration(limits.max_s)} are allowed"
    ahead_s = reservation.since - reservation.made
    if ahead_s > limits.max_ahead_s + _SLACK_S:
        return f"begins {duration(ahead_s)} from when it was made; at most {duration(limits.max_ahead_s)} are allowed"
    if limits.max_gpus is not None and reservation.gpus > limits.max_gpus:
        return f"is for {counted(reservation.gpus, 'GPU')}; at most {limits.max_gpus} are allowed"
    return None


def lapsed_at(
    reservation: Reservation, now: float, lapse_after_s: float, held_since: float | None = None
) -> float | None:
    """When the reservation lapsed because it was not used; None if it has not by now.

    A mark of use from the future (the clock was set back) counts as one of now.
    """
    used = reservation.since if reservation.used is None else min(reservation.used, now)
    at = max(reservation.since, min(reservation.made, now), used) + lapse_after_s
    if at > now or at >= reservation.until:
        return None
    return None if held_since is not None and held_since <= at else at


class _Spans:
    """The times for which each GPU is taken, and each user's reservations, as they are counted one after the other."""

    def __init__(self) -> None:
        # By UUID: beginnings and ends of spans, none of which overlaps another, in order.
        self._taken: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        self._of_user: dict[int, list[tuple[float, float, int]]] = defaultdict(list)

    def too_many(self, each: Reservation, limits: ReservationLimits) -> str | None:
        """Why the user would have more GPUs reserved at once than allowed, as ``why_refused``."""
        if limits.max_gpus is None:
            return None
        others = [span for span in self._of_user[each.uid] if span[0] < each.until and span[1] > each.since]
        times = [each.since, *(begin for begin, _, _ in others if begin > each.since)]
        most = max(sum(gpus for begin, end, gpus in others if begin <= at < end) for at in times)
        if most + each.gpus <= limits.max_gpus:
            return None
        total = most + each.gpus
        return f"would make {total} GPUs reserved by its owner at once; at most {limits.max_gpus} are allowed"

    def take(self, each: Reservation, until: float) -> frozenset[str]:
        """Takes those of its GPUs that no other has in its time; returns them."""
        got = set()
        for uuid in each.uuids:
            begins, ends = self._taken[uuid]
            place = bisect_right(ends, each.since)
            if place < len(begins) and begins[place] < until:
                continue
            begins.insert(place, each.since)
            ends.insert(place, until)
            got.add(uuid)
        if got:
            self._of_user[each.uid].append((each.since, until, len(got)))
        return frozenset(got)


def reserved_for(
    reservations: Iterable[Reservation],
    uuids: Iterable[str],
    now: float,
    *,
    rules: ReservationRules = RULES,
    limits_of: Callable[[int], ReservationLimits] | None = None,
    held_since: Mapping[str, float] = NONE_HELD,
) -> dict[str, tuple[Reservation, ...]]:
    """By UUID, the reservations that each of these GPUs has now and later, in order; () for none.

    The arguments are those of ``standings``.
    """
    found = standings(reservations, now=now, rules=rules, limits_of=limits_of, held_since=held_since)
    return {uuid: tuple(each.reservation for each in of) for uuid, of in by_gpu(found, uuids, now).items()}


def by_gpu(found: Sequence[Standing], uuids: Iterable[str], now: float) -> dict[str, tuple[Standing, ...]]:
    """By UUID, the standings of the reservations that each of these GPUs has now and later, in order; () for none."""
    still_open = [each for each in found if each.is_open(now)]
    return {uuid: tuple(each for each in still_open if uuid in each.uuids) for uuid in uuids}


# --- choosing GPUs for a new one ------------------------------------------------------------------------------------


def free_between(
    found: Iterable[Standing], uuids: Sequence[str], since: float, until: float, now: float
) -> tuple[str, ...]:
    """Those of these GPUs that are not reserved at any time from ``since`` to ``until``, best first.

    Those that others leave the least time around go first, so that long gaps stay whole; of equals the earlier in
    ``uuids``.
    """
    begins: dict[str, list[tuple[float, float]]] = {uuid: [] for uuid in uuids}
    for each in found:
        if each.is_open(now):
            for uuid in each.uuids & begins.keys():
                begins[uuid].append((each.reservation.since, each.until))
    gaps = {}
    for uuid, spans in begins.items():
        if any(begin < until and end > since for begin, end in spans):
            continue
        before = max((end for _, end in spans if end <= since), default=-math.inf)
        after = min((begin for begin, _ in spans if begin >= until), default=math.inf)
        gaps[uuid] = (min(since - before, _DAY_S) + min(after - until, _DAY_S), uuids.index(uuid))
    return tuple(sorted(gaps, key=lambda uuid: gaps[uuid]))


# --- the calendar ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hour:
    """A step of the calendar: when it begins, and how many GPUs are reserved and free all the time until the next."""

    at: float
    reserved: int
    free: int


@dataclass(frozen=True, slots=True)
class Calendar:
    """What is reserved from ``since`` to ``until``: the reservations that are, were or lapsed in this time, in the
    order in which they begin, and the GPUs hour by hour."""

    since: float
    until: float
    standings: tuple[Standing, ...]
    hours: tuple[Hour, ...]


def calendar(
    found: Iterable[Standing], uuids: Iterable[str], since: float, until: float, *, step_s: float = _HOUR_S
) -> Calendar:
    """The calendar of a span of time for the GPUs of these UUIDs.

    Reservations that are not honoured are among the standings and count for no hour; a lapsed one counts until it
    lapsed. Raises ValueError for a span that does not end after its beginning or has more than 10,000 steps.
    """
    if not 0 < until - since <= 10_000 * step_s:
        raise ValueError(f"a calendar from {since:g} to {until:g} in steps of {step_s:g} s has no or too many steps")
    all_uuids = frozenset(uuids)
    shown = tuple(each for each in found if each.reservation.since < until and each.reservation.until > since)
    starts = [since + number * step_s for number in range(math.ceil((until - since) / step_s))]
    taken: list[set[str]] = [set() for _ in starts]
    for each in shown:
        # From the step in which it begins to the one in which it ends.
        first = max(0, bisect_right(starts, each.reservation.since) - 1)
        for number in range(first, bisect_left(starts, each.until)):
            taken[number] |= each.uuids & all_uuids
    hours = tuple(Hour(at, len(used), len(all_uuids) - len(used)) for at, used in zip(starts, taken, strict=True))
    return Calendar(since, until, shown, hours)


# --- in words -------------------------------------------------------------------------------------------------------


def when(at: float, now: float) -> str:
    """A time for people: local, with the day of the week where that says it, else with the date.

    Within six days ``Fri 18:00``, else ``2026-12-01 09:00``.
    """
    from datetime import datetime  # slow to import, and only where there is a reservation

    try:
        local: datetime = datetime.fromtimestamp(at)
    except (ValueError, OverflowError, OSError):
        return f"second {at:.0f}"
    return f"{local:%a %H:%M}" if abs(at - now) < 6 * _DAY_S else f"{local:%Y-%m-%d %H:%M}"


def sentence(standing: Standing, owner: str, now: float) -> str:
    """A reservation in words: ``reserved by alice from Fri 18:00 (thesis)``, with ``until`` while it is in force."""
    each = standing.reservation
    name = f" ({each.name})" if each.name else ""
    state = standing.state(now)
    if state is State.LAPSED:
        lapsed = when(standing.until, now)
        return f"the reservation of {owner} until {when(each.until, now)}{name} lapsed {lapsed}: unused"
    if state is State.IN_FORCE:
        return f"reserved by {owner} until {when(each.until, now)}{name}"
    return f"reserved by {owner} from {when(each.since, now)}{name}"


# --- the files ------------------------------------------------------------------------------------------------------


def read() -> tuple[Reservation, ...]:
    """All reservations in the machine's folder, ended ones too, as their files have them; () where there is no folder.

    Where the machine was not set up for sharing they are only one's own. What they are worth: ``standings``.
    """
    from gpuherd.gpus.reservation_files import ReservationFolder

    folder = ReservationFolder.existing()
    return () if folder is None else folder.read()
