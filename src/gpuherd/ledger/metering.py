"""Looks at GPUs become held seconds, computing seconds, joules and memory. Pure: the caller passes the clocks.

A look says what a GPU did since the one before: its utilisation is the driver's mean over the last moments, its power
and memory are as of now. Between two looks the later one counts. Of a GPU that several use at a time each has its part,
so that the seconds of all together never exceed the clock.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from gpuherd.gpus.state import Gpu
from gpuherd.ledger.records import Use


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a use on its GPU; None for what is not known.

    Attributes:
        part: its part of the GPU, above 0 and at most 1.
        utilisation: of the whole GPU, 0 to 1.
        power_w: of the whole GPU.
        memory_mb: of this use.
    """

    part: float = 1.0
    utilisation: float | None = None
    power_w: float | None = None
    memory_mb: int | None = None

    @staticmethod
    def of(gpu: Gpu, *, part: float = 1.0, memory_mb: int | None = None) -> Look:
        """A look at this GPU by a use that has this part of it."""
        if gpu.problem is not None:
            return Look(part)
        utilisation = None if gpu.utilisation_percent is None else min(1.0, gpu.utilisation_percent / 100)
        return Look(part, utilisation, gpu.power_w, memory_mb)


NOT_SEEN = Look()


@dataclass(frozen=True, slots=True)
class Meter:
    """A use that goes on.

    Attributes:
        mono: until when it has been metered, in seconds of a clock that can't be set.
        look: the last one.
        idle_mono: since when it has been idle, by the same clock; None while it is not, or where that is unknown.
    """

    use: Use
    mono: float
    look: Look = NOT_SEEN
    idle_mono: float | None = None

    @staticmethod
    def resumed(use: Use, known: Use, *, mono: float) -> Meter:
        """A use of which an earlier recorder had measured so much until ``mono``: the time since then, in which nobody
        watched, counts as held at the next look."""
        figures = {name: getattr(known, name) for name in _FIGURES}
        return Meter(replace(use, since=known.since, until=known.until, **figures), mono)

    def advanced(self, *, mono: float, wall: float, look: Look | None = None) -> Meter:
        """The use up to this time, after a look; without one as at the last. It is never shortened."""
        look = self.look if look is None else look
        passed_s = max(0.0, mono - self.mono)
        use, part_s = self.use, passed_s * look.part
        span_s = use.span_s + passed_s
        wall += max(0.0, self.mono - mono)
        since = max(0.0, wall - span_s)
        # Idle since the look that saw it first: what it did before is not known.
        idle_mono = None
        if look.utilisation == 0.0 and look.memory_mb:
            idle_mono = mono if self.idle_mono is None else self.idle_mono
        measured = replace(
            use,
            since=since,
            until=since + span_s,
            held_s=use.held_s + part_s,
            computing_s=_more(use.computing_s, part_s, look.utilisation),
            energy_j=_more(use.energy_j, part_s, look.power_w),
            memory_mb_s=_more(use.memory_mb_s, passed_s, look.memory_mb),
            peak_mb=use.peak_mb if look.memory_mb is None else max(use.peak_mb or 0, look.memory_mb),
            idle_since=None if idle_mono is None else max(0.0, wall - (mono - idle_mono)),
        )
        return Meter(measured, max(mono, self.mono), look, idle_mono)


_FIGURES = ("held_s", "computing_s", "energy_j", "memory_mb_s", "peak_mb")


def begun(use: Use, *, mono: float, wall: float) -> Meter:
    """A use that begins at this time."""
    return Meter(replace(use, since=wall, until=wall), mono)


def _more(before: float | None, seconds: float, rate: float | None) -> float | None:
    return before if rate is None else (before or 0.0) + seconds * rate


def part_of(mine: int, users: AbstractSet[int], of_mine: int = 1) -> float:
    """The part of a GPU that one of a user's uses has: users share it alike, and so do the uses of each.

    Args:
        mine: the user's uid.
        users: uids of those whose processes compute on the GPU.
        of_mine: how many uses of this user are on it.

    >>> part_of(1001, {1002}), part_of(1001, {1001}, of_mine=4), part_of(1001, set())
    (0.5, 0.25, 1.0)
    """
    return 1 / (len(users | {mine}) * max(1, of_mine))
