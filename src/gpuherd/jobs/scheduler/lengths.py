"""How long a job will take, learnt from the latest jobs of its queue that are done. Pure.

Only reservations of other users ask for it: a job that has no time limit, or a generous one, starts before a
reservation if jobs like it have always been short enough. It may still overrun; a time limit is the only promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A job may take longer than the longest of its like so far, by this factor; from so few on nothing is concluded.
_MARGIN = 1.25
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Length:
    """A job that is done: its family (None for none), on how many GPUs, and for how many seconds it ran."""

    family: str | None
    gpus: int
    run_s: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """The latest jobs that are done, the newest first."""

    latest: Sequence[Length] = ()

    def expected_s(self, family: str | None, gpus: int) -> float | None:
        """How long a job of this family on so many GPUs will take at most, in seconds; None where too few are known.

        A job without a family is like all others without one.

        >>> done = Lengths([Length("a", 1, 60.0), Length("a", 1, 80.0), Length("a", 1, 40.0), Length(None, 1, 9000.0)])
        >>> done.expected_s("a", 1), done.expected_s(None, 1), done.expected_s("a", 2)
        (100.0, None, None)
        """
        like = [each.run_s for each in self.latest if each.family == family and each.gpus == gpus]
        return _MARGIN * max(like) if len(like) >= _FEWEST else None


NO_LENGTHS = Lengths()
