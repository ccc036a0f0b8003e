"""Hours in which gpuherd keeps itself small: ``Mon-Fri 09:00-18:00``, as people write them. Pure.

Times are local, to the minute. A window that ends at or before its start goes on into the next day, and belongs to the
day on which it begins: ``Fri 22:00-06:00`` ends on Saturday morning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_FORM = re.compile(
    r"(?:(?P<days>[A-Za-z]+(?:\s*[-,]\s*[A-Za-z]+)*)\s*)?(?:(?P<from>\d{1,2}:\d\d)\s*-\s*(?P<to>\d{1,2}:\d\d))?",
    re.ASCII,
)
_EXAMPLES = 'write "Mon-Fri 09:00-18:00", "22:00-06:00" or "Sat,Sun"'
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A window: days on which it begins (0 is Monday), minutes after midnight from and to, and how it was written."""

    days: frozenset[int]
    start: int
    end: int
    text: str

    def windows(self, around: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Each window from the day before ``around`` to eight days after it: begin, and end (outside it)."""
        midnight = around.replace(hour=0, minute=0, second=0, microsecond=0)
        length = self.end - self.start if self.end > self.start else self.end + _DAY_MINUTES - self.start
        for day in range(-1, 9):
            date = midnight + timedelta(days=day)
            if date.weekday() in self.days:
                begin = date + timedelta(minutes=self.start)
                yield begin, begin + timedelta(minutes=length)


def parse(word: str) -> QuietHours:
    """Quiet hours from text. Raises ValueError with a sentence.

    >>> hours = parse("Mon-Fri 09:00-18:00")
    >>> sorted(hours.days), hours.start, hours.end
    ([0, 1, 2, 3, 4], 540, 1080)
    """
    text = " ".join(word.split())
    found = _FORM.fullmatch(text)
    if not text or found is None:
        raise ValueError(f"{word!r} is no quiet hours; {_EXAMPLES}")
    days = frozenset(range(7)) if found["days"] is None else _days(found["days"], word)
    start, end = _minutes(found["from"] or "00:00", word), _minutes(found["to"] or "24:00", word)
    if start in (end, _DAY_MINUTES):
        raise ValueError(f"{word!r}: the hours end when they begin; {_EXAMPLES}")
    return QuietHours(days, start, end, text)


def _days(text: str, word: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.split(","):
        ends = [_day(name, word) for name in part.split("-")]
        if len(ends) > 2:
            raise ValueError(f"{word!r}: {part.strip()!r} is no range of days; {_EXAMPLES}")
        first, last = ends[0], ends[-1]
        days |= {(first + step) % 7 for step in range((last - first) % 7 + 1)}
    return frozenset(days)


def _day(name: str, word: str) -> int:
    short = name.strip().lower()
    matches = [number for number, day in enumerate(_DAYS) if len(short) >= 2 and day.startswith(short)]
    if len(matches) != 1:
        raise ValueError(f"{word!r}: {name.strip()!r} is no day of the week; {_EXAMPLES}")
    return matches[0]


def _minutes(clock: str, word: str) -> int:
    hours, minutes = map(int, clock.split(":"))
    total = hours * 60 + minutes
    if minutes > 59 or total > _DAY_MINUTES:
        raise ValueError(f"{word!r}: {clock} is no time of day; {_EXAMPLES}")
    return total


def active(hours: Sequence[QuietHours], local: datetime) -> QuietHours | None:
    """The first of these that is on at this local time (without a time zone), or None."""
    for each in hours:
        if any(begin <= local < end for begin, end in each.windows(local)):
            return each
    return None


def over_at(hours: Sequence[QuietHours], local: datetime) -> datetime | None:
    """When it is quiet no more, where windows may meet; ``local`` itself when it is not quiet, None within a week."""
    at = local
    while at - local < timedelta(days=7):
        ends = [end for each in hours for begin, end in each.windows(at) if begin <= at < end]
        if not ends:
            return at
        at = max(ends)
    return None


def next_change(hours: Sequence[QuietHours], local: datetime) -> datetime | None:
    """The next local time at which any of these begins or ends; None without any."""
    times = (time for each in hours for window in each.windows(local) for time in window)
    return min((time for time in times if time > local), default=None)
