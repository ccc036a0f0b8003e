"""What the usage page shows: the sums of ``gpuherd usage`` for 30 days or a month, and how they lie by day. Pure, but
for ``read_usage``.

Hours are GPU-hours. A figure that was never measured is None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

from gpuherd.gpus.lease_files import user_name
from gpuherd.ledger.figures import Figures
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.records import Recorded
from gpuherd.ledger.usage import Row, Total, Usage, usage
from gpuherd.web.machine_data import DayUse, by_day

# What the table can be sorted into, with the heading of its first column.
BY: Mapping[str, str] = {"user": "User", "project": "Project", "gpu": "GPU", "command": "Command"}
DAYS = 30
_DAY_S = 86_400.0
_HOUR_S = 3600.0
# Months that can be chosen; older ones by ``gpuherd usage``.
_MONTHS = 24
_MOST_ROWS = 200


@dataclass(frozen=True, slots=True)
class Span:
    """A time in wall-clock seconds: a calendar month (``2026-11``, local), or for month ``""`` the last 30 days."""

    month: str
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table. ``own_h``: the GPU-hours in it that are the reader's; ``is_reported``: some are known by
    third persons only."""

    key: str
    figures: Figures
    share: float
    own_h: float = 0.0
    is_reported: bool = False


@dataclass(frozen=True, slots=True)
class UsageView:
    """The page.

    Attributes:
        sums: by the keys of ``BY``, as ``gpuherd usage`` has them.
        tables: likewise the rows, the largest first; of very many only the first.
        all: the sum of all uses.
        days: every day of the span, in order, for the chart.
        shared: all users' usage is known; else only what this user's gpuherds have recorded.
        skipped: lines of the ledger that were no records.
    """

    span: Span
    sums: Mapping[str, Usage] = field(default_factory=dict)
    tables: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    all: Line = Line("", Figures.of(Total()), 1.0)
    days: tuple[DayUse, ...] = ()
    shared: bool = False
    skipped: int = 0


def span_of(month: str, now: float) -> Span:
    """The span of a month that was asked for; for ``""`` the last 30 days. Raises ValueError for what is
    none of ``months``."""
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
    sums = {by: summed(records, by) for by in BY}
    tables, own = {}, dict[str, float]()
    for by, of_all in sums.items():
        own = {row.key: row.total.held_s / _HOUR_S for row in summed(mine, by).rows}
        tables[by] = tuple(_line(row, own) for row in of_all.rows[:_MOST_ROWS])
    of_days = by_day((record.use for record in records), span.since, span.until)
    whole = Line("", Figures.of(sums["user"].total), 1.0, sum(own.values()))
    return UsageView(span, sums, tables, whole, of_days, shared, skipped)


def _line(row: Row, own: Mapping[str, float]) -> Line:
    figures = Figures.of(row.total)
    return Line(row.key, figures, row.share, own.get(row.key, 0.0), row.total.reported_only_s > 0)


def file_name(span: Span, by: str) -> str:
    """The name of the file for downloads: of letters, digits and hyphens."""
    return f"gpuherd-usage-{span.month or time.strftime('%Y-%m-%d', time.localtime(span.until))}-by-{by}.csv"
