"""External users in a simulation: people who use the GPUs without gpuherd, and how dispatchers notice them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from gpuherd.jobs.gpu.usage import PRESENCE_S
from gpuherd.simulate.devices import SimulatedGpu, SimulatedGpus
from gpuherd.simulate.results import Visit
from gpuherd.simulate.state import EventQueue
from gpuherd.simulate.workload import ExternalUsers, Session


class Dispatcher(Protocol):
    """A dispatcher on whose GPUs they come.

    Attributes:
        gpus: the GPUs as it sees them.
        gives_way: it pauses or requeues its jobs for external users.
    """

    gpus: SimulatedGpus
    gives_way: bool

    def give_way(self, gpu: SimulatedGpu) -> None:
        """An external user has been noticed on the GPU."""

    def resume_on(self, gpu: SimulatedGpu) -> None:
        """The external user has left the GPU."""


class ExternalUse:
    """The sessions of external users on all GPUs, which all dispatchers of the machine notice.

    A session that finds a job on its GPU does not take place, unless it is one that starts without looking.
    """

    def __init__(self, users: ExternalUsers, seed: int, events: EventQueue, dispatchers: Sequence[Dispatcher]):
        self._events = events
        self._dispatchers = dispatchers
        self._left: list[Visit] = []
        self._since: dict[int, float] = {}
        # The sessions to come on each GPU.
        self._sessions: list[Iterator[Session]] = []
        for gpu in dispatchers[0].gpus.all:
            self._sessions.append(users.sessions(seed, gpu.gpu.uuid))
            self._plan(gpu.number)

    def visits(self) -> tuple[Visit, ...]:
        """Every visit so far; one that lasts ends now."""
        lasting = sorted((since, number) for number, since in self._since.items())
        return (*self._left, *(Visit(number, since, self._events.now) for since, number in lasting))

    def _plan(self, number: int) -> None:
        session = next(self._sessions[number], None)
        if session is not None:
            self._events.at(session.start, self._begin, number, session)

    def _begin(self, number: int, session: Session) -> None:
        now = self._events.now
        occupied = [each for each in self._dispatchers if each.gpus.all[number].attempts]
        if occupied and not session.barges:
            self._plan(number)
            return
        self._since[number] = now
        for each in self._dispatchers:
            each.gpus.add_external(each.gpus.all[number])
        self._events.at(session.end, self._end, number)
        for each in occupied:
            if each.gives_way:
                self._events.at(now + PRESENCE_S, each.give_way, each.gpus.all[number])

    def _end(self, number: int) -> None:
        self._left.append(Visit(number, self._since.pop(number), self._events.now))
        for each in self._dispatchers:
            each.gpus.remove_external(each.gpus.all[number])
        for each in self._dispatchers:
            each.resume_on(each.gpus.all[number])
        self._plan(number)
