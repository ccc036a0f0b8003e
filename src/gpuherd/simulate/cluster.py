"""What surrounds the jobs of a simulation, from words: machines (``8x80GB``), external users, the start time. Pure.

A simulated GPU is the same plain data as a real one. All links between the GPUs of one machine are alike, as behind an
NVSwitch; MIG instances are not simulated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Protocol

from gpuherd.gpus.state import Gpu
from gpuherd.options import did_you_mean
from gpuherd.simulate.options import number
from gpuherd.units import duration_s, size_mb

MOST_GPUS = 100_000
MONDAY = datetime(2024, 1, 1)

_GROUP = re.compile(r"(?:(\d{1,9})x)?(?:(\d{1,9})x)?(\d{1,9}(?:\.\d{1,3})?[gmt]i?b)", re.ASCII | re.IGNORECASE)
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME_OF_WEEK = re.compile(r"([A-Za-z]{3,9})(?:\s+(\d{1,2}):(\d\d))?", re.ASCII)
_BACKGROUND = ("busy", "mean", "barge")

Machine = tuple[Gpu, ...]


def machine(word: str) -> tuple[Machine, ...]:
    """One machine: ``8x80GB``, or ``4x24GB+2x80GB`` for GPUs of several kinds. Raises ValueError with a sentence.

    >>> [[gpu.total_mb for gpu in each] for each in machine("24GB+2x80GB")]
    [[24576, 81920, 81920]]
    """
    groups = [_group(part, word) for part in word.split("+")]
    if any(found[2] is not None for found in groups):
        raise ValueError(f"{word!r} is more than one machine; write --machines for those")
    return _build([[mb for gpus, mb, _ in groups for _ in range(gpus)]], word)


def machines(word: str) -> tuple[Machine, ...]:
    """Machines of one or several kinds: ``125x8x80GB``, ``2x8x80GB,4x4x24GB``. Raises ValueError with a sentence.

    >>> [len(each) for each in machines("2x8x80GB,4x24GB")]
    [8, 8, 4]
    """
    sizes: list[list[int]] = []
    for part in word.split(","):
        gpus, mb, count = _group(part, word)
        sizes += [[mb] * gpus] * (1 if count is None else count)
    return _build(sizes, word)


def _group(part: str, word: str) -> tuple[int, int, int | None]:
    """GPUs of a machine, MB of each, and the number of such machines (None when the word does not give it)."""
    found = _GROUP.fullmatch(part.strip())
    if found is None:
        raise ValueError(f"{word!r} describes no machine; write 8x80GB, 4x24GB+2x80GB, or --machines 125x8x80GB")
    first, second, size = found.groups()
    gpus = int(second or first or 1)
    count = int(first) if second is not None else None
    if gpus * (1 if count is None else count) > MOST_GPUS:
        raise ValueError(f"{word!r}: at most {MOST_GPUS} GPUs can be simulated")
    return gpus, size_mb(size), count


def _build(sizes: list[list[int]], word: str) -> tuple[Machine, ...]:
    total = sum(len(each) for each in sizes)
    if not 1 <= total <= MOST_GPUS or not all(sizes):
        raise ValueError(f"{word!r} has {total} GPUs; 1 to {MOST_GPUS} can be simulated")
    return tuple(
        tuple(
            Gpu(
                index=index,
                uuid=f"GPU-simulated-{node}-{index}",
                name=f"Simulated {mb / 1024:g}GB GPU",
                total_mb=mb,
                used_mb=0,
                free_mb=mb,
            )
            for index, mb in enumerate(each)
        )
        for node, each in enumerate(sizes)
    )


def start_time(word: str) -> datetime:
    """A day of the week, and a time of day if not midnight: ``Mon 08:30``, ``fri``. Raises ValueError with a sentence.

    >>> start_time("Tue 08:30") - MONDAY
    datetime.timedelta(days=1, seconds=30600)
    """
    found = _TIME_OF_WEEK.fullmatch(word.strip())
    day = found[1].lower()[:3] if found else ""
    hour, minute = (int(found[2] or 0), int(found[3] or 0)) if found else (0, 0)
    if day not in _DAYS or hour > 23 or minute > 59:
        raise ValueError(f'{word!r} is no time of the week; write "Mon 08:30"')
    return MONDAY + timedelta(days=_DAYS.index(day), hours=hour, minutes=minute)


# External users: people on the GPUs who don't use gpuherd. Their sessions are fixed by the seed and do not depend on
# our jobs, so that all variants that are compared meet the same ones. A session that finds one of our jobs on its GPU
# does not take place, unless it belongs to the share that starts without looking.


@dataclass(frozen=True, slots=True)
class Session:
    """An external user's use of a GPU, in seconds from the start. ``barges``: it starts also on a GPU in use."""

    start: float
    end: float
    barges: bool


class ExternalUsers(Protocol):
    """All external users of the GPUs."""

    def sessions(self, seed: int, gpu: str) -> Iterator[Session]:
        """Their sessions on the GPU with this UUID, in order of time."""


@dataclass(frozen=True, slots=True)
class Background:
    """External users with exponential lengths of sessions and pauses: share of time in which they would use each GPU,
    mean length of a session in seconds, share of sessions that barge in."""

    busy: float
    mean_s: float = 7200.0
    barge: float = 0.0

    def sessions(self, seed: int, gpu: str) -> Iterator[Session]:
        """Endless sessions on this GPU. The share of time in use is the same from second 0 on."""
        if self.busy == 0:
            return
        chance = Random(f"{seed}/{gpu}")  # noqa: S311 - a simulation, no secret
        pause_s = self.mean_s * (1 - self.busy) / self.busy
        # Exponential times have no memory, so a session that has begun before second 0 is as long as any.
        start = 0.0 if chance.random() < self.busy else chance.expovariate(1 / pause_s)
        while True:
            end = start + chance.expovariate(1 / self.mean_s)
            yield Session(start, end, chance.random() < self.barge)
            start = end + chance.expovariate(1 / pause_s)


def background(word: str) -> Background:
    """External users from ``busy=0.3,mean=2h,barge=0.1``. Raises ValueError with a sentence.

    >>> background("busy=0.3,mean=2h")
    Background(busy=0.3, mean_s=7200.0, barge=0.0)
    """
    given: dict[str, str] = {}
    for part in word.split(","):
        name, equals, value = part.partition("=")
        name = name.strip()
        if name not in _BACKGROUND or not equals:
            hint = did_you_mean(name, _BACKGROUND, "write busy=0.3,mean=2h,barge=0.1", show="{}=".format)
            raise ValueError(f"{part!r} is no setting of external users{hint}")
        if name in given:
            raise ValueError(f"{word!r} gives {name} twice")
        given[name] = value
    if "busy" not in given:
        raise ValueError(f"{word!r} lacks the share of time in which they use a GPU; write busy=0.3")
    busy = _share("busy", given["busy"])
    if busy > 0.99:
        raise ValueError(f"busy={given['busy']}: above 0.99 external users leave no time for jobs")
    return Background(busy, duration_s(given.get("mean", "2h")), _share("barge", given.get("barge", "0")))


def _share(name: str, word: str) -> float:
    return number(word, lambda value: 0 <= value <= 1, f"{name}={word} is not a share from 0 to 1")
