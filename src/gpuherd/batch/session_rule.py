"""When a session (``gpuherd session``) gives its GPUs back. The whole rule, on one page. Pure.

A session ends

* when for ``idle_after_s`` none of its GPUs was used and nothing was typed on its terminal;
* after ``longest_s``, if that is set, whatever it does.

``warn_s`` before that comes a warning, and no session ends without one: however long there was no look (the machine
slept, the watcher was stopped), it has ``warn_s`` from the warning on. Use of the GPUs, or a request to keep it
(``gpuherd session extend``), puts the end off, with a message in a session that was warned.

Times are seconds of ``clock.mono``.

>>> rule, state = SessionRule(idle_after_s=3600.0, warn_s=600.0), SessionState.begun(0.0)
>>> for now in (1000.0, 3000.0, 3599.0, 3600.0):
...     event, state = step(rule, state, now, is_used=False, hole_s=9999.0)
...     print(now, event and event.kind.value)
1000.0 None
3000.0 warn
3599.0 None
3600.0 end
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from gpuherd.gpus.idle_held import HOLE_S


class Ending(StrEnum):
    """Why a session ends: it is not used, or its time is up."""

    IDLE = "idle"
    TIME = "time"


class EventKind(Enum):
    """What to do: warn of the end, say that it was put off, or end the session."""

    WARN = "warn"
    GOES_ON = "goes on"
    END = "end"


@dataclass(frozen=True, slots=True)
class SessionRule:
    """Seconds without use, seconds from the warning to the end, and seconds in all (None: no limit)."""

    idle_after_s: float
    warn_s: float
    longest_s: float | None = None


@dataclass(frozen=True, slots=True)
class SessionState:
    """What the looks so far have found.

    Attributes:
        began, used_at, last: when it began, was last seen to be used, and was last looked at.
        keep_until: it does not end before that.
        warned: of which end it was warned, and when; None while it was not.
    """

    began: float
    used_at: float
    last: float
    keep_until: float = 0.0
    warned: tuple[Ending, float] | None = None

    @staticmethod
    def begun(now: float) -> SessionState:
        """A session that begins now."""
        return SessionState(now, now, now)

    def kept(self, until: float) -> SessionState:
        """The same with a request to keep it until then; one that ends earlier than another changes nothing."""
        return replace(self, keep_until=max(self.keep_until, until))


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """An event of a session: the kind, which end it is about, and in how many seconds that comes (0: now)."""

    kind: EventKind
    ending: Ending
    in_s: float = 0.0


def end_of(rule: SessionRule, state: SessionState) -> tuple[Ending, float]:
    """Which end comes first if the session is not used any more, and when."""
    idle = max(state.used_at + rule.idle_after_s, state.keep_until)
    if rule.longest_s is not None:
        over = max(state.began + rule.longest_s, state.keep_until)
        if over < idle or (over == idle and state.keep_until < over):
            return Ending.TIME, over
    return Ending.IDLE, idle


def step(
    rule: SessionRule, state: SessionState, now: float, *, is_used: bool, hole_s: float = HOLE_S
) -> tuple[SessionEvent | None, SessionState]:
    """One look: what to do, if anything, and the state for the next one.

    Args:
        is_used: the GPUs or the terminal have been used since the last look, or that is unknown.
        hole_s: after a longer time than this without looks the session counts as used.
    """
    used_at = now if is_used or now - state.last > hole_s else state.used_at
    state = replace(state, used_at=used_at, last=now)
    ending, at = end_of(rule, state)
    if now < at - rule.warn_s:
        if state.warned is None:
            return None, state
        return SessionEvent(EventKind.GOES_ON, state.warned[0], at - now), replace(state, warned=None)
    if state.warned is None or state.warned[0] is not ending:
        return SessionEvent(EventKind.WARN, ending, max(at - now, rule.warn_s)), replace(state, warned=(ending, now))
    if now >= max(at, state.warned[1] + rule.warn_s):
        return SessionEvent(EventKind.END, ending), state
    return None, state
