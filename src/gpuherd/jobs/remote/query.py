"""Queries to the engine: how attempts stand (in a thread of its own), what it can never give, and what it is to end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpuherd.engines.base import Engine, EngineAway, Placement, Sighting, Ticket
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import back_off_s, clean
from gpuherd.jobs.remote import QUERY_LONGEST_S, QUERY_SOON_S
from gpuherd.jobs.reporter import Reporter

# One query at a time, in a thread of its own, so that a slow answer does not block the event loop.

_Answer = TypeVar("_Answer")


class BackgroundQuery(Generic[_Answer]):
    """Runs one query at a time. ``fileno`` is readable when the answer has come, so that an event loop wakes."""

    def __init__(self) -> None:
        self._bell: int | None = None
        self._open = threading.Lock()
        self._closed = False
        self._future: Future[_Answer] | None = None

    @property
    def busy(self) -> bool:
        """Whether a query is running, or its answer not fetched yet."""
        return self._future is not None

    @property
    def has_answer(self) -> bool:
        """Whether the answer can be fetched."""
        return self._future is not None and self._future.done()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        if self._bell is None:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._bell

    def drain(self) -> None:
        """Empties the descriptor."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno())

    def begin(self, ask: Callable[[], _Answer]) -> None:
        """Starts a query. Raises ValueError while another one is running."""
        if self._future is not None:
            raise ValueError("one question at a time")
        self.fileno()  # created here: the thread only writes to it
        self._future = future = Future[_Answer]()
        # A daemon: it ends with the process, whatever it waits for.
        threading.Thread(target=self._ask, args=(ask, future), name="gpuherd-aside", daemon=True).start()

    def fetch(self) -> Future[_Answer] | None:
        """The answer, or what was raised in its place; None while none has come. Each is fetched once."""
        future = self._future
        if future is None or not future.done():
            return None
        self._future = None
        return future

    def close(self) -> None:
        """Closes the descriptor. A running query is not waited for."""
        with self._open:
            self._closed = True
            bell, self._bell = self._bell, None
        if bell is not None:
            os.close(bell)

    def _ask(self, ask: Callable[[], _Answer], future: Future[_Answer]) -> None:
        try:
            future.set_result(ask())
        except BaseException as problem:  # raised again by ``fetch().result()``
            future.set_exception(problem)
        with self._open:
            if not self._closed:
                os.eventfd_write(self.fileno(), 1)


# Queries to the engine and cancellations: from time to time, one for all attempts, and again when it was away.
#
# The state of all attempts is queried in the background: while a controller takes long to answer, the loop goes on
# serving requests and reading reports of nodes. Other queries run in the loop itself, since the next step depends on
# the answer.

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a query of these attempts' state, sent at ``asked_at`` (by ``clock.mono``); ``found`` is None when
    the engine did not answer."""

    asked: frozenset[int]
    asked_at: float
    found: Mapping[int, Sighting] | None


class EngineQueries:
    """Sends queries to one engine.

    Args:
        title: what people call it.

    Attributes:
        background: the query of all attempts' state; its descriptor is readable when ``answer`` has the result.
        due_at: when to query the state of all attempts (by ``clock.mono``).
        away: a sentence while the engine does not answer, else None.
        never: placements that it can never provide, with the reason, among those checked so far.
    """

    def __init__(self, engine: Engine, reporter: Reporter, title: str):
        self.engine = engine
        self.title = title
        self._reporter = reporter
        self._failures = 0
        self._checked: set[Placement] = set()
        self._unwanted: set[str] = set()
        self._asked_at = 0.0
        self._asked: frozenset[int] = frozenset()
        self.background = BackgroundQuery[Mapping[int, Sighting]]()
        self.due_at = 0.0
        self.away: str | None = None
        self.never: dict[Placement, str] = {}

    def soon(self, now: float) -> None:
        """The engine is to be queried soon: only it knows what happened."""
        if self.away is None:
            self.due_at = min(self.due_at, max(now, self._asked_at + min(QUERY_SOON_S, self.engine.look_s)))

    def ask(self, tickets: Collection[Ticket], now: float) -> None:
        """Starts to query their state; ``answer`` returns the result later. One query at a time."""
        self._asked_at = now
        self.due_at = now + self.engine.look_s
        self._asked = frozenset(ticket.attempt for ticket in tickets)
        self.background.begin(lambda: self.engine.look(tickets))

    def answer(self) -> Answer | None:
        """The answer to the last query, once; None while there is none."""
        answer = self.background.fetch()
        if answer is None:
            return None
        now = clock.mono()
        found = self._try(answer.result, now)
        if found is not None:
            # An engine that takes long to answer is queried less often. (Not for hours, in case this machine was
            # asleep.)
            self.due_at = max(self.due_at, now + min(now - self._asked_at, QUERY_LONGEST_S))
        return Answer(self._asked, self._asked_at, found)

    def look(self, tickets: Collection[Ticket], now: float) -> Mapping[int, Sighting] | None:
        """Queries their state and waits for the answer; None when the engine does not answer."""
        self._asked_at = now
        self.due_at = now + self.engine.look_s
        return self._try(lambda: self.engine.look(tickets), now)

    def check(self, wanted: Iterable[Placement], now: float) -> bool:
        """Has the engine check placements that it has not checked yet; False when it does not answer."""
        new = set(wanted) - self._checked
        if not new:
            return True
        found = self._try(lambda: self.engine.check(new), now)
        if found is None:
            return False
        self.note_check(new, found)
        return True

    def note_check(self, wanted: Collection[Placement], never: Mapping[Placement, str]) -> None:
        """Takes note of the engine's answer to a check."""
        self._checked.update(wanted)
        self.never.update(never)

    def cancel(self, handles: Iterable[str]) -> None:
        """Cancels them with the next ``keep_time``: all by one command, not by one each."""
        self._unwanted.update(handles)

    def keep_time(self, now: float) -> None:
        """Cancels what is still to be cancelled, unless the engine is away."""
        if not self._unwanted or self.silent(now):
            return
        handles = frozenset(self._unwanted)
        if self._try(lambda: self._end(handles), now):
            self._unwanted -= handles

    def silent(self, now: float) -> bool:
        """Whether it has not answered and is not to be queried now."""
        return self.away is not None and (self.background.busy or now < self.due_at)

    def failed(self, problem: EngineAway, now: float) -> None:
        """It does not answer. That is reported once, and it is queried less and less often."""
        self._failures += 1
        wait_s = max(self.engine.look_s, back_off_s(self._failures, QUERY_SOON_S, QUERY_LONGEST_S))
        self.due_at = now + wait_s
        logger.info("%s does not answer, asking again in %.0f s: %s", self.title, wait_s, problem)
        if self.away is None:
            self.away = f"{self.title} does not answer: {clean(str(problem))}"
            self._reporter.notice(f"{self.away}; what it has goes on, and is asked for again and again")

    def answered(self) -> None:
        """It has answered."""
        self._failures = 0
        if self.away is not None:
            self.away = None
            self._reporter.notice(f"{self.title} answers again")

    def _end(self, handles: Collection[str]) -> bool:
        self.engine.cancel(handles)
        return True

    def _try(self, ask: Callable[[], _Answer], now: float) -> _Answer | None:
        try:
            answer = ask()
        except EngineAway as problem:
            self.failed(problem, now)
            return None
        self.answered()
        return answer
