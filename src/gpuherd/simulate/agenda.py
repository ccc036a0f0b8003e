"""What happens when in virtual time: events in order of their second, then of their entry."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """Events to come. ``now``: the second of the last that happened.

    >>> agenda = Agenda()
    >>> agenda.at(2.0, print, "two")
    >>> agenda.at(1.0, print, "one")
    >>> agenda.step()
    one
    >>> agenda.now
    1.0
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._counter = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def at(self, time: float, happen: Callable[..., None], *details: Any) -> None:
        """This happens then."""
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, happen, details))

    def wake(self, time: float | None) -> None:
        """Something may come out otherwise at this time, if it is one."""
        if time is not None:
            self.at(time, _nothing)

    def step(self) -> None:
        """All that happens in the next second in which anything does. Raises IndexError when nothing is to come."""
        self.now = self._events[0][0]
        while self._events and self._events[0][0] <= self.now:
            _, _, happen, details = heapq.heappop(self._events)
            happen(*details)


def _nothing() -> None:
    """An event that is there for the decision after it."""
