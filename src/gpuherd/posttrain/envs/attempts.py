"""Environments of several attempts: the policy answers, hears what was wrong, and may try again. ``code`` asks for
programs, ``math`` for numbers and formulas.

An episode ends with a right answer or with the last attempt, and earns what that attempt is worth: who gets it right in
the end is not paid less for having learnt from what it heard, and wrong attempts earn nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import at_least
from gpuherd.posttrain.data.benchmarks import parse_program, program_problem, prompt_of
from gpuherd.posttrain.data.dataset import Checked, ParsedRow
from gpuherd.posttrain.envs.interface import NOTHING, EnvironmentOptions, Episode, Observation, Step, VectorEnv, user
from gpuherd.posttrain.envs.registry import environment, source_of
from gpuherd.posttrain.rewards.answers import VALUE, MathRewards, guarded
from gpuherd.posttrain.rewards.code import CodeRewards, CodeScoring, Tested
from gpuherd.posttrain.rewards.sandbox import Limits
from gpuherd.posttrain.types import Problem, ProblemSource, Reward
from gpuherd.qa.data.questions import BadRow
from gpuherd.qa.grading.formulas import result_of
from gpuherd.qa.span import answer_in


@dataclass(frozen=True, slots=True)
class Attempt:
    """The reward of an answer, and the feedback for the next attempt."""

    reward: Reward
    feedback: str


Judge = Callable[[Sequence[Problem], Sequence[str]], list[Attempt]]


class _Trying(Episode):
    def reset(self, problem: Problem, seed: int) -> Observation:  # noqa: ARG002 - nothing is drawn
        """Shows the problem's prompt."""
        self.problem, self._tried = problem, 0
        return user(problem.prompt)

    def heard(self, attempt: Attempt) -> Step:
        """The step of an attempt that was judged."""
        self._tried += 1
        reward = attempt.reward
        done = bool(reward.correct) or self._tried >= self.environments.most_turns
        info = {**reward.parts, "attempts": float(self._tried)}
        if done:
            return Step(NOTHING, reward.value, True, reward.correct, info)
        return Step(user(attempt.feedback), 0.0, False, reward.correct, info, if_cut=reward.value)


class Attempts(VectorEnv[_Trying]):
    """Environments that judge answers together."""

    episode = _Trying

    def __init__(
        self,
        name: str,
        source: ProblemSource,
        judge: Judge,
        most_turns: int,
        reward_range: tuple[float, float],
        *close: Callable[[], None],
    ):
        super().__init__(name, source, most_turns, reward_range, *close)
        self._judge = judge

    def judged(self, episodes: Sequence[_Trying], texts: Sequence[str]) -> list[Step]:
        """All attempts, judged together."""
        attempts = guarded(self._judge, self.name, [each.problem for each in episodes], texts, self._failed)
        return [each.heard(attempt) for each, attempt in zip(episodes, attempts, strict=True)]

    def _failed(self, reason: str) -> Attempt:
        return Attempt(Reward(self.reward_range[0], correct=False, note=reason), "That is not right. Try again.")


# ---- programs --------------------------------------------------------------------------------------------------------


_ATTEMPTS_AT_CODE = 3
_MOST_NOTES, _LONGEST = 3, 1000  # characters of the feedback


@dataclass(frozen=True, slots=True)
class CodeSettings:
    """What programs earn: passed / total, ``all_bonus`` where all tests pass, less ``error_penalty`` where an
    exception, a crash or a limit ended something. ``memory_mb``: of a program."""

    all_bonus: float = 1.0
    error_penalty: float = 0.5
    memory_mb: int = 512

    def __post_init__(self) -> None:
        at_least(self, memory_mb=32)


@environment("code", CodeSettings)
def make_code(settings: CodeSettings, options: EnvironmentOptions) -> Attempts:
    """Programs in up to three attempts: after each that fails some tests the policy hears what went wrong. Raises
    UsageError, NoProtection, and what reading problems raises."""
    scoring = CodeScoring(True, settings.all_bonus, settings.error_penalty)
    rewards = CodeRewards(
        scoring,
        Limits(seconds=options.timeout, memory=settings.memory_mb << 20),
        processes=options.task.processes,
        allow_unconfined=options.task.allow_unconfined,
    )

    def judge(problems: Sequence[Problem], texts: Sequence[str]) -> list[Attempt]:
        return [Attempt(scoring.reward(each), feedback(each)) for each in rewards.tested(problems, texts)]

    source = source_of(options, parse_program, program_problem, "code")
    most = options.max_attempts or _ATTEMPTS_AT_CODE
    return Attempts("code", source, judge, most, scoring.reward_range, rewards.close)


def feedback(tested: Tested) -> str:
    """The feedback for a program that does not pass all tests: what went wrong, and nothing of the tests themselves."""
    notes = "".join(f"- {problem}\n" for problem in tested.problems[:_MOST_NOTES])
    said = f"{tested.passed} of {tested.total} tests pass.\n{notes}"
    return f"{said[:_LONGEST].rstrip()}\nWrite the whole program again, corrected."


# ---- sums and formulas -----------------------------------------------------------------------------------------------


_ATTEMPTS_AT_MATH = 2
_LINES_OF_STEPS = 2


@dataclass(frozen=True, slots=True)
class MathSettings:
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


@environment("math", MathSettings)
def make_math(settings: MathSettings, options: EnvironmentOptions) -> Attempts:
    """Sums and formulas in up to two attempts, judged by their result. Raises UsageError, and what reading problems
    raises."""
    rewards = MathRewards(options.task.processes)

    def judge(problems: Sequence[Problem], texts: Sequence[str]) -> list[Attempt]:
        found = rewards.rewards(problems, texts)
        return [attempt(text, bool(each.correct), settings) for text, each in zip(texts, found, strict=True)]

    source = source_of(options, parse_question, _math_problem, "math")
    bounds = (-settings.unparsable, settings.right + settings.steps_bonus)
    most = options.max_attempts or _ATTEMPTS_AT_MATH
    return Attempts("math", source, judge, most, bounds, rewards.close)


def attempt(text: str, right: bool, settings: MathSettings) -> Attempt:
    """The reward of an answer, and the feedback for a wrong one."""
    parsed = right or result_of(answer_in(text)) is not None
    steps = right and sum("=" in line for line in text.splitlines()) >= _LINES_OF_STEPS
    parts = {
        "right": settings.right if right else 0.0,
        "unparsable": 0.0 if parsed else -settings.unparsable,
        "steps": settings.steps_bonus if steps else 0.0,
    }
    said = "That is not the right result." if parsed else "No result can be found in your answer: put it in \\boxed{}."
    return Attempt(Reward(math.fsum(parts.values()), right, parts), f"{said} Try again.")


def parse_question(row: Mapping[str, Any]) -> ParsedRow:
    """A row's question with its result. Raises BadRow."""
    question = next((row[name] for name in ("question", "problem", "prompt") if row.get(name) is not None), None)
    answer = row.get("answer", row.get("answers"))
    if answer is None:
        raise BadRow("there is no answer")
    return ParsedRow(question, answer, row.get("id"))


def _math_problem(found: Checked) -> Problem:
    """Asked for a boxed result."""
    hidden = {VALUE: found.answers[0]} if len(found.answers) == 1 else {}
    return Problem(found.id, prompt_of(found.question, "boxed"), found.answers, hidden)
