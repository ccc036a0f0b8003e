"""Machines to simulate, from words like ``8x80GB``; and the time of the week at which a simulation begins. Pure."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from gpuherd.gpus.state import Gpu
from gpuherd.units import size_mb

# Machines to simulate, from words like ``8x80GB`` and ``125x8x80GB``. Pure.
#
# A simulated GPU is the same plain data as a real one. Known of a machine: its GPUs and their memory. All links
# between the GPUs of one machine are alike, as behind an NVSwitch; MIG instances are not simulated.

MOST_GPUS = 100_000

_GROUP = re.compile(r"(?:(\d{1,9})x)?(?:(\d{1,9})x)?(\d{1,9}(?:\.\d{1,3})?[gmt]i?b)", re.ASCII | re.IGNORECASE)

Machine = tuple[Gpu, ...]


def machine(word: str) -> tuple[Machine, ...]:
    """One machine: ``8x80GB``, or ``4x24GB+2x80GB`` for GPUs of several kinds. Raises ValueError with a sentence.

    >>> [[gpu.total_mb for gpu in each] for each in machine("24GB+2x80GB")]
    [[24576, 81920, 81920]]
    """
    groups = [_group(part, word) for part in word.split("+")]
    if any(found[2] is not None for found in groups):
        raise ValueError(f"{word!r} is more than one machine; write --machines for those")
    sizes = [mb for count, mb, _ in groups for _ in range(count)]
    return _build([sizes], word)


def machines(word: str) -> tuple[Machine, ...]:
    """Machines of one or several kinds: ``125x8x80GB``, ``2x8x80GB,4x4x24GB``. Raises ValueError with a sentence.

    >>> [len(each) for each in machines("2x8x80GB,4x24GB")]
    [8, 8, 4]
    """
    sizes: list[list[int]] = []
    for part in word.split(","):
        count, mb, how_many = _group(part, word)
        sizes += [[mb] * count] * (1 if how_many is None else how_many)
    return _build(sizes, word)


def _group(part: str, word: str) -> tuple[int, int, int | None]:
    """GPUs of a machine, MB of each, and how many such machines (None when that was not said)."""
    found = _GROUP.fullmatch(part.strip())
    if found is None:
        raise ValueError(f"{word!r} describes no machine; write 8x80GB, 4x24GB+2x80GB, or --machines 125x8x80GB")
    first, second, size = found.groups()
    gpus = int(second or first or 1)
    how_many = int(first) if second is not None else None
    if gpus * (1 if how_many is None else how_many) > MOST_GPUS:
        raise ValueError(f"{word!r}: at most {MOST_GPUS} GPUs can be simulated")
    return gpus, size_mb(size), how_many


def _build(sizes: list[list[int]], word: str) -> tuple[Machine, ...]:
    total = sum(len(each) for each in sizes)
    if not 1 <= total <= MOST_GPUS or not all(sizes):
        raise ValueError(f"{word!r} has {total} GPUs; 1 to {MOST_GPUS} can be simulated")
    return tuple(tuple(_gpu(number, index, mb) for index, mb in enumerate(each)) for number, each in enumerate(sizes))


def _gpu(number: int, index: int, mb: int) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-simulated-{number}-{index}",
        name=f"Simulated {mb / 1024:g}GB GPU",
        total_mb=mb,
        used_mb=0,
        free_mb=mb,
    )


# The time of the week at which a simulation begins: ``Mon 08:30``, ``fri``. Pure.

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
