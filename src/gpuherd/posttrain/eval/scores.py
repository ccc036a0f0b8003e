"""What each completion of a set of problems earned: all that the metrics are made of. Plain frozen data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

from gpuherd.posttrain.eval.result import Estimator


@dataclass(frozen=True, slots=True)
class Scores:
    """Tables with a row a problem and a column a sample, in the order of the draws.

    Attributes:
        problems: ids.
        reward: finite.
        correct: None as a whole where the task knows no right and wrong.
        answer: what votes in a majority: equal numbers in a row are equal answers; None abstains.
        tokens: how many, the end token counted.
        finished: whether the policy ended it itself.
        estimator: how ``kl`` was had; None where it was not measured.
        kl: in nats, summed over the completion's tokens; None of a completion where it was not measured.
    """

    problems: tuple[str, ...]
    reward: tuple[tuple[float, ...], ...]
    correct: tuple[tuple[bool, ...], ...] | None
    answer: tuple[tuple[int | None, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[tuple[bool, ...], ...]
    estimator: Estimator | None = None
    kl: tuple[tuple[float | None, ...], ...] | None = None

    def __post_init__(self) -> None:
        tables: list[Sequence[Sequence[object]]] = [self.reward, self.answer, self.tokens, self.finished]
        tables += [each for each in (self.correct, self.kl) if each is not None]
        if any(len(table) != len(self.problems) for table in tables):
            raise ValueError("each table has a row a problem")
        if len({len(row) for table in tables for row in table}) > 1:
            raise ValueError("each problem has the same number of samples")
        if len(set(self.problems)) < len(self.problems):
            raise ValueError("a problem is there twice")
        if not self.problems or not self.reward[0]:
            raise ValueError("there is no completion")
        if (self.kl is None) != (self.estimator is None):
            raise ValueError("a divergence has an estimator")

    @property
    def samples(self) -> int:
        """Completions a problem."""
        return len(self.reward[0])

    @property
    def completions(self) -> int:
        """In all."""
        return len(self.problems) * self.samples


def kl_pairs(scores: Scores) -> tuple[tuple[float, int, int], ...]:
    """Of each problem: divergence summed over the completions where it was measured, their number, and their tokens."""
    if scores.kl is None:
        return ()

    def pair(kl: Sequence[float | None], tokens: Sequence[int]) -> tuple[float, int, int]:
        known = [(value, length) for value, length in zip(kl, tokens, strict=True) if value is not None]
        return sum(value for value, _ in known), len(known), sum(length for _, length in known)

    return tuple(starmap(pair, zip(scores.kl, scores.tokens, strict=True)))
