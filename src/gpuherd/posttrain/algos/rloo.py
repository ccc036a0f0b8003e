"""RLOO: each answer is compared with the mean of the other answers to its prompt (REINFORCE leave-one-out).

Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740), after Kool et al. 2019. Of k answers to a prompt, with the
divergence from the reference in the reward,

    R_i = r_i - kl_coef sum_t (ln policy - ln reference)        A_i = R_i - mean of the other k - 1 R

and the loss of each token of answer i is ``-min(rho A, clip(rho) A)``. Where a step's answers are learnt from once and
were just drawn, rho is 1, and its gradient is that of ``-A ln p``. The sum over an answer's tokens is divided by a
constant (``dr_grpo``), so that the gradient is that of the expected R, whatever the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.config.typed import check_range
from gpuherd.posttrain.policy_gradient.algorithm import LossType, PolicyGradient, PolicyOptions
from gpuherd.posttrain.policy_gradient.objective import Item
from gpuherd.posttrain.policy_gradient.plan import groups_of
from gpuherd.posttrain.rollout.mismatch import Correction
from gpuherd.posttrain.types import Rollout, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer


_EQUAL = 1e-6  # what two passes over the same tokens say of a divergence may differ by rounding


@dataclass(frozen=True, kw_only=True)
class RLOOOptions(PolicyOptions):
    """``PolicyOptions`` and:

    Attributes:
        num_iterations: how often each step's rollouts are learnt from.
        clip_range: of the ratio, below and above 1.
        entropy_coef: of the entropy bonus.
    """

    loss_type: LossType = LossType.DR_GRPO
    num_iterations: int = 1
    clip_range: float = 0.2
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt < 2:
            raise UsageError(
                f"samples_per_prompt={self.samples_per_prompt}; an answer is compared with the others to its prompt: 2 "
                "or above"
            )
        check_range(self, "num_iterations", 1)
        check_range(self, "clip_range", above=0, most=1)
        check_range(self, "entropy_coef", 0)


@register
class RLOO(PolicyGradient):
    """See the module."""

    name: ClassVar[str] = "RLOO"
    Options: ClassVar[type[RLOOOptions]] = RLOOOptions
    options: RLOOOptions

    def learning(self, work: Training) -> dict[str, Any]:
        """Each step's rollouts are gone over ``num_iterations`` times."""
        return {**super().learning(work), "passes": self.options.num_iterations}

    def learn(self, trainer: RolloutTrainer) -> None:
        """See the module."""
        options = self.options
        objective = trainer.objective(clip=(options.clip_range, options.clip_range), entropy_coef=options.entropy_coef)
        for step in trainer.steps():
            rollouts = trainer.rollouts(step)
            mine = trainer.mine(rollouts)
            own = [rollouts[place] for place in mine]
            drawn, references = trainer.old_logprobs(step, own), trainer.ref_logprobs(own)
            by = [None] * len(own) if trainer.correction is Correction.NONE else drawn
            apart = [divergence(*each) for each in zip(own, references, by, strict=True)]
            divergences = trainer.of_all(apart, len(rollouts))
            earned = [each.reward - options.kl_coef * far for each, far in zip(rollouts, divergences, strict=True)]
            advantages = leave_one_out(earned, groups_of(rollouts))
            items = [
                Item(each, [advantages[place]] * len(each.ids), old)
                for each, place, old in zip(own, mine, drawn, strict=True)
            ]
            learnt = []
            for number in range(options.num_iterations):
                for places in trainer.minibatches(step, number, len(rollouts)):
                    part = [items[place] for place in places]
                    learnt.append(trainer.trainee.step(part, objective.loss, objective.weight))
            figures = {"divergence": math.fsum(divergences) / len(divergences)} if options.kl_coef else {}
            trainer.finish(step, rollouts, learnt, figures, {})


def divergence(rollout: Rollout, reference: Sequence[float], log_probs: Sequence[float | None] | None = None) -> float:
    """``ln policy - ln reference`` of the tokens that the policy chose, by these log-probs, or by those that were
    recorded when they were drawn: estimates the answer's KL divergence. 0 without a reference."""
    if not reference:
        return 0.0
    tokens = zip(rollout.by_policy, rollout.log_probs if log_probs is None else log_probs, reference, strict=True)
    return math.fsum(mine - theirs for chosen, mine, theirs in tokens if chosen and mine is not None)


def leave_one_out(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Each reward less the mean of the others in its group. Exactly 0 in a group whose rewards are all equal (to 1e-6),
    and in a group of one.

    >>> leave_one_out([1.0, 0.0, 0.5, 7.0], [0, 0, 0, 1])
    [0.75, -0.75, 0.0, 0.0]
    """
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    sums = {group: math.fsum(each) for group, each in members.items() if max(each) - min(each) > _EQUAL}
    return [
        reward - (sums[group] - reward) / (len(members[group]) - 1) if group in sums else 0.0
        for reward, group in zip(rewards, groups, strict=True)
    ]
