"""A task for the tests of algorithms: any text is an answer, and small letters are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuherd.posttrain.types import Problem, Reward, Split


@dataclass
class Letters:
    """The reward is the share of small letters among a completion's characters; ``scored``: how many at a time.

    ``poison``: a completion with this in it earns NaN. ``dull``: whatever answers a problem of an even number earns .1.
    """

    name: str = "letters"
    verifiable: bool = False
    reward_range: tuple[float, float] = (0.0, 1.0)
    poison: str | None = None
    dull: bool = False
    scored: list[int] = field(default_factory=list)

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """``count`` prompts of different lengths."""
        return [Problem(f"{split}-{number}", "q" * (1 + number % 5) + ":") for number in range(count or 8)]

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """The share of small letters."""
        self.scored.append(len(completions))
        return [Reward(self._earned(*each)) for each in zip(problems, completions, strict=True)]

    def _earned(self, problem: Problem, completion: str) -> float:
        if self.poison and self.poison in completion:
            return float("nan")
        if self.dull and int(problem.id.rpartition("-")[2]) % 2 == 0:
            return 0.1
        return sum(map(str.islower, completion)) / max(1, len(completion))

    def close(self) -> None:
        """Nothing was started."""
