"""Programs in up to three attempts: after each that fails some tests the policy hears what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.data import code
from gpuherd.posttrain.envs.attempts import Attempt, Attempts
from gpuherd.posttrain.envs.options import EnvironmentOptions
from gpuherd.posttrain.envs.sources import source_of
from gpuherd.posttrain.rewards.code import CodeRewards, CodeScoring, Tested
from gpuherd.posttrain.rewards.sandbox import Limits
from gpuherd.posttrain.types import Problem

_MOST_ATTEMPTS = 3
_MOST_NOTES, _LONGEST = 3, 1000  # characters of what is said


@dataclass(frozen=True, slots=True)
class Settings:
    """What programs earn: passed / total, ``all_bonus`` where all tests pass, less ``error_penalty`` where an
    exception, a crash or a limit ended something. ``memory_mb``: of a program."""

    all_bonus: float = 1.0
    error_penalty: float = 0.5
    memory_mb: int = 512

    def __post_init__(self) -> None:
        if self.memory_mb < 32:
            raise UsageError(f"memory_mb={self.memory_mb}; the least is 32")


def make(options: EnvironmentOptions) -> Attempts:
    """The environments. Raises UsageError, and what reading problems raises."""
    settings = read(Settings, options.settings, "code")
    scoring = CodeScoring(True, settings.all_bonus, settings.error_penalty)
    rewards = CodeRewards(
        scoring,
        Limits(seconds=options.timeout, memory=settings.memory_mb << 20),
        processes=options.task.processes,
        allow_unconfined=options.task.allow_unconfined,
    )

    def judge(problems: Sequence[Problem], texts: Sequence[str]) -> list[Attempt]:
        return [Attempt(scoring.reward(each), feedback(each)) for each in rewards.tested(problems, texts)]

    source = source_of(options, code.draft, code.problem_of, "code")
    most = options.max_attempts or _MOST_ATTEMPTS
    return Attempts("code", source, judge, most, scoring.reward_range, verifiable=False, close=rewards.close)


def feedback(tested: Tested) -> str:
    """What is said of a program that does not pass all tests: what went wrong, and nothing of what tests ask."""
    notes = "".join(f"- {problem}\n" for problem in tested.problems[:_MOST_NOTES])
    said = f"{tested.passed} of {tested.total} tests pass.\n{notes}"
    return f"{said[:_LONGEST].rstrip()}\nWrite the whole program again, corrected."
