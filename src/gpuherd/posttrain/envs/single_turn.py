"""A task as an environment: one turn, and what that earns."""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.posttrain.envs.interface import NOTHING, Environment, Observation, Step, user
from gpuherd.posttrain.rewards.guarded import rewards_of
from gpuherd.posttrain.types import Problem, Split, Task


class SingleTurn:
    """Environments of a task; the turns of many episodes are scored together."""

    most_turns = 1

    def __init__(self, task: Task):
        self.name = task.name
        self.verifiable, self.reward_range = task.verifiable, task.reward_range
        self._task = task

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """The task's."""
        return self._task.problems(split, count, seed)

    def make(self) -> Environment:
        """A new one."""
        return _OneTurn(self)

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        """The rewards of all texts, asked for at once."""
        problems = [each.problem for each in environments if isinstance(each, _OneTurn)]
        rewards = rewards_of(self._task, self.name, problems, texts)
        return [Step(NOTHING, each.value, True, each.correct, each.parts) for each in rewards]

    def close(self) -> None:
        """Ends what the task has started."""
        self._task.close()


class _OneTurn:
    def __init__(self, family: SingleTurn):
        self._family = family
        self.problem: Problem

    def reset(self, problem: Problem, seed: int) -> Observation:  # noqa: ARG002 - nothing is drawn
        """Shows the problem's prompt."""
        self.problem = problem
        return user(problem.prompt)

    def step(self, text: str) -> Step:
        """The answer, and the end."""
        return self._family.step_all([self], [text])[0]


def single_turn(task: Task) -> SingleTurn:
    """A task as an environment."""
    return SingleTurn(task)
