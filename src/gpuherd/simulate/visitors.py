"""Strangers on the floor of a simulation: who is on which GPU now, and who was.

When each would come and go is ``strangers``'; what our jobs do about it is the simulation's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpuherd.simulate.agenda import Agenda
from gpuherd.simulate.attempt import Slot
from gpuherd.simulate.floor import Floor
from gpuherd.simulate.history import Visit
from gpuherd.simulate.strangers import Session, Strangers


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
