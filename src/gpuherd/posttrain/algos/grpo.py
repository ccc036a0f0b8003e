"""GRPO: answers to one prompt are compared with each other, and what was better than its group becomes more probable.

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300). The advantage of every token of answer i is

    A_i = (r_i - mean of the group's rewards) / (their spread + eps)

and the loss of a token, with rho the ratio of its probability now to that when it was drawn,

    -min(rho A, clip(rho, 1 - low, 1 + high) A) + kl_coef (exp(d) - d - 1) - entropy_coef H,   d = ln ref - ln policy

added up as ``loss_type`` says (GRPO, DAPO or Dr. GRPO). The words of an environment between the policy's are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.options import check_range
from gpuherd.posttrain.policy_gradient.advantages import Normalization, RunningMoments, grouped_advantages
from gpuherd.posttrain.policy_gradient.collecting import collected
from gpuherd.posttrain.policy_gradient.options import PolicyOptions
from gpuherd.posttrain.policy_gradient.plan import groups_of
from gpuherd.posttrain.policy_gradient.saving import is_finished, trained_policy
from gpuherd.posttrain.types import Collecting, Policy, Rollout, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.policy_gradient.learner import Learner


@dataclass(frozen=True, kw_only=True)
class GRPOOptions(PolicyOptions):
    """``PolicyOptions`` and:

    Attributes:
        reward_normalization: by which spread advantages are divided: of the group, of the batch, running, or none.
        num_iterations: how often each step's rollouts are learnt from.
        clip_range: of the ratio, below 1 (and above, where ``clip_range_high`` is None).
        clip_range_high: of the ratio above 1, such as DAPO's 0.28.
        kl_correction: the estimated KL divergence is weighed by rho, as in TRL: only so is its gradient that of the
            divergence (arXiv 2512.02556). False: the paper's loss, as it stands above.
        entropy_coef: of the entropy bonus.
    """

    reward_normalization: Normalization = Normalization.GROUP
    num_iterations: int = 1
    clip_range: float = 0.2
    clip_range_high: float | None = None
    kl_correction: bool = True
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt < 2:
            raise UsageError(
                f"samples_per_prompt={self.samples_per_prompt}; an answer alone in its group is no better and no worse "
                "than it: 2 or above"
            )
        check_range(self, "num_iterations", 1)
        check_range(self, "clip_range", above=0, most=1)
        check_range(self, "clip_range_high", above=0)
        check_range(self, "entropy_coef", 0)


class GRPO:
    """See ``algorithm.Algorithm``."""

    name: ClassVar[str] = "GRPO"
    guided: ClassVar[bool] = False
    on_policy: ClassVar[bool] = True
    Options: ClassVar[type[GRPOOptions]] = GRPOOptions

    def __init__(self, options: GRPOOptions = GRPOOptions()):
        self.options = options

    def collect(self, work: Collecting) -> Iterator[Rollout]:
        """Groups of answers, to be learnt from with ``online=False``; nothing where the training samples itself."""
        return collected(work, self.options)

    def train(self, work: Training) -> Policy:
        """See ``Algorithm.train``."""
        from gpuherd.posttrain.policy_gradient.learner import Learner

        if not is_finished(work.folder):
            with Learner(work, self.options, self.name, passes=self.options.num_iterations) as learner:
                self._learn(learner)
        return self.policy(work)

    def policy(self, work: Training) -> Policy:
        """See ``Algorithm.policy``."""
        return trained_policy(work.folder, work.policy)

    def _learn(self, learner: Learner) -> None:
        from gpuherd.posttrain.policy_gradient.objective import Item

        options = self.options
        high = options.clip_range if options.clip_range_high is None else options.clip_range_high
        objective = learner.objective(
            clip=(options.clip_range, high),
            kl_coef=options.kl_coef,
            kl_correction=options.kl_correction,
            entropy_coef=options.entropy_coef,
        )
        moments = RunningMoments(**learner.kept.get("moments", {}))
        for step in learner.steps():
            rollouts = learner.rollouts(step)
            rewards = [each.reward for each in rollouts]
            moments = moments.after(rewards)
            advantages = grouped_advantages(rewards, groups_of(rollouts), options.reward_normalization, moments)
            mine = learner.mine(rollouts)
            own = [rollouts[place] for place in mine]
            told = zip(own, mine, learner.when_drawn(step, own), learner.referred(own), strict=True)
            items = [
                Item(each, [advantages[place]] * len(each.ids), old, reference) for each, place, old, reference in told
            ]
            learnt = []
            for number in range(options.num_iterations):
                for places in learner.minibatches(step, number, len(rollouts)):
                    part = [items[place] for place in places]
                    learnt.append(learner.trainee.step(part, objective.loss, objective.weight))
            learner.finish(step, rollouts, learnt, objective.means(learner.world), {"moments": asdict(moments)})
