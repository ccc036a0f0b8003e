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
from gpuherd.jobs.reporter import Reporter

# One question at a time, asked by a thread of its own: an answer that takes long keeps nobody waiting.

_Answer = TypeVar("_Answer")


class BackgroundQuery(Generic[_Answer]):
    """Asks. ``fileno`` is readable when an answer has come, so that an event loop wakes."""

    def __init__(self) -> None:
        self._bell: int | None = None
        self._open = threading.Lock()
        self._closed = False
        self._future: Future[_Answer] | None = None

    @property
    def busy(self) -> bool:
        """Whether a question is under way, or its answer not fetched yet."""
        return self._future is not None

    @property
    def has_answer(self) -> bool:
        """Whether its answer is there to be fetched."""
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
        """Asks this. Raises ValueError while another question is under way."""
        if self._future is not None:
            raise ValueError("one question at a time")
        self.fileno()  # made here: the thread only writes to it
        self._future = future = Future[_Answer]()
        # It ends with the process, whatever it waits for.
        threading.Thread(target=self._ask, args=(ask, future), name="gpuherd-aside", daemon=True).start()

    def fetch(self) -> Future[_Answer] | None:
        """The answer, or what was raised in its place; None while none has come. Each is fetched once."""
        future = self._future
        if future is None or not future.done():
            return None
        self._future = None
        return future

    def close(self) -> None:
        """Hears of nothing any more. What was asked is not waited for."""
        with self._open:
            self._closed = True
            bell, self._bell = self._bell, None
        if bell is not None:
            os.close(bell)

    def _ask(self, ask: Callable[[], _Answer], future: Future[_Answer]) -> None:
        try:
            future.set_result(ask())
        except BaseException as problem:  # raised again where it is fetched
            future.set_exception(problem)
        with self._open:
            if not self._closed:
                os.eventfd_write(self.fileno(), 1)


# Questions to the engine, and what is to be ended there: now and then, one for all, and again when it was away.
#
# How all stand is asked aside: where a controller takes long to answer, the loop goes on hearing what people ask and
# what nodes tell. All else is asked in the loop's own time, since what comes next follows from the answer.

logger = logging.getLogger(__name__)

_LONGEST_S = 60.0
_SOON_S = 1.0


@dataclass(frozen=True, slots=True)
class Told:
    """An answer on how all stand: of these attempts, ``found`` None when it did not answer; asked for at ``asked_at``
    (by ``clock.mono``)."""

    asked: frozenset[int]
    asked_at: float
    found: Mapping[int, Sighting] | None


class EngineQueries:
    """Asks one engine.

    Args:
        title: what people call it.

    Attributes:
        background: the question on how all stand; its descriptor is readable when ``told`` has the answer.
        due_at: when to ask how all stand (by ``clock.mono``).
        away: a sentence while it does not answer, else None.
        never: what it can't ever give, and why, of what it has been asked so far.
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
        """Something is known only to the engine."""
        if self.away is None:
            self.due_at = min(self.due_at, max(now, self._asked_at + min(_SOON_S, self.engine.look_s)))

    def ask(self, tickets: Collection[Ticket], now: float) -> None:
        """Asks how they stand; ``told`` has the answer later. One question at a time."""
        self._asked_at = now
        self.due_at = now + self.engine.look_s
        self._asked = frozenset(ticket.attempt for ticket in tickets)
        self.background.begin(lambda: self.engine.look(tickets))

    def told(self) -> Told | None:
        """The answer to the last question, once; None while there is none."""
        answer = self.background.fetch()
        if answer is None:
            return None
        now = clock.mono()
        found = self._try(answer.result, now)
        if found is not None:
            # Who takes long to answer is left alone for as long. (Not for hours, where it was this machine that slept.)
            self.due_at = max(self.due_at, now + min(now - self._asked_at, _LONGEST_S))
        return Told(self._asked, self._asked_at, found)

    def look(self, tickets: Collection[Ticket], now: float) -> Mapping[int, Sighting] | None:
        """How they stand, at once; None when it does not answer."""
        self._asked_at = now
        self.due_at = now + self.engine.look_s
        return self._try(lambda: self.engine.look(tickets), now)

    def check(self, wanted: Iterable[Placement], now: float) -> bool:
        """Asks for those that it was not asked for yet; False when it does not answer."""
        new = set(wanted) - self._checked
        if not new:
            return True
        found = self._try(lambda: self.engine.check(new), now)
        if found is None:
            return False
        self.note_check(new, found)
        return True

    def note_check(self, wanted: Collection[Placement], never: Mapping[Placement, str]) -> None:
        """The answer is known."""
        self._checked.update(wanted)
        self.never.update(never)

    def cancel(self, handles: Iterable[str]) -> None:
        """Ends them there with the next ``keep_time``: all of a moment by one question, not by one for each."""
        self._unwanted.update(handles)

    def keep_time(self, now: float) -> None:
        """Ends what is still to be ended, unless the engine is away."""
        if not self._unwanted or self.silent(now):
            return
        handles = frozenset(self._unwanted)
        if self._try(lambda: self._end(handles), now):
            self._unwanted -= handles

    def silent(self, now: float) -> bool:
        """Whether it has not answered, and is to be asked nothing now."""
        return self.away is not None and (self.background.busy or now < self.due_at)

    def failed(self, problem: EngineAway, now: float) -> None:
        """It does not answer. That is told once, and it is asked less and less often."""
        self._failures += 1
        wait_s = max(self.engine.look_s, back_off_s(self._failures, _SOON_S, _LONGEST_S))
        self.due_at = now + wait_s
        logger.info("%s does not answer, asking again in %.0f s: %s", self.title, wait_s, problem)
        if self.away is None:
            self.away = f"{self.title} does not answer: {clean(str(problem))}"
            self._reporter.notice(f"{self.away}; what it has goes on, and is asked for again and again")

    def answered(self) -> None:
        """It answers."""
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
