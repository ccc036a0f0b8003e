"""How much better than expected an answer was, or a token of it: of groups, by GAE, and PPO's weight of the divergence.

Pure functions, but that ``estimated`` adds up over the processes; float64 where they sum. Torch inside functions only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.posttrain.policy_gradient.forward import rectangle
from gpuherd.posttrain.policy_gradient.objective import Item
from gpuherd.posttrain.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.dist_env import DistEnv


GROUP_EPS = 1e-4  # TRL's; the spread of a group is of the size of its rewards


class Normalization(StrEnum):
    """By which spread the difference of a reward from its group's mean is divided."""

    GROUP = "group"  # the group's own (arXiv 2402.03300)
    BATCH = "batch"  # that of all rewards of the step
    RUNNING = "running"  # that of all rewards since training began
    NONE = "none"  # none (Dr. GRPO, arXiv 2503.20783)


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Count, mean and sum of squared differences from it of all rewards that were seen, added up by Chan et al. 1983.

    >>> moments = RunningMoments().after([1.0, 2.0]).after([6.0])
    >>> moments.mean, round(moments.std, 6)
    (3.0, 2.645751)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def after(self, values: Sequence[float]) -> RunningMoments:
        """With these values added."""
        if not values:
            return self
        count = self.count + len(values)
        mean = math.fsum(values) / len(values)
        squares = math.fsum((each - mean) ** 2 for each in values)
        gap = mean - self.mean
        return RunningMoments(
            count,
            self.mean + gap * len(values) / count,
            self.squares + squares + gap**2 * self.count * len(values) / count,
        )

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 of fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


def grouped_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    normalization: Normalization = Normalization.GROUP,
    moments: RunningMoments | None = None,
    eps: float = GROUP_EPS,
) -> list[float]:
    """``(r - mean of its group) / (spread + eps)`` for each answer (GRPO, arXiv 2402.03300, section 4.1).

    The spread is the sample standard deviation (Bessel's, as TRL takes it). A group whose rewards are all equal, and a
    group of one, says nothing about its answers: exactly 0.

    Args:
        rewards: of each answer.
        groups: the number of each answer's group.
        moments: with ``running``: of all rewards so far, these included.

    >>> [round(each, 3) for each in grouped_advantages([1, 0, 0, 7], [0, 0, 0, 1])]
    [1.155, -0.577, -0.577, 0.0]
    """
    if normalization == Normalization.RUNNING and moments is None:
        raise UsageError("running normalization takes the moments of all rewards so far")
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    means = {group: math.fsum(each) / len(each) for group, each in members.items()}
    unequal = {group for group, each in members.items() if max(each) > min(each)}
    seen = moments if normalization == Normalization.RUNNING else None  # of this batch alone with ``batch``
    overall = RunningMoments().after(rewards).std if seen is None else seen.std

    def spread(group: int) -> float:
        if normalization == Normalization.NONE:
            return 1.0
        own = RunningMoments().after(members[group]).std if normalization == Normalization.GROUP else overall
        return own + eps

    scales = {group: spread(group) for group in unequal}
    return [
        (reward - means[group]) / scales[group] if group in unequal else 0.0
        for reward, group in zip(rewards, groups, strict=True)
    ]


def constant_groups(rewards: Sequence[float], groups: Sequence[int]) -> int:
    """How many groups have equal rewards throughout, so that nothing is learnt from them."""
    seen: dict[int, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        seen.setdefault(group, set()).add(reward)
    return sum(len(each) == 1 for each in seen.values())


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv 1506.02438, eq. 16) of each token that the policy chose, and the returns that values learn.

    ``A_t = sum_l (gamma lam)^l delta_(t+l)`` with ``delta_t = r_t + gamma V_(t+1) - V_t``, where t counts the policy's
    own tokens alone: words of an environment between them are no actions, and a reward that lies on one of them belongs
    to the action before. Behind the last token the value is 0, also where a limit cut the answer.

    Args:
        rewards, values: (rows, tokens).
        mask: (rows, tokens), true where the policy chose.

    Returns:
        Advantages and returns (advantages + values), (rows, tokens), 0 where the mask is false.
    """
    import torch

    chosen = mask.bool()
    advantages = torch.zeros_like(values)
    ahead = value_ahead = owed = torch.zeros_like(values[:, 0])
    for place in reversed(range(values.shape[1])):
        here = chosen[:, place]
        earned = rewards[:, place] + owed
        advantage = earned + gamma * value_ahead - values[:, place] + gamma * lam * ahead
        advantages[:, place] = torch.where(here, advantage, 0.0)
        ahead = torch.where(here, advantage, ahead)
        value_ahead = torch.where(here, values[:, place], value_ahead)
        owed = torch.where(here, 0.0, earned)
    return advantages, torch.where(chosen, advantages + values, 0.0)


def whitened(values: Tensor, total: Tensor, eps: float = 1e-8) -> Tensor:
    """``(values - mean) / (std + eps)``, of ``total``: count, sum and sum of squares over all tokens of all processes,
    (3,) float64. The spread is the sample standard deviation."""
    count, added, squares = (float(each) for each in total)
    mean = added / max(count, 1.0)
    variance = max(squares - count * mean**2, 0.0) / max(count - 1.0, 1.0)
    return (values - mean) / (math.sqrt(variance) + eps)


@dataclass(frozen=True, slots=True)
class KLControl:
    """Proportional control in log space (arXiv 1909.08593, section 2.2).

    Attributes:
        weight: now.
        target: the divergence that is wanted, nats an answer; None: the weight stays.
        horizon: answers in which an error of 20 % or more changes the weight by a factor e^0.2, about.
    """

    weight: float
    target: float | None = None
    horizon: int = 10_000

    def after(self, divergence: float, answers: int) -> KLControl:
        """After so many answers whose mean divergence this was.

        >>> KLControl(0.1, target=6.0, horizon=100).after(12.0, 10).weight
        0.10200000000000001
        """
        if self.target is None:
            return self
        error = min(max(divergence / self.target - 1, -0.2), 0.2)
        return replace(self, weight=self.weight * (1 + error * answers / self.horizon))


def token_rewards(rollout: Rollout, now: Sequence[float], reference: Sequence[float], weight: float) -> list[float]:
    """What each token earns: the task's rewards at their places, less ``weight (ln policy - ln reference)`` of each
    token that the policy chose (arXiv 1909.08593, eq. 2)."""
    earned = [0.0] * len(rollout.ids)
    for place, reward in rollout.turn_rewards or ((len(rollout.ids) - 1, rollout.reward),):
        earned[place] += reward
    for place, gap in enumerate(gaps(rollout, now, reference)):
        earned[place] -= weight * gap
    return earned


def gaps(rollout: Rollout, now: Sequence[float], reference: Sequence[float]) -> list[float]:
    """``ln policy - ln reference`` of each token that the policy chose, 0 of others and without a reference. Their sum
    estimates the answer's KL divergence from the reference."""
    if not reference:
        return [0.0] * len(rollout.ids)
    tokens = zip(rollout.by_policy, now, reference, strict=True)
    return [mine - theirs if chosen else 0.0 for chosen, mine, theirs in tokens]


def estimated(
    rollouts: Sequence[Rollout],
    now: Sequence[Sequence[float]],
    drawn: Sequence[Sequence[float | None] | None],
    values: Sequence[Sequence[float]],
    references: Sequence[Sequence[float]],
    weight: float,
    world: DistEnv,
    *,
    gamma: float,
    lam: float,
    normalise: bool,
) -> tuple[list[Item], dict[str, float]]:
    """This process's rollouts with advantages and returns, and figures of all processes' rollouts.

    Args:
        now, values, references: of each rollout a number a token: log-probs under the policy as it is, values,
            log-probs under the reference (empty where there is none).
        drawn: log-probs that ratios are to, as ``Item.old``.
        weight: of the divergence from the reference, now.

    Returns:
        Items in the order of ``rollouts``, and ``divergence`` (nats an answer, where there is a reference), ``value``,
        ``return`` and ``explained_variance`` (1 - Var(return - value) / Var(return)) over tokens.
    """
    import torch

    wide = max((len(each.ids) for each in rollouts), default=1)
    three = zip(rollouts, now, references, strict=True)
    rewards = rectangle([token_rewards(each, mine, theirs, weight) for each, mine, theirs in three], wide, "cpu")
    guesses = rectangle(values, wide, "cpu")
    mask = rectangle([[float(chosen) for chosen in each.by_policy] for each in rollouts], wide, "cpu").bool()
    if not rollouts:
        rewards, guesses, mask = (torch.zeros((0, wide), dtype=each.dtype) for each in (rewards, guesses, mask))
    advantages, returns = generalised_advantages(rewards.double(), guesses.double(), mask, gamma=gamma, lam=lam)
    sums = _added([advantages[mask], returns[mask], guesses.double()[mask], (returns - guesses)[mask]], world)
    if normalise:
        advantages = whitened(advantages, torch.tensor(sums[0], dtype=torch.float64))
    items = [
        Item(each, adv[: len(each.ids)], old, theirs, guess[: len(each.ids)], ret[: len(each.ids)])
        for each, adv, old, theirs, guess, ret in zip(
            rollouts, advantages.tolist(), drawn, references, guesses.tolist(), returns.tolist(), strict=True
        )
    ]
    figures = {"value": _mean(sums[2]), "return": _mean(sums[1])}
    if _variance(sums[1]) > 0:
        figures["explained_variance"] = 1 - _variance(sums[3]) / _variance(sums[1])
    apart = [math.fsum(gaps(each, mine, theirs)) for each, mine, theirs in zip(rollouts, now, references, strict=True)]
    if world.any(any(references)):
        figures["divergence"] = world.total(math.fsum(apart)) / max(1.0, world.total(float(len(rollouts))))
    return items, figures


def _added(columns: Sequence[Tensor], world: DistEnv) -> list[list[float]]:
    """Count, sum and sum of squares of each, over all processes."""
    import torch

    rows = [[float(each.numel()), float(each.sum()), float((each * each).sum())] for each in columns]
    found: list[list[float]] = world.sum(torch.tensor(rows, dtype=torch.float64, device=world.device)).tolist()
    return found


def _mean(sums: Sequence[float]) -> float:
    return sums[1] / max(sums[0], 1.0)


def _variance(sums: Sequence[float]) -> float:
    return max(0.0, sums[2] / max(sums[0], 1.0) - _mean(sums) ** 2)
