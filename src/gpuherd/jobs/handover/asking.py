"""Questions to the engine, and what is to be ended there: now and then, one for all, and again when it was away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from gpuherd.engines.cluster import Engine, EngineAway, Placement, Sighting, Ticket
from gpuherd.jobs.failures import back_off_s, clean
from gpuherd.jobs.reporter import Reporter

logger = logging.getLogger(__name__)

_LONGEST_S = 60.0
_SOON_S = 1.0

_Answer = TypeVar("_Answer")


class Asking:
    """Asks one engine.

    Args:
        title: what people call it.

    Attributes:
        due_at: when to ask how all stand (by ``clock.mono``).
        away: a sentence while it does not answer, else None.
        never: what it can't ever give, and why, of what it has been asked so far.
    """

    def __init__(self, engine: Engine, tell: Reporter, title: str):
        self.engine = engine
        self.title = title
        self._tell = tell
        self._failures = 0
        self._checked: set[Placement] = set()
        self._unwanted: set[str] = set()
        self._asked_at = 0.0
        self.due_at = 0.0
        self.away: str | None = None
        self.never: dict[Placement, str] = {}

    def soon(self, now: float) -> None:
        """Something is known only to the engine."""
        if self.away is None:
            self.due_at = min(self.due_at, max(now, self._asked_at + min(_SOON_S, self.engine.look_s)))

    def look(self, tickets: Collection[Ticket], now: float) -> Mapping[int, Sighting] | None:
        """How they stand; None when it does not answer."""
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
        if not self._unwanted or (self.away is not None and now < self.due_at):
            return
        handles = frozenset(self._unwanted)
        if self._try(lambda: self._end(handles), now):
            self._unwanted -= handles

    def failed(self, problem: EngineAway, now: float) -> None:
        """It does not answer. That is told once, and it is asked less and less often."""
        self._failures += 1
        wait_s = max(self.engine.look_s, back_off_s(self._failures, _SOON_S, _LONGEST_S))
        self.due_at = now + wait_s
        logger.info("%s does not answer, asking again in %.0f s: %s", self.title, wait_s, problem)
        if self.away is None:
            self.away = f"{self.title} does not answer: {clean(str(problem))}"
            self._tell.notice(f"{self.away}; what it has goes on, and is asked for again and again")

    def answered(self) -> None:
        """It answers."""
        self._failures = 0
        if self.away is not None:
            self.away = None
            self._tell.notice(f"{self.title} answers again")

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
