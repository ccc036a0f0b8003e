"""A task for the tests of evaluations: a completion is right whose first letter is in the alphabet's first half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuherd.posttrain.types import Problem, Reward, Split


@dataclass
class FirstLetter:
    """Problems of different lengths. ``asked`` keeps the problems whose completions were scored."""

    name: str = "first letter"
    verifiable: bool = True
    reward_range: tuple[float, float] = (0.0, 1.0)
    asked: list[str] = field(default_factory=list)
    answer: str = "a"

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """``count`` prompts; ``seed`` says with which the order begins."""
        numbers = range(count or 6)
        return [Problem(f"{split}-{seed + at}", "q" * (1 + at % 4) + ":", (self.answer,)) for at in numbers]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """1 for a first character that is at most ``m``."""
        self.asked += [each.id for each in problems]
        return [Reward(float(right := each[:1] <= "m" and each != ""), right) for each in completions]

    def close(self) -> None:
        """Nothing was started."""
