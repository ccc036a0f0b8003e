"""REINFORCE: what earned a reward becomes more probable (Williams 1992), as the star-graph experiments have it.

The loss of a token is ``-A ln p``. A is one for all tokens of an answer: ``1.1 r - 0.1``, so that a right answer counts
1 and a wrong one -0.1, or the reward less the batch's mean (Q#, arXiv 2502.20548, appendix C). Each step's answers are
learnt from once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.options import check_range
from gpuherd.posttrain.policy_gradient.collecting import collected
from gpuherd.posttrain.policy_gradient.figures import mean
from gpuherd.posttrain.policy_gradient.options import PolicyOptions
from gpuherd.posttrain.policy_gradient.saving import is_finished, trained_policy
from gpuherd.posttrain.types import Collecting, Policy, Rollout, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.policy_gradient.learner import Learner


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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "entropy_coef", 0)
        if self.minibatch_size is not None:
            raise UsageError("minibatch_size: REINFORCE learns from all rollouts of a step at once; use batch_size")
        if self.greedy and (self.samples_per_prompt != 1 or not self.online):
            raise UsageError("greedy=true: there is one most probable answer; samples_per_prompt=1 and online=true")


class Reinforce:
    """See ``algorithm.Algorithm``."""

    name: ClassVar[str] = "REINFORCE"
    guided: ClassVar[bool] = False
    on_policy: ClassVar[bool] = True
    Options: ClassVar[type[ReinforceOptions]] = ReinforceOptions

    def __init__(self, options: ReinforceOptions = ReinforceOptions()):
        self.options = options

    def collect(self, work: Collecting) -> Iterator[Rollout]:
        """Answers, to be learnt from with ``online=False``; nothing where the training samples itself."""
        return collected(work, self.options)

    def train(self, work: Training) -> Policy:
        """See ``Algorithm.train``."""
        from gpuherd.posttrain.policy_gradient.learner import Learner

        if not is_finished(work.folder):
            with Learner(work, self.options, self.name, greedy=self.options.greedy) as learner:
                self._learn(learner)
        return self.policy(work)

    def policy(self, work: Training) -> Policy:
        """See ``Algorithm.policy``."""
        return trained_policy(work.folder, work.policy)

    def _learn(self, learner: Learner) -> None:
        from gpuherd.posttrain.policy_gradient.objective import Item

        objective = learner.objective(
            clip=None, kl_coef=self.options.kl_coef, kl_correction=True, entropy_coef=self.options.entropy_coef
        )
        for step in learner.steps():
            rollouts = learner.rollouts(step)
            advantages = compared([each.reward for each in rollouts], self.options.baseline)
            mine = learner.mine(rollouts)
            own = [rollouts[place] for place in mine]
            items = [
                Item(each, [advantages[place]] * len(each.ids), None, reference)
                for each, place, reference in zip(own, mine, learner.referred(own), strict=True)
            ]
            learnt = [learner.trainee.step(items, objective.loss, objective.weight)]
            learner.finish(step, rollouts, learnt, objective.means(learner.world), {})


def compared(rewards: Sequence[float], baseline: Baseline) -> list[float]:
    """Each answer's advantage.

    >>> compared([1.0, 0.0], Baseline.BATCH_MEAN)
    [0.5, -0.5]
    """
    if baseline == Baseline.SHIFT:
        return [1.1 * each - 0.1 for each in rewards]
    level = mean(rewards) if baseline == Baseline.BATCH_MEAN else 0.0
    return [each - (level or 0.0) for each in rewards]
