"""Rewards of an environment scaled, shifted and cut off, as its configuration says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuherd.posttrain.envs.interface import Environment, Environments, Step
from gpuherd.posttrain.types import Problem, Split


@dataclass(frozen=True, slots=True)
class Shape:
    """A turn's reward r becomes r * scale + bias, cut off at ± clip.

    >>> Shape(scale=2, bias=1, clip=2).of(1.0)
    2.0
    """

    scale: float = 1.0
    bias: float = 0.0
    clip: float | None = None

    def of(self, reward: float) -> float:
        """The reward as it is paid."""
        shaped = reward * self.scale + self.bias
        return shaped if self.clip is None else max(-self.clip, min(self.clip, shaped))


class Shaped:
    """Environments whose turns pay shaped rewards."""

    def __init__(self, inner: Environments, shape: Shape):
        self.name = inner.name
        self.verifiable = False
        self.most_turns = inner.most_turns
        self.reward_range = _range(inner, shape)
        self._inner, self._shape = inner, shape

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Those of the environments inside."""
        return self._inner.problems(split, count, seed)

    def make(self) -> Environment:
        """One whose own ``step`` pays shaped rewards too."""
        return _ShapedEnvironment(self._inner.make(), self._shape)

    def step_all(self, environments: Sequence[Environment], texts: Sequence[str]) -> list[Step]:
        """The steps of the environments inside, shaped."""
        inner = [each.inner for each in environments if isinstance(each, _ShapedEnvironment)]
        return [_shaped(each, self._shape) for each in self._inner.step_all(inner, texts)]

    def close(self) -> None:
        """Ends what was started inside."""
        self._inner.close()


class _ShapedEnvironment:
    def __init__(self, inner: Environment, shape: Shape):
        self.inner, self._shape = inner, shape
        self.reset = inner.reset

    def step(self, text: str) -> Step:
        """The step of the environment inside, shaped."""
        return _shaped(self.inner.step(text), self._shape)


def _shaped(step: Step, shape: Shape) -> Step:
    """With the reward as it is paid, also where the episode is cut; one that is not finite stays, to be refused."""
    if not math.isfinite(step.reward + step.if_cut):
        return step
    paid = shape.of(step.reward)
    return replace(step, reward=paid, if_cut=shape.of(step.reward + step.if_cut) - paid if step.if_cut else 0.0)


def _range(inner: Environments, shape: Shape) -> tuple[float, float]:
    """The least and the largest reward of an episode of one turn or more, each turn shaped by itself."""
    low, high = sorted(each * shape.scale for each in inner.reward_range)
    biases = (shape.bias, shape.bias * inner.most_turns)
    most = math.inf if shape.clip is None else shape.clip * inner.most_turns
    return max(-most, low + min(biases)), min(most, high + max(biases))
