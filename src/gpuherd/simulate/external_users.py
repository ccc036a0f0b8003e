"""Other people on the simulated GPUs, who don't use gpuherd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from gpuherd.options import did_you_mean
from gpuherd.simulate.results import Visit
from gpuherd.simulate.state import Agenda, Floor, Slot
from gpuherd.units import duration_s

# Other people on the simulated GPUs, who don't use gpuherd: when each would use which GPU.
#
# On every GPU a stranger comes, uses it, goes, and after a while another comes; lengths and pauses are exponential.
# The plan is fixed by the seed and does not depend on what we do, so that all variants that are compared meet the
# same strangers. Who finds one of our jobs on the GPU goes elsewhere, or, for the share that does not look, starts
# anyway.


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
            known, otherwise = ("busy", "mean", "barge"), "write busy=0.3,mean=2h,barge=0.1"
            hint = did_you_mean(name, known, otherwise, show="{}=".format)
            raise ValueError(f"{part!r} says nothing about strangers{hint}")
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


# Strangers on the floor of a simulation: who is on which GPU now, and who was.
#
# When each would come and go is ``strangers``'; what our jobs do about it is the simulation's.


class Visitors:
    """Lets strangers come and go.

    Args:
        come: called when one has come to a GPU.
        gone: called when one has left it.
    """

    def __init__(self, agenda: Agenda, floor: Floor, come: Callable[[Slot], None], gone: Callable[[Slot], None]):
        self._agenda = agenda
        self._floor = floor
        self._come = come
        self._gone = gone
        self._visits: list[Visit] = []
        self._since: dict[int, float] = {}
        self._plans: list[Iterator[Session]] = []

    def begin(self, strangers: Strangers, seed: int) -> None:
        """Plans the first visit to every GPU."""
        for slot in self._floor.slots:
            self._plans.append(strangers.sessions(seed, slot.gpu.uuid))
            self._plan_next(slot)

    def are_on(self, slot: Slot) -> bool:
        """Whether one is on this GPU now."""
        return slot.number in self._since

    def visits(self) -> tuple[Visit, ...]:
        """Every visit so far; one that goes on ends now."""
        now = self._agenda.now
        return (*self._visits, *(Visit(number, begun, now) for number, begun in self._since.items()))

    def _plan_next(self, slot: Slot) -> None:
        session = next(self._plans[slot.number], None)
        if session is not None:
            self._agenda.at(session.start, self._comes, slot, session)

    def _comes(self, slot: Slot, session: Session) -> None:
        if slot.attempts and not session.barges:
            self._plan_next(slot)
            return
        self._since[slot.number] = self._agenda.now
        self._floor.come(slot)
        self._agenda.at(session.end, self._goes, slot)
        self._come(slot)

    def _goes(self, slot: Slot) -> None:
        now = self._agenda.now
        self._visits.append(Visit(slot.number, self._since.pop(slot.number), now))
        self._agenda.wake(self._floor.go(slot, now))
        self._gone(slot)
        self._plan_next(slot)
