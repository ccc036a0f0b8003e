"""REINFORCE: what earned a reward becomes more probable (Williams 1992), as the star-graph experiments have it.

The loss of a token is ``-A ln p``. A is one for all tokens of an answer: ``1.1 r - 0.1``, so that a right answer counts
1 and a wrong one -0.1, or the reward less the batch's mean (Q#, arXiv 2502.20548, appendix C). Each step's answers are
learnt from once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.config.typed import check_range
from gpuherd.posttrain.policy_gradient.algorithm import PolicyGradient, PolicyOptions
from gpuherd.posttrain.policy_gradient.objective import Item
from gpuherd.posttrain.policy_gradient.plan import mean
from gpuherd.posttrain.rollout.mismatch import Correction
from gpuherd.posttrain.types import Training

if TYPE_CHECKING:
    from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer


class Baseline(StrEnum):
    """What a reward is compared with."""

    SHIFT = "shift"  # 1.1 r - 0.1, for rewards from 0 to 1
    BATCH_MEAN = "batch_mean"  # r less the mean of the step's rewards
    NONE = "none"  # r itself


@dataclass(frozen=True, kw_only=True)
class ReinforceOptions(PolicyOptions):
    """``PolicyOptions`` and:

    Attributes:
        baseline: what a reward is compared with.
        greedy: the most probable answer is learnt from, as the star-graph code does it, and none is drawn.
        entropy_coef: of the entropy bonus.
    """

    samples_per_prompt: int = 1
    kl_coef: float = 0.0
    baseline: Baseline = Baseline.SHIFT
    greedy: bool = False
    entropy_coef: float = 0.0

    minibatches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "entropy_coef", 0)
        if self.minibatch_size is not None:
            raise UsageError("minibatch_size: REINFORCE learns from all rollouts of a step at once; use batch_size")
        if self.greedy and (self.samples_per_prompt != 1 or not self.online):
            raise UsageError("greedy=true: there is one most probable answer; samples_per_prompt=1 and online=true")


@register
class Reinforce(PolicyGradient):
    """See the module."""

    name: ClassVar[str] = "REINFORCE"
    Options: ClassVar[type[ReinforceOptions]] = ReinforceOptions
    options: ReinforceOptions

    @property
    def draws(self) -> bool:
        """Not where the most probable answer is taken."""
        return not self.options.greedy

    def learning(self, work: Training) -> dict[str, Any]:
        """From the most probable answers, where that is asked for."""
        return {**super().learning(work), "greedy": self.options.greedy}

    def learn(self, trainer: RolloutTrainer) -> None:
        """See the module."""
        objective = trainer.objective(
            clip=None, kl_coef=self.options.kl_coef, kl_correction=True, entropy_coef=self.options.entropy_coef
        )
        for step in trainer.steps():
            rollouts = trainer.rollouts(step)
            advantages = compared([each.reward for each in rollouts], self.options.baseline)
            mine = trainer.mine(rollouts)
            own = [rollouts[place] for place in mine]
            before = [None] * len(own) if trainer.correction is Correction.NONE else trainer.old_logprobs(step, own)
            items = [
                Item(each, [advantages[place]] * len(each.ids), old, reference)
                for each, place, old, reference in zip(own, mine, before, trainer.ref_logprobs(own), strict=True)
            ]
            learnt = [trainer.trainee.step(items, objective.loss, objective.weight)]
            trainer.finish(step, rollouts, learnt, {}, {})


def compared(rewards: Sequence[float], baseline: Baseline) -> list[float]:
    """Each answer's advantage.

    >>> compared([1.0, 0.0], Baseline.BATCH_MEAN)
    [0.5, -0.5]
    """
    if baseline == Baseline.SHIFT:
        return [1.1 * each - 0.1 for each in rewards]
    level = mean(rewards) if baseline == Baseline.BATCH_MEAN else 0.0
    return [each - (level or 0.0) for each in rewards]
