"""How a task scores: what rules, tests and reward models have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpuherd.posttrain.types import Problem, Reward, Split


class Scoring(Protocol):
    """Rewards for problems of any task whose hidden parts and answers it understands.

    Attributes:
        verifiable, reward_range: as of ``problem.Task``.
    """

    verifiable: bool
    reward_range: tuple[float, float]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """What each completion earns, in this order."""
        ...

    def close(self) -> None:
        """Ends what scoring has started."""
        ...


class ProblemSource(Protocol):
    """Where problems are from: any task is one."""

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """As of ``problem.Task``."""
        ...

    def close(self) -> None:
        """Ends what was started."""
        ...
