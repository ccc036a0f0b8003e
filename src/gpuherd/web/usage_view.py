"""What the usage page shows: the sums of ``gpuherd usage`` for 30 days or a month, and how they lie by day. Pure, but
for ``read_usage``.

Hours are GPU-hours. A figure that was never measured is None.
"""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

from gpuherd.gpus.lease_files import user_name
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.records import Recorded
from gpuherd.ledger.usage import Row, Total, Usage, days, usage
from gpuherd.web.machine_data import DayUse, by_day

# What the table can be sorted into, with the heading of its first column.
BY: Mapping[str, str] = {"user": "User", "project": "Project", "gpu": "GPU", "command": "Command"}
DAYS = 30
_DAY_S = 86_400.0
_HOUR_S = 3600.0
_KWH_J = 3.6e6
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
        days: every day of the span, in order, for the chart.
        shared: all users' usage is known; else only what this user's gpuherds have recorded.
        skipped: lines of the ledger that were no records.
    """

    span: Span
    tables: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    all: Line = Line("", Total(), 1.0)
    days: tuple[DayUse, ...] = ()
    shared: bool = False
    skipped: int = 0


def span_of(month: str, now: float) -> Span:
    """The span of a month that was asked for; for ``""`` the last 30 days, with today. Raises ValueError for what is
    none of ``months``."""
    if not month:
        return Span("", next(days(now - (DAYS - 1) * _DAY_S, now))[0], now)
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
    of_days = by_day((record.use for record in records), span.since, span.until)
    return UsageView(span, tables, whole, of_days, shared, skipped)


def _line(row: Row, own: Mapping[str, float]) -> Line:
    return Line(row.key, row.total, row.share, own.get(row.key, 0.0))


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
