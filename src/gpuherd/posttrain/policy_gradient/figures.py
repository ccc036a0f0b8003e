"""What a step of a policy gradient is told by: figures of its rollouts and of its optimiser steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.posttrain.policy_gradient.advantages import RunningMoments, constant_groups
from gpuherd.posttrain.policy_gradient.plan import groups_of
from gpuherd.posttrain.types import Rollout

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.trainee import StepFigures


def figures_of(rollouts: Sequence[Rollout], learnt: Sequence[StepFigures]) -> dict[str, float | None]:
    """Of one step, by name; None where there is nothing to take a mean of.

    ``constant_groups`` is the share of groups whose rewards are all equal: all right, all wrong.
    """
    rewards = [each.reward for each in rollouts]
    groups = groups_of(rollouts)
    moments = RunningMoments().after(rewards)
    told = [each.correct for each in rollouts if each.correct is not None]
    losses = [each.loss for each in learnt if each.loss is not None]
    norms = [each.grad_norm for each in learnt if each.grad_norm is not None]
    return {
        "reward": moments.mean,
        "reward_std": moments.std,
        "correct": mean(told),
        "finished": mean([each.finished for each in rollouts]),
        "length": mean([sum(each.by_policy) for each in rollouts]),
        "rollouts": float(len(rollouts)),
        "constant_groups": constant_groups(rewards, groups) / (max(groups, default=0) + 1),
        "loss": mean(losses),
        "grad_norm": mean(norms),
        "learning_rate": learnt[-1].learning_rate if learnt else None,
        "micro_batch": float(learnt[-1].micro_batch) if learnt else None,
        "updates": float(len(learnt)),
    }


def mean(values: Sequence[float]) -> float | None:
    """None of none.

    >>> mean([1.0, 2.0]), mean([])
    (1.5, None)
    """
    return math.fsum(values) / len(values) if values else None
