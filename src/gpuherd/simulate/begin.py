"""The time of the week at which a simulation begins: ``Mon 08:30``, ``fri``. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

MONDAY = datetime(2024, 1, 1)

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FORM = re.compile(r"([A-Za-z]{3,9})(?:\s+(\d{1,2}):(\d\d))?", re.ASCII)


def begin(word: str) -> datetime:
    """A day of the week, and a time of day if not midnight. Raises ValueError with a sentence.

    >>> begin("Tue 08:30") - MONDAY
    datetime.timedelta(days=1, seconds=30600)
    """
    found = _FORM.fullmatch(word.strip())
    day = found[1].lower()[:3] if found else ""
    hour, minute = (int(found[2] or 0), int(found[3] or 0)) if found else (0, 0)
    if day not in _DAYS or hour > 23 or minute > 59:
        raise ValueError(f'{word!r} is no time of the week; write "Mon 08:30"')
    return MONDAY + timedelta(days=_DAYS.index(day), hours=hour, minutes=minute)
