"""How GPUs were used in the last minutes, and how that is drawn in a line of text: pure functions and plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpuherd.gpus.state import Gpu

KEPT = 240
_STEPS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"


@dataclass(slots=True)
class Past:
    """What was seen of one GPU, oldest first: its use and its memory in use, each from 0 to 1; None where unknown."""

    use: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))
    memory: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))


class History:
    """The past of every GPU that was seen, by UUID."""

    def __init__(self) -> None:
        self._past: dict[str, Past] = {}

    def add(self, gpus: Iterable[Gpu]) -> None:
        """Adds one look at the GPUs."""
        for gpu in gpus:
            past = self._past.setdefault(gpu.uuid, Past())
            percent = gpu.utilisation_percent
            past.use.append(None if percent is None else percent / 100)
            past.memory.append(gpu.used_mb / gpu.total_mb if gpu.total_mb and gpu.problem is None else None)

    def of(self, uuid: str) -> Past:
        """What was seen of this GPU."""
        return self._past.get(uuid) or Past()


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last ``width`` values, each from 0 to 1, as a line of blocks; it grows from the right.

    >>> sparkline([0.0, 0.5, 1.0, None], 6)
    '  ▁▅█·'
    """
    last = list(values)[-width:] if width > 0 else []
    drawn = "".join(_UNKNOWN if value is None else _STEPS[_step(value)] for value in last)
    return drawn.rjust(max(0, width))


def _step(value: float) -> int:
    """A block's number. Only nothing at all is the lowest: a little use must not look like none."""
    if value <= 0:
        return 0
    return max(1, min(len(_STEPS) - 1, round(value * (len(_STEPS) - 1))))
