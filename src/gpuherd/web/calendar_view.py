"""The week of the reservations page: seven days as columns, local hours as rows, reservations as blocks. Pure, but for
``MachineReservations``.

A day of 23 or 25 hours has 24 rows all the same: the hour that is skipped has no time, the one that comes twice lasts
two hours.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import lru_cache
from threading import Lock

from gpuherd.errors import UsageError
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.machine_dir import machine_dir
from gpuherd.gpus.query import GpuReader
from gpuherd.gpus.reservation_files import ReservationFolder
from gpuherd.gpus.reservations import Standing, State, calendar, when
from gpuherd.gpus.state import Gpu, Machine
from gpuherd.jobs.gpu.booking import Request, labels_of, make, reservable, state_words
from gpuherd.jobs.gpu.reserved import standings_now
from gpuherd.jobs.settings import NO_SETTINGS, load
from gpuherd.units import moment, positive_int

HOURS = 24
# Reservations next to each other in a day; more are in the list alone.
MOST_LANES = 4
# Days that can be looked at, before and after today.
_MOST_DAYS = 420
_WEEK = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Reservations:
    """What was read.

    Attributes:
        gpus: those that can be reserved.
        standings: of all reservations, in the order in which they begin.
        shared: all users' reservations are known; else only one's own.
        enabled: the machine's policy lets GPUs be reserved.
        problem: why there are no GPUs to reserve.
        warnings: sentences about the settings.
    """

    gpus: tuple[Gpu, ...]
    standings: tuple[Standing, ...]
    shared: bool = False
    enabled: bool = True
    problem: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A reservation for people.

    Attributes:
        text: ``GPU 0, 1 · Fri 18:00 until Sun 18:00``.
        state: a word for its style; ``state_text`` for people.
        can_cancel: the reader may cancel it.
    """

    id: str
    owner: str
    is_own: bool
    labels: tuple[str, ...]
    text: str
    name: str
    state: str
    state_text: str
    can_cancel: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """An hour of a day. ``free``: GPUs that are free all the time from ``at`` to ``until``; None for an hour that is
    skipped; ``local``: its beginning as a form takes it."""

    at: float
    until: float
    local: str
    free: int | None
    is_past: bool


@dataclass(frozen=True, slots=True)
class Block:
    """A reservation's part of a day, from one row to before another."""

    entry: Entry
    first: int
    end: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Day:
    """A day of the week.

    Attributes:
        lanes: blocks next to each other, each in a lane where no other is.
        left_out: how many reservations have no lane.
        free: for a list: spans of hours, ``00–18`` or ``all day``, and GPUs that are free all the time.
    """

    name: str
    is_today: bool
    slots: tuple[Slot, ...]
    lanes: tuple[tuple[Block, ...], ...]
    left_out: int
    free: tuple[tuple[str, int], ...]

    def cell(self, lane: int, hour: int) -> Block | str:
        """What begins in this place of the table: a block, ``empty`` for nothing, ``covered`` where one has begun above
        it."""
        for block in self.lanes[lane]:
            if block.first == hour:
                return block
            if block.first < hour < block.end:
                return "covered"
        return "empty"


@dataclass(frozen=True, slots=True)
class Week:
    """Seven days. ``first``, ``before``, ``after``: the first of them, and of the weeks before and after, as
    ``2026-11-23``; None for weeks that can't be looked at. ``has_today``: today is the first. ``lanes``: the most that
    a day has."""

    first: str
    before: str | None
    after: str | None
    has_today: bool
    lanes: int
    days: tuple[Day, ...]
    entries: tuple[Entry, ...]
    gpus: int


def first_day(word: str, now: float) -> date:
    """The day that was asked for, like ``2026-11-28``; today for ``""``. Raises ValueError for what is no day, or more
    than a year away."""
    today = datetime.fromtimestamp(now).date()
    try:
        day = date.fromisoformat(word) if word else today
    except ValueError:
        raise ValueError(f"{word[:20]!r} is no day; write one like {today}") from None
    if abs((day - today).days) > _MOST_DAYS:
        raise ValueError(f"{day} is more than {_MOST_DAYS} days away")
    return day


def week_of(found: Reservations, first: date, *, uid: int, now: float, user_name: Callable[[int], str] = str) -> Week:
    """The week that begins on this day, as user ``uid`` sees it."""
    starts = [_midnight(first + timedelta(days=number)) for number in range(8)]
    of_week = calendar(found.standings, [gpu.uuid for gpu in found.gpus], starts[0], starts[7])
    entries = {
        each.reservation.id: _entry(each, found.gpus, uid=uid, now=now, user_name=user_name)
        for each in of_week.standings
    }
    begins = [hour.at for hour in of_week.hours]
    free = [hour.free for hour in of_week.hours]

    def free_between(since: float, until: float) -> int | None:
        steps = free[max(0, bisect_right(begins, since) - 1) : bisect_left(begins, until)]
        return min(steps, default=None)

    drawn = [(each, entries[each.reservation.id]) for each in of_week.standings if each.uuids]
    today = datetime.fromtimestamp(now).date()
    days = []
    for number in range(7):
        day = first + timedelta(days=number)
        slots = _slots(day, free_between, now)
        lanes, left_out = _lanes(slots, drawn)
        days.append(Day(f"{day:%a} {day.day} {day:%b}", day == today, slots, lanes, left_out, _free_spans(slots)))
    return Week(
        first=str(first),
        before=str(first - _WEEK) if (today - first + _WEEK).days <= _MOST_DAYS else None,
        after=str(first + _WEEK) if (first + _WEEK - today).days <= _MOST_DAYS else None,
        has_today=first == today,
        lanes=max(len(day.lanes) for day in days),
        days=tuple(days),
        entries=tuple(entries.values()),
        gpus=len(found.gpus),
    )


def _midnight(day: date) -> float:
    return datetime(day.year, day.month, day.day).timestamp()


def _slots(day: date, free_between: Callable[[float, float], int | None], now: float) -> tuple[Slot, ...]:
    hours = [datetime(day.year, day.month, day.day, hour) for hour in range(HOURS)]
    begins = [*(hour.timestamp() for hour in hours), _midnight(day + timedelta(days=1))]
    return tuple(
        Slot(
            at=begin,
            until=end,
            local=f"{hour:%Y-%m-%dT%H:%M}",
            free=free_between(begin, end) if end > begin else None,
            is_past=end <= now,
        )
        for hour, begin, end in zip(hours, begins, begins[1:], strict=False)
    )


def _lanes(slots: Sequence[Slot], drawn: Sequence[tuple[Standing, Entry]]) -> tuple[tuple[tuple[Block, ...], ...], int]:
    """The blocks of a day, each in the first lane that is free from its beginning on, and how many have none."""
    lanes: list[list[Block]] = []
    left_out = 0
    begins, ends = [slot.at for slot in slots], [slot.until for slot in slots]
    for standing, entry in drawn:
        since, until = standing.reservation.since, standing.until
        if since >= ends[-1] or until <= begins[0]:
            continue
        first = max(0, bisect_right(begins, since) - 1)
        block = Block(entry, first, max(first + 1, bisect_left(begins, until)))
        lane = next((lane for lane in lanes if lane[-1].end <= block.first), None)
        if lane is not None:
            lane.append(block)
        elif len(lanes) < MOST_LANES:
            lanes.append([block])
        else:
            left_out += 1
    return tuple(tuple(lane) for lane in lanes), left_out


def _free_spans(slots: Sequence[Slot]) -> tuple[tuple[str, int], ...]:
    """Hours in a row with the same number of free GPUs, of those that are not past."""
    spans: list[tuple[int, int, int]] = []
    for hour, slot in enumerate(slots):
        if slot.is_past or slot.free is None:
            continue
        if spans and spans[-1][1] == hour and spans[-1][2] == slot.free:
            spans[-1] = (spans[-1][0], hour + 1, slot.free)
        else:
            spans.append((hour, hour + 1, slot.free))
    return tuple((f"{first:02d}–{end:02d}" if end - first < HOURS else "all day", free) for first, end, free in spans)


def _entry(standing: Standing, gpus: Sequence[Gpu], *, uid: int, now: float, user_name: Callable[[int], str]) -> Entry:
    one, labels = standing.reservation, labels_of(standing, gpus)
    state = standing.state(now)
    span = f"{when(one.since, now)} until {when(one.until, now)}"
    return Entry(
        id=one.id,
        owner=user_name(one.uid),
        is_own=one.uid == uid,
        labels=labels,
        text=f"GPU {', '.join(labels)} · {span}",
        name=one.name,
        state=state.name.lower().replace("_", "-"),
        state_text=state_words(standing, now),
        can_cancel=uid in (0, one.uid) and state is not State.ENDED,
    )


# ---- reading and reserving -------------------------------------------------------------------------------------------


class FieldProblem(UsageError):
    """A field of the form is wrong. ``field``: its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def request_of(fields: Mapping[str, str], now: float) -> Request:
    """What a form asks for: ``gpus``, ``from``, ``until``, ``name``. Raises FieldProblem."""
    values: dict[str, float] = {}
    try:
        gpus = positive_int(fields.get("gpus", "").strip()[:9])
    except ValueError as problem:
        raise FieldProblem("gpus", str(problem)) from None
    for name in ("from", "until"):
        try:
            values[name] = moment(fields.get(name, "")[:100], now)
        except ValueError as problem:
            raise FieldProblem(name, str(problem)) from None
    if values["until"] <= values["from"]:
        raise FieldProblem("until", "the reservation ends before it begins")
    # The form has no seconds: this very minute is now.
    since = now if now - 60.0 < values["from"] < now else values["from"]
    return Request(gpus, since, values["until"], name=fields.get("name", "")[:1000])


class MachineReservations:
    """Reads and makes reservations, through one session of the driver."""

    def __init__(self) -> None:
        self._driver = GpuReader()
        self._lock = Lock()

    def read(self) -> Reservations:
        """The GPUs, the policy and all reservations."""
        warnings: tuple[str, ...] = ()
        try:
            settings = load()
        except UsageError as problem:
            # A wrong file prevents reserving, but not looking.
            settings, warnings = NO_SETTINGS, (str(problem),)
        machine = self._snapshot()
        gpus = reservable(machine.gpus, settings)
        folder = ReservationFolder.existing()
        found = () if folder is None else standings_now(settings.policy, time.time(), folder)
        return Reservations(
            gpus=gpus,
            standings=found,
            shared=_is_shared(),
            enabled=settings.policy.reservation_rules.enabled,
            problem=None if gpus else machine.problem or "the driver finds none that can be used",
            warnings=(*settings.warnings, *warnings),
        )

    def reserve(self, request: Request) -> Standing:
        """Makes a reservation of this user's. Raises GpuherdError with the reason if it can't be made."""
        return make(request, self._snapshot().gpus, load(), time.time())[0]

    def _snapshot(self) -> Machine:
        with self._lock:
            return self._driver.snapshot()


def _is_shared() -> bool:
    try:
        return machine_dir().shared
    except RuntimeError:  # a user without a home folder
        return False


def own_week(found: Reservations, first: date, now: float) -> Week:
    """The week as the user of this process sees it."""
    return week_of(found, first, uid=os.geteuid(), now=now, user_name=lru_cache(maxsize=None)(user_name))
