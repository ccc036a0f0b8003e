"""Sums and formulas in up to two attempts, judged by their result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data.dataset import asked
from gpuherd.posttrain.data.reading import Checked, Draft
from gpuherd.posttrain.envs.attempts import Attempt, Attempts
from gpuherd.posttrain.envs.options import EnvironmentOptions
from gpuherd.posttrain.envs.sources import source_of
from gpuherd.posttrain.rewards.answers import VALUE, MathRewards
from gpuherd.posttrain.types import Problem, Reward
from gpuherd.qa.data.questions import BadRow
from gpuherd.qa.grading.formulas import result_of
from gpuherd.qa.span import answer_in

_MOST_ATTEMPTS = 2
_LINES_OF_STEPS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What answers earn.

    Attributes:
        right: for the right result.
        unparsable: taken off where no result can be found at all.
        steps_bonus: added to a right result that is derived: at least two lines with an equals sign in them.
    """

    right: float = 1.0
    unparsable: float = 0.3
    steps_bonus: float = 0.2

    def __post_init__(self) -> None:
        for name in ("right", "unparsable", "steps_bonus"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)}; 0 or more")


def make(options: EnvironmentOptions) -> Attempts:
    """The environments. Raises UsageError, and what reading problems raises."""
    settings = read(Settings, options.settings, "math")
    rewards = MathRewards(options.task.processes)

    def judge(problems: Sequence[Problem], texts: Sequence[str]) -> list[Attempt]:
        found = rewards.rewards(problems, texts)
        return [attempt(text, bool(each.correct), settings) for text, each in zip(texts, found, strict=True)]

    source = source_of(options, draft, problem_of, "math")
    bounds = (-settings.unparsable, settings.right + settings.steps_bonus)
    most = options.max_attempts or _MOST_ATTEMPTS
    return Attempts("math", source, judge, most, bounds, verifiable=False, close=rewards.close)


def attempt(text: str, right: bool, settings: Settings) -> Attempt:
    """What an answer is worth, and what is said of a wrong one."""
    parsed = right or result_of(answer_in(text)) is not None
    steps = right and sum("=" in line for line in text.splitlines()) >= _LINES_OF_STEPS
    parts = {
        "right": settings.right if right else 0.0,
        "unparsable": 0.0 if parsed else -settings.unparsable,
        "steps": settings.steps_bonus if steps else 0.0,
    }
    said = "That is not the right result." if parsed else "No result can be found in your answer: put it in \\boxed{}."
    return Attempt(Reward(math.fsum(parts.values()), right, parts), f"{said} Try again.")


def draft(row: Mapping[str, Any]) -> Draft:
    """A row's question with its result. Raises BadRow."""
    question = next((row[name] for name in ("question", "problem", "prompt") if row.get(name) is not None), None)
    answer = row.get("answer", row.get("answers"))
    if answer is None:
        raise BadRow("there is no answer")
    return Draft(question, answer, row.get("id"))


def problem_of(found: Checked) -> Problem:
    """Asked for a boxed result."""
    hidden = {VALUE: found.answers[0]} if len(found.answers) == 1 else {}
    return Problem(found.id, asked(found.question, "boxed"), found.answers, hidden)
