"""Sums of uses: by user, project, GPU, command or day. Pure.

Hours are GPU-hours: a GPU held for an hour is one, by however many. Memory is in MB (2^20 bytes), energy in joules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpuherd.ledger.records import Recorded, Use

BY = ("user", "project", "gpu", "command", "day")


@dataclass(slots=True)
class Total:
    """What some uses come to.

    Attributes:
        held_s: GPU-seconds held; of these ``measured_s`` with known utilisation, ``computing_s`` spent computing.
        energy_j: joules, as far as measured; None where nothing was.
        memory_mb_s, memory_s: memory in use times seconds, and of how many seconds; ``peak_mb`` the most at once.
        uses: how many; ``going_on`` of them go on now.
        reported_only: GPU-seconds that only third persons report.
    """

    held_s: float = 0.0
    measured_s: float = 0.0
    computing_s: float = 0.0
    energy_j: float | None = None
    memory_mb_s: float = 0.0
    memory_s: float = 0.0
    peak_mb: int | None = None
    uses: int = 0
    going_on: int = 0
    reported_only_s: float = 0.0

    def add(self, use: Use, *, is_open: bool, is_believed: bool) -> None:
        """One more use."""
        self.held_s += use.held_s
        if use.computing_s is not None:
            self.measured_s += use.held_s
            self.computing_s += use.computing_s
        if use.energy_j is not None:
            self.energy_j = (self.energy_j or 0.0) + use.energy_j
        if use.memory_mb_s is not None:
            self.memory_mb_s += use.memory_mb_s
            self.memory_s += use.span_s
        if use.peak_mb is not None:
            self.peak_mb = max(self.peak_mb or 0, use.peak_mb)
        self.uses += 1
        self.going_on += is_open
        if not is_believed:
            self.reported_only_s += use.held_s

    @property
    def computing(self) -> float | None:
        """The share of the held time in which the GPU computed, 0 to 1; None where that was not measured."""
        return min(1.0, self.computing_s / self.measured_s) if self.measured_s > 0 else None

    @property
    def mean_mb(self) -> float | None:
        """Memory in use on average; None where it was not measured."""
        return self.memory_mb_s / self.memory_s if self.memory_s > 0 else None


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: the key in words, the sums, and the share of all GPU-seconds, 0 to 1."""

    key: str
    total: Total
    share: float


@dataclass(frozen=True, slots=True)
class Usage:
    """The rows, the largest first (days in order), and the sum of all."""

    rows: tuple[Row, ...]
    total: Total


def usage(
    records: Iterable[Recorded],
    by: str,
    since: float,
    until: float,
    *,
    reader_uid: int,
    user_name: Callable[[int], str] = str,
) -> Usage:
    """Sums the parts of these uses between two wall-clock seconds. ``records``: each moment of a use once
    (``reader.believed``)."""
    totals: dict[str, Total] = {}
    whole = Total()
    for record in records:
        for key, use in _keyed(record.use, by, since, until, user_name):
            is_believed = record.is_believed_by(reader_uid)
            is_open = record.is_open and use.until == record.use.until
            for total in (totals.setdefault(key, Total()), whole):
                total.add(use, is_open=is_open, is_believed=is_believed)
    all_s = whole.held_s or 1.0
    rows = [Row(key, total, total.held_s / all_s) for key, total in totals.items()]
    rows.sort(key=lambda row: row.key if by == "day" else (-row.total.held_s, row.key))
    return Usage(tuple(rows), whole)


def _keyed(use: Use, by: str, since: float, until: float, user_name: Callable[[int], str]) -> Iterator[tuple[str, Use]]:
    part = use.within(since, until)
    if part is None:
        return
    if by == "day":
        for first, last in days(part.since, part.until):
            if (of_day := part.within(first, last)) is not None:
                yield datetime.fromtimestamp(first).strftime("%Y-%m-%d"), of_day
        return
    words = {
        "user": lambda: user_name(use.uid),
        "project": lambda: use.project or "(none)",
        "gpu": lambda: f"{use.label} {use.gpu}",
        "command": lambda: use.command or use.job or "(unknown)",
    }
    yield words[by](), part


def days(since: float, until: float) -> Iterator[tuple[float, float]]:
    """The local days that a time touches, each from its midnight to the next."""
    day = datetime.fromtimestamp(since).replace(hour=0, minute=0, second=0, microsecond=0)
    while True:
        # By the calendar: a day may have 23 or 25 hours.
        following = (day + timedelta(days=1, hours=6)).replace(hour=0)
        yield day.timestamp(), following.timestamp()
        if following.timestamp() >= until:
            return
        day = following
