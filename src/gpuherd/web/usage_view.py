"""What the usage page shows: the sums of ``gpuherd usage`` for 30 days or a month, and how they lie by day. Pure, but
for ``read_usage``.

Hours are GPU-hours. A figure that was never measured is None.
"""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

from gpuherd.gpus.lease_files import user_name
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.records import Recorded
from gpuherd.ledger.usage import Row, Total, Usage, usage

# What the table can be sorted into, with the heading of its first column.
BY: Mapping[str, str] = {"user": "User", "project": "Project", "gpu": "GPU", "command": "Command"}
DAYS = 30
_DAY_S = 86_400.0
_HOUR_S = 3600.0
_KWH_J = 3.6e6
# Months that can be chosen; older ones by ``gpuherd usage``.
_MONTHS = 24
# Users with a place of their own in the chart; the others are one.
MOST_SERIES = 5
_MOST_ROWS = 200
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Span:
    """A time in wall-clock seconds: a calendar month (``2026-11``, local), or for month ``""`` the last 30 days."""

    month: str
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Day:
    """A day of the chart: ``2026-11-28``, and GPU-hours held by the users of the series, in their order."""

    name: str
    hours: tuple[float, ...]

    @property
    def total(self) -> float:
        """GPU-hours of all."""
        return sum(self.hours)


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table. ``own_h``: the GPU-hours in it that are the reader's."""

    key: str
    total: Total
    share: float
    own_h: float = 0.0

    @property
    def held_h(self) -> float:
        """GPU-hours held."""
        return self.total.held_s / _HOUR_S

    @property
    def computing_h(self) -> float | None:
        """GPU-hours that it computed, as far as measured."""
        return self.total.computing_s / _HOUR_S if self.total.measured_s > 0 else None

    @property
    def idle_h(self) -> float | None:
        """GPU-hours held without computing, as far as measured."""
        total = self.total
        return max(0.0, total.measured_s - total.computing_s) / _HOUR_S if total.measured_s > 0 else None

    @property
    def kwh(self) -> float | None:
        """Energy in kWh."""
        return None if self.total.energy_j is None else self.total.energy_j / _KWH_J


@dataclass(frozen=True, slots=True)
class UsageView:
    """The page.

    Attributes:
        tables: by the keys of ``BY``, the rows, the largest first; of very many only the first.
        all: the sum of all uses.
        series: the users of the chart; ``others`` last, if there are any.
        days: every day of the span, in order.
        shared: all users' usage is known; else only what this user's gpuherds have recorded.
        skipped: lines of the ledger that were no records.
    """

    span: Span
    tables: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    all: Line = Line("", Total(), 1.0)
    series: tuple[str, ...] = ()
    days: tuple[Day, ...] = ()
    shared: bool = False
    skipped: int = 0


def span_of(month: str, now: float) -> Span:
    """The span of a month that was asked for; the last 30 days for ``""``. Raises ValueError for what is none of
    ``months``."""
    if not month:
        return Span("", now - DAYS * _DAY_S, now)
    if month not in months(now):
        raise ValueError(f"{month[:20]!r} is none of the last {_MONTHS} months, like {months(now)[0]}")
    year, number = int(month[:4]), int(month[5:])
    since = datetime(year, number, 1).timestamp()
    following = datetime(year + number // 12, number % 12 + 1, 1).timestamp()
    return Span(month, since, min(following, max(now, since)))


def months(now: float) -> tuple[str, ...]:
    """The months that can be chosen, the current one first.

    >>> months(datetime(2026, 1, 15).timestamp())[:3]
    ('2026-01', '2025-12', '2025-11')
    """
    today = datetime.fromtimestamp(now)
    last = today.year * 12 + today.month - 1
    return tuple(f"{number // 12:04d}-{number % 12 + 1:02d}" for number in range(last, last - _MONTHS, -1))


def read_usage(span: Span) -> UsageView:
    """Reads the ledger. A machine without one has an empty view."""
    ledger = Ledger.existing()
    if ledger is None:
        return UsageView(span)
    found = list(believed(ledger.read(span.since, span.until), ledger.reader_uid, others=True))
    return view_of(
        found,
        span,
        uid=os.geteuid(),
        reader_uid=ledger.reader_uid,
        user_name=lru_cache(maxsize=None)(user_name),
        shared=ledger.shared,
        skipped=sum(ledger.skipped.values()),
    )


def view_of(
    records: Sequence[Recorded],
    span: Span,
    *,
    uid: int,
    reader_uid: int,
    user_name: Callable[[int], str] = str,
    shared: bool = True,
    skipped: int = 0,
) -> UsageView:
    """The page of these uses, each moment once. ``uid``: whose rows are marked."""

    def summed(some: Iterable[Recorded], by: str) -> Usage:
        return usage(some, by, span.since, span.until, reader_uid=reader_uid, user_name=user_name)

    mine = [record for record in records if record.use.uid == uid]
    tables = {}
    whole = Line("", Total(), 1.0)
    for by in BY:
        of_all = summed(records, by)
        own = {row.key: row.total.held_s / _HOUR_S for row in summed(mine, by).rows}
        tables[by] = tuple(_line(row, own) for row in of_all.rows[:_MOST_ROWS])
        whole = Line("", of_all.total, 1.0, sum(own.values()))
    first = [line.key for line in tables["user"][:MOST_SERIES]]
    by_user: dict[str, list[Recorded]] = {}
    for record in records:
        name = user_name(record.use.uid)
        by_user.setdefault(name if name in first else OTHERS, []).append(record)
    series = (*first, OTHERS) if OTHERS in by_user and OTHERS not in first else tuple(first)
    of_day = {name: {row.key: row.total.held_s for row in summed(by_user[name], "day").rows} for name in series}
    days = tuple(Day(day, tuple(of_day[name].get(day, 0.0) / _HOUR_S for name in series)) for day in _days(span))
    return UsageView(span, tables, whole, series, days, shared, skipped)


def _line(row: Row, own: Mapping[str, float]) -> Line:
    return Line(row.key, row.total, row.share, own.get(row.key, 0.0))


def _days(span: Span) -> list[str]:
    """The local days of a span."""
    found: list[str] = []
    # Twice a day, so that none is left out where one has 23 or 25 hours.
    at = span.since
    while at < span.until:
        day = datetime.fromtimestamp(at).strftime("%Y-%m-%d")
        if found[-1:] != [day]:
            found.append(day)
        at += _DAY_S / 2
    last = datetime.fromtimestamp(max(span.since, span.until - 1.0)).strftime("%Y-%m-%d")
    return found if found[-1:] == [last] else [*found, last]


# ---- the chart -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """A user's part of a day's bar, in the chart's units. ``number``: of the user in the series."""

    number: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Stacked bars by day, ready to be drawn.

    Attributes:
        ticks: height and GPU-hours of the lines across.
        labels: place and day of the month of some bars.
    """

    width: int
    height: int
    left: int
    base: float
    blocks: tuple[Block, ...]
    ticks: tuple[tuple[float, str], ...]
    labels: tuple[tuple[float, str], ...]


def chart_of(days: Sequence[Day], *, width: int, height: int = 210) -> Chart:
    """The chart in this many units; a label is about 40 wide."""
    left, top, bottom = 44, 8, 22
    base = height - bottom
    most = max((day.total for day in days), default=0.0)
    step = tick_step(most)
    top_h = step * max(1, math.ceil(most / step - 1e-9))
    scale = (base - top) / top_h
    room = (width - left) / max(1, len(days))
    gap = min(3.0, room * 0.2)
    blocks = []
    for number, day in enumerate(days):
        y = float(base)
        for series, hours in enumerate(day.hours):
            tall = hours * scale
            if tall > 0.05:
                y -= tall
                blocks.append(
                    Block(series, round(left + number * room, 2), round(y, 2), round(room - gap, 2), round(tall, 2))
                )
    ticks = tuple((round(base - line * step * scale, 2), f"{line * step:g}") for line in range(round(top_h / step) + 1))
    every = max(1, math.ceil(40 * len(days) / (width - left)))
    labels = tuple(
        (round(left + (number + 0.5) * room - gap / 2, 2), day.name[5:])
        for number, day in enumerate(days)
        if number % every == 0
    )
    return Chart(width, height, left, base, tuple(blocks), ticks, labels)


def tick_step(most: float) -> float:
    """The distance of the lines across a chart that reaches up to ``most``: three to five of them.

    >>> tick_step(100.0), tick_step(7.0), tick_step(0.0)
    (50.0, 2.0, 1.0)
    """
    if not most > 0:
        return 1.0
    rough = most / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * factor for factor in (1.0, 2.0, 5.0, 10.0) if unit * factor >= rough - 1e-12)


# ---- as a file -------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "gpu_hours", "share", "computing_hours", "idle_hours", "energy_kwh", "mean_memory_mb", "peak_memory_mb", "uses",
    "running", "reported_only_hours",
)  # fmt: skip


def csv_of(view: UsageView, by: str) -> str:
    """The table as CSV, with a heading. Texts that a spreadsheet would compute are quoted by an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow((by, *_COLUMNS))
    for line in view.tables.get(by, ()):
        total = line.total
        writer.writerow(
            (
                f"'{line.key}" if line.key[:1] in ("=", "+", "-", "@", "\t", "\r") else line.key,
                *(_rounded(value) for value in (line.held_h, line.share, line.computing_h, line.idle_h, line.kwh)),
                _rounded(total.mean_mb, 0),
                "" if total.peak_mb is None else total.peak_mb,
                total.uses,
                total.going_on,
                _rounded(total.reported_only_s / _HOUR_S),
            )
        )
    return out.getvalue()


def _rounded(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def file_name(span: Span, by: str) -> str:
    """The name of the file for downloads: of letters, digits and hyphens."""
    return f"gpuherd-usage-{span.month or time.strftime('%Y-%m-%d', time.localtime(span.until))}-by-{by}.csv"
