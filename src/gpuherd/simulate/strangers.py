"""Other people on the simulated GPUs, who don't use gpuherd: when each would use which GPU.

On every GPU a stranger comes, uses it, goes, and after a while another comes; lengths and pauses are exponential. The
plan is fixed by the seed and does not depend on what we do, so that all variants that are compared meet the same
strangers. Who finds one of our jobs on the GPU goes elsewhere, or, for the share that does not look, starts anyway.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from gpuherd.quantities import duration_s


@dataclass(frozen=True, slots=True)
class Session:
    """A stranger's use of a GPU, in seconds from the start. ``barges``: also when one of our jobs is there."""

    start: float
    end: float
    barges: bool


class Strangers(Protocol):
    """Whoever else uses the GPUs."""

    def sessions(self, seed: int, gpu: str) -> Iterator[Session]:
        """What they would do on the GPU with this UUID, in order of time."""


@dataclass(frozen=True, slots=True)
class Background:
    """Share of time in which strangers would use each GPU, mean length in seconds, share of them that barges in."""

    busy: float
    mean_s: float = 7200.0
    barge: float = 0.0

    def sessions(self, seed: int, gpu: str) -> Iterator[Session]:
        """What strangers would do on this GPU, without end. At second 0 the share is as it will stay."""
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
    """What ``busy=0.3,mean=2h,barge=0.1`` describes. Raises ValueError with a sentence.

    >>> background("busy=0.3,mean=2h")
    Background(busy=0.3, mean_s=7200.0, barge=0.0)
    """
    given: dict[str, str] = {}
    for part in word.split(","):
        name, equals, value = part.partition("=")
        name = name.strip()
        if name not in ("busy", "mean", "barge") or not equals:
            nearest = difflib.get_close_matches(name, ("busy", "mean", "barge"), n=1)
            raise ValueError(
                f"{part!r} says nothing about strangers"
                + (f"; did you mean {nearest[0]}=?" if nearest else "; write busy=0.3,mean=2h,barge=0.1")
            )
        if name in given:
            raise ValueError(f"{word!r} says {name} twice")
        given[name] = value
    if "busy" not in given:
        raise ValueError(f"{word!r} does not say which share of the time they use a GPU; write busy=0.3")
    busy = _share("busy", given["busy"])
    if busy > 0.99:
        raise ValueError(f"busy={given['busy']}: strangers who never leave (above 0.99) let nobody else run")
    return Background(busy, duration_s(given.get("mean", "2h")), _share("barge", given.get("barge", "0")))


def _share(name: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={word} is not a share from 0 to 1")
    return value
