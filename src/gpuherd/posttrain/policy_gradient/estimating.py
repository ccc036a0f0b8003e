"""PPO's advantages and returns: rewards of tokens, GAE over each rollout, one scale over all processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.posttrain.policy_gradient.advantages import generalised_advantages, whitened
from gpuherd.posttrain.policy_gradient.batch import rectangle
from gpuherd.posttrain.policy_gradient.objective import Item
from gpuherd.posttrain.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.world import World


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
    told = zip(rollout.by_policy, now, reference, strict=True)
    return [mine - theirs if chosen else 0.0 for chosen, mine, theirs in told]


def estimated(
    rollouts: Sequence[Rollout],
    now: Sequence[Sequence[float]],
    drawn: Sequence[Sequence[float | None]],
    values: Sequence[Sequence[float]],
    references: Sequence[Sequence[float]],
    weight: float,
    world: World,
    *,
    gamma: float,
    lam: float,
    normalise: bool,
) -> tuple[list[Item], dict[str, float]]:
    """This process's rollouts with advantages and returns, and figures of all processes' rollouts.

    Args:
        now, values, references: of each rollout a number a token: log-probs under the policy as it is, values,
            log-probs under the reference (empty where there is none).
        drawn: log-probs under the policy that drew.
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
    told = {"value": _mean(sums[2]), "return": _mean(sums[1])}
    if _variance(sums[1]) > 0:
        told["explained_variance"] = 1 - _variance(sums[3]) / _variance(sums[1])
    apart = [math.fsum(gaps(each, mine, theirs)) for each, mine, theirs in zip(rollouts, now, references, strict=True)]
    if world.any(any(references)):
        told["divergence"] = world.total(math.fsum(apart)) / max(1.0, world.total(float(len(rollouts))))
    return items, told


def _added(columns: Sequence[Tensor], world: World) -> list[list[float]]:
    """Count, sum and sum of squares of each, over all processes."""
    import torch

    rows = [[float(each.numel()), float(each.sum()), float((each * each).sum())] for each in columns]
    found: list[list[float]] = world.sum(torch.tensor(rows, dtype=torch.float64, device=world.device)).tolist()
    return found


def _mean(sums: Sequence[float]) -> float:
    return sums[1] / max(sums[0], 1.0)


def _variance(sums: Sequence[float]) -> float:
    return max(0.0, sums[2] / max(sums[0], 1.0) - _mean(sums) ** 2)
