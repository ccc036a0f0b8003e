"""GRPO: answers to one prompt are compared with each other, and what was better than its group becomes more probable.

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300). The advantage of every token of answer i is

    A_i = (r_i - mean of the group's rewards) / (their spread + eps)

and the loss of a token, with rho the ratio of its probability now to that when it was drawn,

    -min(rho A, clip(rho, 1 - low, 1 + high) A) + kl_coef (exp(d) - d - 1) - entropy_coef H,   d = ln ref - ln policy

added up as ``loss_type`` says (GRPO, DAPO or Dr. GRPO). With ``gspo`` (arXiv 2507.18071) rho is one for all tokens of
an answer, exp of the mean of their ln rho, and is clipped as a whole. With ``clip_range_c`` (dual clip, arXiv
1912.09729) rho counts as no more than that where A is below 0: without it such a token's loss has no bound. The words
of an environment between the policy's are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.engine.options import check_range
from gpuherd.posttrain.policy_gradient.advantages import Normalization, RunningMoments, grouped_advantages
from gpuherd.posttrain.policy_gradient.algorithm import LATER, PolicyGradient, PolicyOptions
from gpuherd.posttrain.policy_gradient.objective import Item
from gpuherd.posttrain.policy_gradient.plan import groups_of
from gpuherd.posttrain.types import Rollout, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer


@dataclass(frozen=True, kw_only=True)
class GRPOOptions(PolicyOptions):
    """``PolicyOptions`` and:

    Attributes:
        reward_normalization: by which spread advantages are divided: of the group, of the batch, running, or none.
        num_iterations: how often each step's rollouts are learnt from.
        clip_range: of the ratio, below 1 (and above, where ``clip_range_high`` is None).
        clip_range_high: of the ratio above 1, such as DAPO's 0.28. (GSPO's paper: 3e-4 below, 4e-4 above.)
        clip_range_c: the largest ratio that counts where the advantage is negative (TRL's ``delta``), such as 3; None:
            none.
        kl_correction: the estimated KL divergence is weighed by rho, as in TRL: only so is its gradient that of the
            divergence (arXiv 2512.02556). False: the paper's loss, as it stands above.
        entropy_coef: of the entropy bonus.
    """

    reward_normalization: Normalization = Normalization.GROUP
    num_iterations: int = 1
    clip_range: float = 0.2
    clip_range_high: float | None = None
    clip_range_c: float | None = field(default=None, metadata=LATER)
    kl_correction: bool = True
    entropy_coef: float = 0.0

    _clips_answers: ClassVar[bool] = True

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
        most = 1 + (self.clip_range if self.clip_range_high is None else self.clip_range_high)
        if self.clip_range_c is not None and not most < self.clip_range_c < math.inf:
            raise UsageError(
                f"clip_range_c={self.clip_range_c}; the clip holds positive advantages at a ratio of {most:g}: above "
                "that, such as 3"
            )
        check_range(self, "entropy_coef", 0)


@register
class GRPO(PolicyGradient):
    """See the module."""

    name: ClassVar[str] = "GRPO"
    Options: ClassVar[type[GRPOOptions]] = GRPOOptions
    options: GRPOOptions

    def learning(self, work: Training) -> dict[str, Any]:
        """Each step's rollouts are gone over ``num_iterations`` times."""
        return {**super().learning(work), "passes": self.options.num_iterations}

    def learn(self, trainer: RolloutTrainer) -> None:
        """See the module."""
        options = self.options
        high = options.clip_range if options.clip_range_high is None else options.clip_range_high
        objective = trainer.objective(
            clip=(options.clip_range, high),
            clip_most=options.clip_range_c,
            kl_coef=options.kl_coef,
            kl_correction=options.kl_correction,
            entropy_coef=options.entropy_coef,
        )
        moments = RunningMoments(**trainer.kept.get("moments", {}))
        for step in trainer.steps():
            rollouts = trainer.rollouts(step)
            rewards = [each.reward for each in rollouts]
            moments = moments.after(rewards)
            advantages = grouped_advantages(rewards, groups_of(rollouts), options.reward_normalization, moments)
            mine = trainer.mine(rollouts)
            own = [rollouts[place] for place in mine]
            drawn, references = trainer.old_logprobs(step, own), trainer.ref_logprobs(own)
            items = [
                Item(each, [advantages[place]] * len(each.ids), old, reference)
                for each, place, old, reference in zip(own, mine, drawn, references, strict=True)
            ]
            learnt = []
            for number in range(options.num_iterations):
                for places in trainer.minibatches(step, number, len(rollouts)):
                    part = [items[place] for place in places]
                    learnt.append(trainer.trainee.step(part, objective.loss, objective.weight))
            trainer.finish(step, rollouts, learnt, self.figures(rollouts), {"moments": asdict(moments)})

    def figures(self, rollouts: Sequence[Rollout]) -> Mapping[str, float | None]:  # noqa: ARG002 - for those made of it
        """Further figures of a step's rollouts, for the curves."""
        return {}
