"""GRPO: answers to one prompt are compared with each other, and what was better than its group becomes more probable.

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300). The advantage of every token of answer i is

    A_i = (r_i - mean of the group's rewards) / (their spread + eps)

and the loss of a token, with rho the ratio of its probability now to that when it was drawn,

    -min(rho A, clip(rho, 1 - low, 1 + high) A) + kl_coef (exp(d) - d - 1) - entropy_coef H,   d = ln ref - ln policy

added up as ``loss_type`` says (GRPO, DAPO or Dr. GRPO). With ``gspo`` (arXiv 2507.18071) rho is one for all tokens of
an answer, exp of the mean of their ln rho, and is clipped as a whole. With ``clip_range_c`` (dual clip, arXiv
1912.09729) rho counts as no more than that where A is below 0: without it such a token's loss has no bound. The words
of an environment between the policy's are left out.

Of DAPO (arXiv 2503.14476): a group whose rewards are all equal teaches nothing; with ``max_resample_times`` another
problem takes its place (dynamic sampling, section 3.2). Answers near the limit of tokens lose up to
``overlong_penalty`` (soft overlong punishment, eq. 13), or those that it cut are left out of the loss (overlong
filtering, section 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import register
from gpuherd.posttrain.config.typed import check_range
from gpuherd.posttrain.policy_gradient.advantages import Normalization, RunningMoments, grouped_advantages
from gpuherd.posttrain.policy_gradient.algorithm import LATER, LossType, PolicyGradient, PolicyOptions
from gpuherd.posttrain.policy_gradient.objective import Item
from gpuherd.posttrain.policy_gradient.plan import figures_of, groups_of
from gpuherd.posttrain.types import Rollout, Sampling, Training

if TYPE_CHECKING:
    from gpuherd.posttrain.policy_gradient.rollout_trainer import RolloutTrainer

_CLIP, _GSPO_CLIP = (0.2, None), (3e-4, 4e-4)  # PPO's; GSPO's (arXiv 2507.18071, section 5.1)
_UNSCALED = 0.01  # of gspo: ratios of whole answers are seldom so far from 1
# Figures of a step that describe its first draws, where some groups were drawn again.
_OF_FIRST_DRAWS = ("reward", "reward_std", "correct", "finished", "length", "constant_groups")


@dataclass(frozen=True, kw_only=True)
class GRPOOptions(PolicyOptions):
    """``PolicyOptions`` and:

    Attributes:
        reward_normalization: by which spread advantages are divided: of the group, of the batch, running, or none.
        num_iterations: how often each step's rollouts are learnt from.
        clip_range: of the ratio, below 1 (and above, where ``clip_range_high`` is None). None: 0.2; of gspo 3e-4, and
            4e-4 above.
        clip_range_high: of the ratio above 1, such as DAPO's 0.28.
        clip_range_c: the largest ratio that counts where the advantage is negative (TRL's ``delta``), such as 3; None:
            none.
        kl_correction: the estimated KL divergence is weighed by rho, as in TRL: only so is its gradient that of the
            divergence (arXiv 2512.02556). False: the paper's loss, as it stands above.
        entropy_coef: of the entropy bonus.
        max_resample_times: dynamic sampling: a group whose rewards are all equal gives its place to another problem,
            so often at most; 0: never. What is still equal then stays, and teaches nothing.
        overlong_buffer: so many tokens before ``max_new_tokens`` an answer begins to lose reward, linearly; of an
            episode its longest turn counts. None: never.
        overlong_penalty: what an answer of ``max_new_tokens`` loses.
        mask_truncated_completions: answers that the limit of tokens cut are left out of the loss; their rewards still
            count in their group's mean.
    """

    reward_normalization: Normalization = Normalization.GROUP
    num_iterations: int = 1
    clip_range: float | None = None
    clip_range_high: float | None = None
    clip_range_c: float | None = field(default=None, metadata=LATER)
    kl_correction: bool = True
    entropy_coef: float = 0.0
    max_resample_times: int = field(default=0, metadata=LATER)
    overlong_buffer: int | None = field(default=None, metadata=LATER)
    overlong_penalty: float = field(default=1.0, metadata=LATER)
    mask_truncated_completions: bool = field(default=False, metadata=LATER)

    _clips_answers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_range is None:
            low, high = _GSPO_CLIP if self.loss_type == LossType.GSPO else _CLIP
            object.__setattr__(self, "clip_range", low)  # checkpoints name what is clipped, given or not
            if self.clip_range_high is None:
                object.__setattr__(self, "clip_range_high", high)
        if self.samples_per_prompt < 2:
            raise UsageError(
                f"samples_per_prompt={self.samples_per_prompt}; an answer alone in its group is no better and no worse "
                "than it: 2 or above"
            )
        check_range(self, "num_iterations", 1)
        check_range(self, "clip_range", above=0, most=1)
        check_range(self, "clip_range_high", above=0)
        most = 1 + self.clip[1]
        if self.clip_range_c is not None and not most < self.clip_range_c < math.inf:
            raise UsageError(
                f"clip_range_c={self.clip_range_c}; the clip holds positive advantages at a ratio of {most:g}: above "
                "that, such as 3"
            )
        check_range(self, "entropy_coef", 0)
        check_range(self, "max_resample_times", 0)
        check_range(self, "overlong_buffer", 1)
        check_range(self, "overlong_penalty", above=0)
        if self.max_resample_times and not self.online:
            raise UsageError(
                f"max_resample_times={self.max_resample_times} with online=false: what was collected can't be drawn "
                "again; set online=true, or leave it out"
            )

    @property
    def clip(self) -> tuple[float, float]:
        """How far the ratio may go below and above 1."""
        assert self.clip_range is not None  # noqa: S101 - set above
        return self.clip_range, self.clip_range if self.clip_range_high is None else self.clip_range_high


@register
class GRPO(PolicyGradient):
    """See the module."""

    name: ClassVar[str] = "GRPO"
    Options: ClassVar[type[GRPOOptions]] = GRPOOptions
    options: GRPOOptions

    def check(self, sampling: Sampling) -> tuple[str, ...]:
        """A warning of a clip that can't be felt. Raises UsageError for a buffer longer than an answer."""
        options, most = self.options, sampling.max_new_tokens
        if options.overlong_buffer is not None and options.overlong_buffer > most:
            raise UsageError(f"overlong_buffer={options.overlong_buffer}; an answer has {most} tokens at most")
        if options.loss_type != LossType.GSPO or max(options.clip) < _UNSCALED:
            return ()
        low, high = options.clip
        return (
            f"clip_range={low:g}, {high:g} above 1, with loss_type=gspo: ratios of whole answers are near 1, and it "
            "clips nothing; leave clip_range and clip_range_high out (3e-4 and 4e-4), or take 1e-4 to 1e-3",
        )

    def learning(self, work: Training) -> dict[str, Any]:
        """Each step's rollouts are gone over ``num_iterations`` times."""
        self.check(work.sampling)
        return {**super().learning(work), "passes": self.options.num_iterations}

    def learn(self, trainer: RolloutTrainer) -> None:
        """See the module."""
        options, most = self.options, trainer.work.sampling.max_new_tokens
        objective = trainer.objective(
            clip=options.clip,
            clip_most=options.clip_range_c,
            kl_coef=options.kl_coef,
            kl_correction=options.kl_correction,
            entropy_coef=options.entropy_coef,
        )
        moments = RunningMoments(**trainer.kept.get("moments", {}))
        for step in trainer.steps():
            first = trainer.rollouts(step)
            rollouts, resampled = with_unequal_rewards(trainer, step, first, options.max_resample_times)
            penalties = [options.overlong_penalty * overlong(each, most, options.overlong_buffer) for each in rollouts]
            rewards = [each.reward - penalty for each, penalty in zip(rollouts, penalties, strict=True)]
            moments = moments.after(rewards)
            advantages = grouped_advantages(rewards, groups_of(rollouts), options.reward_normalization, moments)
            mine = trainer.mine(rollouts)
            own = [rollouts[place] for place in mine]
            drawn, references = trainer.old_logprobs(step, own), trainer.ref_logprobs(own)
            masks = options.mask_truncated_completions
            items = [
                Item(_masked(each) if masks else each, [advantages[place]] * len(each.ids), old, reference)
                for each, place, old, reference in zip(own, mine, drawn, references, strict=True)
            ]
            learnt = []
            for number in range(options.num_iterations):
                for places in trainer.minibatches(step, number, len(rollouts)):
                    part = [items[place] for place in places]
                    learnt.append(trainer.trainee.step(part, objective.loss, objective.weight))
            figures = {**self.figures(first), **resampled}
            if options.overlong_buffer is not None:
                figures["overlong_penalty"] = math.fsum(penalties) / len(penalties)
            trainer.finish(step, rollouts, learnt, figures, {"moments": asdict(moments)})

    def figures(self, rollouts: Sequence[Rollout]) -> Mapping[str, float | None]:  # noqa: ARG002 - for those made of it
        """Further figures of a step's rollouts, for the curves."""
        return {}


def with_unequal_rewards(
    trainer: RolloutTrainer, step: int, first: Sequence[Rollout], tries: int
) -> tuple[list[Rollout], dict[str, float | None]]:
    """The rollouts of a step, with other problems in the places of groups whose rewards are all equal, and figures.

    All processes know all rollouts, so all agree on what is drawn; and it depends on seed and step alone, so that a
    training that goes on draws the same. Which problem comes next, ``Plan.replacements`` says.

    Returns with no ``tries`` the rollouts and no figures, else besides ``resampled`` (groups drawn again for each group
    of the step), ``constant_left`` (the share whose rewards are still equal), ``rollouts`` (all that were drawn), and
    those of the first draws, which say how good the policy is; what is left is neither too easy nor too hard for it.
    """
    rollouts, size = list(first), trainer.options.samples_per_prompt
    if not tries:
        return rollouts, {}
    units = trainer.plan.units(step)
    seen, drawn = set(units), 0
    equal = _equal_groups(rollouts, size)
    for attempt in range(1, tries + 1):
        if not equal:
            break
        others = trainer.plan.replacements(step, attempt, [units[group] for group in equal], seen)
        made = trainer.sampled(step, [trainer.work.problems[unit] for unit in others], attempt)
        for number, (group, unit) in enumerate(zip(equal, others, strict=True)):
            rollouts[group * size : (group + 1) * size] = made[number * size : (number + 1) * size]
            units[group] = unit
        seen |= set(others)
        drawn += len(others)
        equal = _equal_groups(rollouts, size)
    of_first = figures_of(first, ())
    return rollouts, {
        **{name: of_first[name] for name in _OF_FIRST_DRAWS},
        "resampled": drawn / len(units),
        "constant_left": len(equal) / len(units),
        "rollouts": float(len(first) + drawn * size),
    }


def _equal_groups(rollouts: Sequence[Rollout], size: int) -> list[int]:
    """The numbers of the groups whose rewards are all equal, of groups of ``size`` behind each other."""
    groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
    return [number for number, group in enumerate(groups) if len({each.reward for each in group}) == 1]


def overlong(rollout: Rollout, most: int, buffer: int | None) -> float:
    """How far the longest turn of a rollout is in the last ``buffer`` of ``most`` tokens, from 0 to 1; 0 without a
    buffer (DAPO's soft punishment, eq. 13, is minus that)."""
    if buffer is None:
        return 0.0
    longest = max((len(list(run)) for own, run in groupby(rollout.by_policy) if own), default=0)
    return min(1.0, max(0.0, (longest - (most - buffer)) / buffer))


def _masked(rollout: Rollout) -> Rollout:
    """With no token to be learnt, where the limit of tokens cut it."""
    return rollout if rollout.finished else replace(rollout, by_policy=(False,) * len(rollout.ids))
