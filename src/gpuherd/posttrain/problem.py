"""A problem, what an answer to it earned, and where both come from. Plain frozen data; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Split(StrEnum):
    """Which part of a task's problems; they have no problem in common."""

    TRAIN = "train"
    HELDOUT = "heldout"  # for choosing among policies
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to be answered.

    Attributes:
        id: unique in the task, and the same whenever the task is read.
        prompt: what stands before the answer; with a chat template it is the user's message.
        answers: right answers, where the task knows some; the first is the one that is imitated.
        hidden: what the reward needs besides and the policy never sees (tests of code, a graph).
    """

    id: str
    prompt: str
    answers: tuple[str, ...] = ()
    hidden: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reward:
    """What a completion earned.

    Attributes:
        value: finite.
        correct: None where the task knows no right and wrong.
        parts: what it is made of, by name.
        note: why, where a person would ask (a test that failed, no answer found).
    """

    value: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None


class Task(Protocol):
    """Problems of one kind, and what completions earn.

    Attributes:
        name: its id.
        verifiable: rewards are 0 or 1 and say whether a completion is right.
        reward_range: the least and the largest reward; what a histogram of rewards spans.
    """

    name: str
    verifiable: bool
    reward_range: tuple[float, float]

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The first ``count`` problems of a split in an order that the seed fixes; None: all (or the task's own number
        where it makes as many as are asked for). Raises UsageError where there are not so many."""
        ...

    def rewards(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Reward]:
        """What each completion earns: scored in batches, in this order."""
        ...

    def close(self) -> None:
        """Ends what scoring has started (processes, models)."""
        ...
