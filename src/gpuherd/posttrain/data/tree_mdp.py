"""The tree of the Q# paper (arXiv 2502.20548, figure 4 and theorems 4.1, 4.2), where everything is known exactly.

From the start the reference goes left with probability p_left, which earns 0.1 for sure, else right, which wins 1 with
probability p_win = 0.05 and else earns nothing. As eta goes to 0 the optimum goes right and wins, at the price of its
KL divergence; controlled decoding (CD) compares expected rewards, 0.1 with 0.05, and goes left.

Guided decoding of a model and a classifier that are this tree is tested against the closed forms here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.generated import GeneratedTask, generated
from gpuherd.posttrain.types import Problem, Reward, Split

LEFT_REWARD, WIN_REWARD = 0.1, 1.0
START, LEFT, RIGHT, WIN, LOSE = "S", "L", "R", "W", "X"
_REWARDS = {LEFT: LEFT_REWARD, RIGHT + WIN: WIN_REWARD, RIGHT + LOSE: 0.0}


@dataclass(frozen=True, slots=True)
class Settings:
    """The tree.

    Attributes:
        p_left: of the reference's first choice.
        p_win: of winning behind the right.
        train, heldout, test: problems in each split, all the same tree: each has its own draws.
    """

    p_left: float = 0.5
    p_win: float = 0.05
    train: int = 1_000
    heldout: int = 100
    test: int = 1_000

    def __post_init__(self) -> None:
        for name in ("p_left", "p_win"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}; a probability between 0 and 1, neither of both")
        if min(self.train, self.heldout, self.test) < 1:
            raise UsageError("train, heldout and test are 1 or more")


@dataclass(frozen=True, slots=True)
class TreePolicy:
    """A policy on the tree, by its two choices.

    Attributes:
        left: the probability of left at the start.
        win: of winning, behind the right.
    """

    left: float
    win: float

    @property
    def reward(self) -> float:
        """What it earns, expected."""
        return self.left * LEFT_REWARD + (1 - self.left) * self.win * WIN_REWARD

    def first_kl(self, reference: TreePolicy) -> float:
        """KL divergence of the first choice from the reference's, nats: theorem 4.2 is of this."""
        return _kl(self.left, reference.left)

    def kl(self, reference: TreePolicy) -> float:
        """KL divergence of whole answers from the reference's, nats."""
        return self.first_kl(reference) + (1 - self.left) * _kl(self.win, reference.win)


def optimum(settings: Settings, eta: float) -> TreePolicy:
    """The best policy for E[r] - eta KL: in proportion to pi_ref E[exp(r/eta)] at both choices.

    >>> round(optimum(Settings(), 0.02).reward, 6)
    1.0
    """
    right = math.log(settings.p_win) + WIN_REWARD / eta  # ln of each branch's part of E[exp(r/eta)] behind the right
    behind = _log_add(right, math.log1p(-settings.p_win))
    left = math.log(settings.p_left) + LEFT_REWARD / eta
    return TreePolicy(_share(left, math.log1p(-settings.p_left) + behind), math.exp(right - behind))


def controlled(settings: Settings, eta: float) -> TreePolicy:
    """CD's policy: in proportion to pi_ref exp(E[r]/eta).

    >>> round(controlled(Settings(), 0.002).reward, 6)
    0.1
    """
    left = math.log(settings.p_left) + LEFT_REWARD / eta
    right = math.log1p(-settings.p_left) + settings.p_win * WIN_REWARD / eta
    win = math.log(settings.p_win) + WIN_REWARD / eta
    return TreePolicy(_share(left, right), _share(win, math.log1p(-settings.p_win)))


def reference(settings: Settings) -> TreePolicy:
    """The policy that all begins with."""
    return TreePolicy(settings.p_left, settings.p_win)


@generated("tree_mdp", Settings)
class TreeMDP(GeneratedTask[Settings]):
    """The task: every problem is the tree."""

    verifiable = False

    def generate(self, split: Split) -> Iterator[Problem]:
        """So many: their ids tell them apart, by which answers are drawn."""
        for number in range(getattr(self.settings, split)):
            yield Problem(f"tree-{split}-{number}", START, (RIGHT + WIN,))

    def reward(self, problem: Problem, completion: str) -> Reward:  # noqa: ARG002 - all are the tree
        """0.1 for left, 1 for right and won, 0 for right and lost, and 0 for what is no way through the tree."""
        value = _REWARDS.get(completion)
        return Reward(0.0, None, {}, "no way through the tree") if value is None else Reward(value)


def _kl(one: float, other: float) -> float:
    pairs = ((one, other), (1 - one, 1 - other))
    return math.fsum(p * math.log(p / q) for p, q in pairs if p > 0)


def _log_add(one: float, other: float) -> float:
    high, low = max(one, other), min(one, other)
    return high + math.log1p(math.exp(low - high))


def _share(one: float, other: float) -> float:
    """e^one / (e^one + e^other)."""
    return math.exp(one - _log_add(one, other))
