"""How many GPUs this user may hold at some moment, by their own settings and the machine's policy: a pure function.

The smallest of: the user's own limit, the machine's limit for the user, and, in quiet hours, what those leave. Limits
count all GPUs that the user's gpuherds hold on this machine, so that two runs share one limit. A job that runs when
quiet hours begin runs on to its end; nothing new is started above the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from gpuherd.jobs import quiet_hours
from gpuherd.jobs.settings import Hours, Settings


@dataclass(frozen=True, slots=True)
class Allowance:
    """What this run may hold now.

    Attributes:
        max_gpus: the most GPUs at once for this run; None for no limit.
        excluded: GPUs that the machine's policy keeps for others: indices, labels or UUIDs.
        sentence: why ``max_gpus`` is what it is; None without a limit.
        changes_at: seconds since 1970 when quiet hours next begin or end; None without any.
    """

    max_gpus: int | None = None
    excluded: tuple[str, ...] = ()
    sentence: str | None = None
    changes_at: float | None = None

    @property
    def closed(self) -> str | None:
        """A sentence why nothing may start on a GPU now; None when something may."""
        return self.sentence if self.max_gpus == 0 else None


def allowance(settings: Settings, user: str, local: datetime, held_elsewhere: int = 0) -> Allowance:
    """What this run may hold.

    Args:
        user: the name that the system knows the user by, never what the environment says.
        local: local time, without a time zone.
        held_elsewhere: GPUs that other gpuherds of the same user hold on this machine.
    """
    every = (*settings.hours.quiet, *settings.policy.hours.quiet)
    change = quiet_hours.next_change(every, local)
    least: tuple[int, str] | None = None
    for most, why in _limits(settings, user, local):
        left = max(0, most - held_elsewhere)
        if least is None or left < least[0]:
            elsewhere = f"; {held_elsewhere} are held by your other runs" if held_elsewhere else ""
            least = (left, why + elsewhere)
    return Allowance(
        max_gpus=None if least is None else least[0],
        excluded=settings.policy.exclude_gpus,
        sentence=None if least is None else least[1],
        changes_at=None if change is None else change.timestamp(),
    )


def most_ever(settings: Settings, user: str) -> int | None:
    """The most GPUs that the user may hold at the best of times: a job that asks for more can never start."""
    known = [most for most in (settings.max_gpus, settings.policy.max_gpus(user)) if most is not None]
    return min(known, default=None)


def _limits(settings: Settings, user: str, local: datetime) -> Iterator[tuple[int, str]]:
    """Each limit that holds now, with its sentence."""
    if settings.max_gpus is not None:
        yield settings.max_gpus, f"at most {_gpus(settings.max_gpus)} by your own settings"
    machine = settings.policy.max_gpus(user)
    if machine is not None:
        yield machine, f"at most {_gpus(machine)} for {user} by this machine's policy"
    for hours, whose in ((settings.policy.hours, "this machine's"), (settings.hours, "your")):
        quiet = _quiet(hours, whose, local)
        if quiet is not None:
            yield quiet


def _quiet(hours: Hours, whose: str, local: datetime) -> tuple[int, str] | None:
    now = quiet_hours.active(hours.quiet, local)
    if now is None:
        return None
    over = quiet_hours.over_at(hours.quiet, local)
    until = "" if over is None else f", until {over:%a %H:%M}"
    return hours.max_gpus, f"at most {_gpus(hours.max_gpus)} in {whose} quiet hours ({now.text}){until}"


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"
