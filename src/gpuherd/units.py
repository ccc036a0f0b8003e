"""Parsers of numbers, sizes and times as people write them (``2``, ``20GB``, ``1h30m``), and bytes in words. Imports
nothing of gpuherd.

Every parser raises ValueError with a sentence. A megabyte is 2^20 bytes and a gigabyte 2^10 of those, with or without
the i (``20GB`` = ``20GiB``), as GPU tools print them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

# Compiled when first used (``re`` keeps them): every command loads this module.
_SIZE = r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kmgt])i?b?)?"
_MB = {"k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0**2}
_PART = r"(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s|m|h|d|w)"
_CLOCK = r"(?:(\d{1,4})-)?(\d{1,6}):([0-5]\d)(?::([0-5]\d))?"
_ANY_CASE = re.IGNORECASE | re.ASCII
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def positive_int(word: str) -> int:
    """A whole number above 0."""
    if not word.isascii() or not word.isdigit() or int(word) == 0:
        raise ValueError(f"{word!r} is not a whole number above 0")
    return int(word)


def count(word: str) -> int:
    """A whole number, 0 or more."""
    if not word.isascii() or not word.isdigit():
        raise ValueError(f"{word!r} is not a whole number of 0 or more")
    return int(word)


def whole_number(word: str) -> int:
    """A whole number of up to nine digits, negative ones too."""
    if not re.fullmatch(r"[+-]?\d{1,9}", word, re.ASCII):
        raise ValueError(f"{word!r} is not a whole number")
    return int(word)


def amount(word: str) -> float:
    """A finite number of 0 or more."""
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{word!r} is not a number of 0 or more")
    return value


def seconds(word: str) -> float:
    """A number of seconds, 0 or more."""
    value = float(word)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{word!r} is not a number of seconds")
    return value


def size_mb(word: str) -> int:
    """A size in MB (2^20 bytes), rounded up. A number without a unit is one of MB.

    >>> size_mb("20GB"), size_mb("1.5GiB"), size_mb("800"), size_mb("1k")
    (20480, 1536, 800, 1)
    """
    found = re.fullmatch(_SIZE, word.strip(), _ANY_CASE)
    value = float(found[1]) * _MB[(found[2] or "m").lower()] if found else 0.0
    if value <= 0:
        raise ValueError(f"{word!r} is not a size; write 20GB, 1.5GB or 800MB")
    return -int(-value // 1)


def size_or_none_mb(word: str) -> int:
    """A size as ``size_mb`` reads it, or 0 for a limit that is switched off.

    >>> size_or_none_mb("2GB"), size_or_none_mb("0"), size_or_none_mb("0MB")
    (2048, 0, 0)
    """
    return 0 if re.fullmatch(r"0+(?:\.0+)?\s*(?:[kmgt]i?b?)?", word.strip(), _ANY_CASE) else size_mb(word)


def duration_s(word: str) -> float:
    """A length of time in seconds, above 0. A number without a unit is one of seconds; SLURM's forms are known too.

    >>> duration_s("2h"), duration_s("1h30m"), duration_s("90"), duration_s("500ms"), duration_s("1-12:00:00")
    (7200.0, 5400.0, 90.0, 0.5, 129600.0)
    """
    text = word.strip()
    clock = re.fullmatch(_CLOCK, text, re.ASCII)
    if clock and (clock[4] or clock[1] is None):
        days, first, second, third = (int(part or 0) for part in clock.groups())
        # SLURM: "90:00" is minutes and seconds, "1:30:00" hours, minutes, seconds.
        value = float(days * 86400 + first * 3600 + second * 60 + third if clock[4] else first * 60 + second)
    elif re.fullmatch(rf"(?:{_PART}\s*)+", text, _ANY_CASE):
        value = sum(float(number) * _SECONDS[unit.lower()] for number, unit in re.findall(_PART, text, _ANY_CASE))
    elif re.fullmatch(r"\d{1,12}(?:\.\d{1,9})?", text, re.ASCII):
        value = float(text)
    else:
        value = 0.0
    if value <= 0:
        raise ValueError(f"{word!r} is not a length of time; write 90s, 30m, 2h or 1h30m")
    return value


_WEEK = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MOMENT = (
    r"(?:(?P<date>\d{4}-\d{1,2}-\d{1,2})|(?P<day>[a-z]{3,9}))?(?:(?:^|[ t]|\s+at\s+)"
    r"(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d))?)?"
)
_MOMENTS = 'write "fri 18:00", "tomorrow 9:00", "2026-12-01 09:00", "18:00", "in 2h" or "now"'


def moment(word: str, now: float) -> float:
    """A time as people write it, in seconds since 1970: local time, with its daylight saving.

    A day of the week, or a time of day alone, is the next one after ``now``; a day without a time begins at midnight.
    A time that comes twice, when the clocks are set back, is the first. Raises ValueError for one that is skipped when
    they are set forward.

    >>> moment("in 2h", 1000.0), moment("now", 1000.0)
    (8200.0, 1000.0)
    """
    from datetime import datetime, timedelta  # slow to import

    text = " ".join(word.lower().split())
    if text == "now":
        return now
    if text.startswith("in "):
        return now + duration_s(text.removeprefix("in "))
    found = re.fullmatch(_MOMENT, text, re.ASCII) if text else None
    day = found["day"] if found else None
    if found is None or (day and day not in ("today", "tomorrow") and not _is_day(day)):
        raise ValueError(f"{word!r} is no time; {_MOMENTS}")
    today = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)
    try:
        at = datetime.strptime(found["date"], "%Y-%m-%d") if found["date"] else today
        hour, minute, second = (int(found[unit] or 0) for unit in ("hour", "minute", "second"))
        at = at.replace(hour=hour, minute=minute, second=second)
        if day == "tomorrow":
            at += timedelta(days=1)
        elif day and day != "today":
            at += timedelta(days=(_WEEK.index(day[:3]) - at.weekday()) % 7)
            at += timedelta(days=7 if _stamp(at, word) <= now else 0)
        elif found["date"] is None and day is None:
            at += timedelta(days=1 if _stamp(at, word) <= now else 0)
        return _stamp(at, word)
    except (ValueError, OverflowError, OSError) as problem:
        reason = str(problem) if "daylight" in str(problem) else f"{word!r} is no time; {_MOMENTS}"
        raise ValueError(reason) from None


def _is_day(word: str) -> bool:
    names = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
    return any(name.startswith(word) for name in names)


def _stamp(local: datetime, word: str) -> float:
    at = local.timestamp()
    if local.fromtimestamp(at) != local:
        raise ValueError(f"{word!r} is skipped: the clocks are set forward then for daylight saving; name another time")
    return at


def duration(seconds: float, *, parts: int = 2) -> str:
    """A length of time for people, in at most two units; with ``parts=1`` in one, cut off to whole ones.

    >>> duration(4.4), duration(75), duration(5400), duration(200_000)
    ('4 s', '1 min 15 s', '1 h 30 min', '2 d 7 h')
    >>> duration(75, parts=1), duration(119), duration(7300, parts=1)
    ('75 s', '1 min 59 s', '2 h')
    """
    whole = round(seconds)
    if parts == 1:
        for unit, size in (("h", 3600), ("min", 60)):
            if whole >= 2 * size:
                return f"{whole // size} {unit}"
        return f"{whole} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def gpu_range(word: str) -> tuple[int, int]:
    """How many GPUs: ``2``, or ``1-4`` for one that may become up to four.

    >>> gpu_range("2"), gpu_range("1-4"), gpu_range("0")
    ((2, 2), (1, 4), (0, 0))
    """
    found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", word.strip(), re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if most < least or (found is not None and found[2] is not None and least == 0):
        raise ValueError(f"{word!r} is no number of GPUs; write 2, or 1-4 for more after running out of memory")
    return least, most


def gpu_names(word: str) -> str:
    """One GPU id (an index, 3:1 for a MIG instance, or a UUID) or several joined by commas; only the form is checked.

    >>> gpu_names("0, 3:1")
    '0,3:1'
    """
    names = word.split(",")
    if not all(name.strip() for name in names):
        raise ValueError(f"{word!r} is no list of GPU ids; write 0,1,2 or 0 1 2")
    return ",".join(name.strip() for name in names)


def gib(size: int) -> str:
    """Bytes in GiB with one decimal; in MiB where that would be 0.0.

    >>> gib(141_107_412_992), gib(3 << 20), gib(-(3 << 29))
    ('131.4 GiB', '3 MiB', '-1.5 GiB')
    """
    return f"{size / (1 << 30):.1f} GiB" if abs(size) >= (1 << 30) // 10 else f"{size / (1 << 20):.0f} MiB"


def counted(number: int, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "job"), counted(3, "job")
    ('1 job', '3 jobs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
