"""What can be asked of a queue while it is worked off, and what is answered: plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuherd.errors import UsageError


class ControlKind(StrEnum):
    """What can be asked."""

    CANCEL = "cancel"  # jobs end for good
    RETRY = "retry"  # failed and cancelled jobs wait again
    PAUSE = "pause"  # waiting jobs are held; running ones stand still, and so do their time limits
    RESUME = "resume"  # the reverse
    PRIORITY = "priority"  # settings: {"priority": "5"}
    DRAIN = "drain"  # the dispatcher starts nothing new and ends when what runs has ended
    STOP = "stop"  # it stops what runs, puts it back into the queue, and ends
    SET = "set"  # other options; settings as on the command line
    RELOAD = "reload"  # the settings files are read again


OF_JOBS = frozenset(
    {ControlKind.CANCEL, ControlKind.RETRY, ControlKind.PAUSE, ControlKind.RESUME, ControlKind.PRIORITY}
)


@dataclass(frozen=True, slots=True)
class Control:
    """A wish. ``jobs`` are names; () means all that it can be done to. ``settings`` are words, for SET and PRIORITY."""

    kind: ControlKind
    jobs: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it.

    Attributes:
        ok: all of it was done.
        text: one sentence for people.
        applied_by: "dispatcher", "here" (by this process), or None when nobody has done it yet; it stays asked.
        changed: names of the jobs that it changed.
    """

    ok: bool
    text: str
    applied_by: str | None = None
    changed: tuple[str, ...] = ()


def priority_of(settings: Mapping[str, str]) -> int:
    """The new priority. Raises UsageError."""
    word = settings.get("priority", "")
    try:
        value = int(word)
    except ValueError:
        raise UsageError(f"priority={word!r}; it must be a whole number") from None
    if not -(2**31) <= value < 2**31 or settings.keys() != {"priority"}:
        raise UsageError(f"priority: {dict(settings)!r}; it must be one whole number of at most 31 bits")
    return value
