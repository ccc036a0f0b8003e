"""Rewards on the range of a histogram, and the histogram's atoms. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gpuherd.errors import UsageError


@dataclass(frozen=True, slots=True)
class Scale:
    """Rewards of [low, high] are written on [v_min, v_max].

    eta then weighs rewards of this scale: an eta of rewards as they were is ``eta * (v_max - v_min) / (high - low)``.

    Attributes:
        low, high: the least and the largest reward.
        v_min, v_max: what they become.
        known_from: where ``low`` and ``high`` come from: "task" or "data".
    """

    low: float
    high: float
    v_min: float
    v_max: float
    known_from: str

    def __call__(self, reward: float) -> float:
        """A reward on this scale; one outside of [low, high] is put at its end.

        >>> Scale(-1, 3, 0, 1, "task")(0.0)
        0.25
        """
        share = (min(max(reward, self.low), self.high) - self.low) / (self.high - self.low)
        return self.v_min + share * (self.v_max - self.v_min)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def scale_of(
    rewards: Iterable[float], v_min: float, v_max: float, reward_range: tuple[float, float] | None = None
) -> Scale:
    """The scale of a task's range of rewards; of the rewards that were seen, where the task says none or no end of it.

    Raises UsageError where all rewards are the same: there is nothing to tell apart.
    """
    if reward_range is not None and all(map(math.isfinite, reward_range)) and reward_range[0] < reward_range[1]:
        return Scale(reward_range[0], reward_range[1], v_min, v_max, "task")
    seen = list(rewards)
    if not seen or min(seen) == max(seen):
        told = f"all {len(seen)} rewards are {seen[0]}" if seen else "there is no reward"
        raise UsageError(f"{told}: a classifier learns nothing from them; collect more completions, or harder problems")
    return Scale(min(seen), max(seen), v_min, v_max, "data")


def atoms(count: int, v_min: float, v_max: float) -> tuple[float, ...]:
    """So many numbers from ``v_min`` to ``v_max``, equally far from each other.

    >>> atoms(3, 0, 1)
    (0.0, 0.5, 1.0)
    """
    if count < 2 or not v_min < v_max:
        raise UsageError(f"{count} atoms from {v_min} to {v_max}: two at least, the least of them below the largest")
    return tuple(v_min + (v_max - v_min) * number / (count - 1) for number in range(count))
