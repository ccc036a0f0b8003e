"""Environments of several attempts: the policy answers, hears what was wrong, and may try again.

An episode ends with a right answer or with the last attempt, and earns what that attempt is worth: who gets it right in
the end is not paid less for having learnt from what it heard, and nobody is paid for wrong tries besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuherd.posttrain.data.scoring import ProblemSource
from gpuherd.posttrain.envs.interface import NOTHING, Environment, Observation, Step, user
from gpuherd.posttrain.rewards.guarded import guarded
from gpuherd.posttrain.types import Problem, Reward, Split


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an answer is worth, and what is said to whoever may try again."""

    reward: Reward
    feedback: str


Judge = Callable[[Sequence[Problem], Sequence[str]], list[Attempt]]


class Attempts:
    """Environments that judge answers together."""

    def __init__(
        self,
        name: str,
        source: ProblemSource,
        judge: Judge,
        most_turns: int,
        reward_range: tuple[float, float],
        *,
        verifiable: bool,
        close: Callable[[], None],
    ):
        self.name, self.most_turns = name, most_turns
        self.reward_range, self.verifiable = reward_range, verifiable
        self._source, self._judge, self._close = source, judge, close

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Those of the source."""
        return self._source.problems(split, count, seed)

    def make(self) -> Environment:
        """A new one."""
        return _Trying(self)

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        """All attempts, judged together."""
        trying = [each for each in environments if isinstance(each, _Trying)]
        attempts = guarded(self._judge, self.name, [each.problem for each in trying], texts, self._failed)
        return [each.heard(attempt) for each, attempt in zip(trying, attempts, strict=True)]

    def close(self) -> None:
        """Ends what judging has started, and what the source has."""
        self._close()
        self._source.close()

    def _failed(self, reason: str) -> Attempt:
        return Attempt(Reward(self.reward_range[0], correct=False, note=reason), "That is not right. Try again.")


class _Trying:
    def __init__(self, family: Attempts):
        self._family = family
        self._tried = 0
        self.problem: Problem

    def reset(self, problem: Problem, seed: int) -> Observation:  # noqa: ARG002 - nothing is drawn
        """Shows the problem's prompt."""
        self.problem, self._tried = problem, 0
        return user(problem.prompt)

    def step(self, text: str) -> Step:
        """An attempt."""
        return self._family.step_all([self], [text])[0]

    def heard(self, attempt: Attempt) -> Step:
        """What comes of an attempt that was judged."""
        self._tried += 1
        reward = attempt.reward
        done = bool(reward.correct) or self._tried >= self._family.most_turns
        info = {**reward.parts, "attempts": float(self._tried)}
        if done:
            return Step(NOTHING, reward.value, True, reward.correct, info)
        return Step(user(attempt.feedback), 0.0, False, reward.correct, info, if_cut=reward.value)
