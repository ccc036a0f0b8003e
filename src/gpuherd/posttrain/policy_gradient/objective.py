"""The loss of some rollouts with their advantages, as an optimiser step asks for it. Torch inside functions only.

The one place where the parts of ``losses`` come together; GRPO, PPO and REINFORCE differ in which they use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.policy_gradient.algorithm import LossType
from gpuherd.posttrain.policy_gradient.batch import Batch, batch_of, rectangle
from gpuherd.posttrain.policy_gradient.forward import Pass, forward
from gpuherd.posttrain.policy_gradient.losses import (
    answer_log_ratio,
    approximate_kl,
    clipped_loss,
    clipped_share,
    kl_estimate,
    summed,
    total_weight,
    value_loss,
)
from gpuherd.posttrain.policy_gradient.tally import Tally
from gpuherd.posttrain.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.world import World


@dataclass(frozen=True, slots=True)
class Item:
    """A rollout to be learnt from; all sequences have a number for each token of ``rollout.ids``.

    Attributes:
        advantages: of the tokens that the policy chose.
        old: log-probs under the policy that drew them; None: that is the policy as it is before this step.
        reference: log-probs under the reference; empty where there is none.
        old_values, returns: of the value head; empty where there is none.
    """

    rollout: Rollout
    advantages: Sequence[float]
    old: Sequence[float | None] | None = None
    reference: Sequence[float] = ()
    old_values: Sequence[float] = ()
    returns: Sequence[float] = ()

    @property
    def counts(self) -> list[bool]:
        """Which tokens are learnt from: those that the policy chose with a probability that is known."""
        known = [True] * len(self.rollout.ids) if self.old is None else [_finite(each) for each in self.old]
        return [chosen and each for chosen, each in zip(self.rollout.by_policy, known, strict=True)]


@dataclass(eq=False)
class Objective:
    """What an optimiser step makes small.

    Attributes:
        module: the policy, called with gradients (``Trainee.module``).
        device: where it lies.
        temperature: of the sampling.
        loss_type: by what sums over tokens are divided.
        most_tokens: of an answer, for Dr. GRPO.
        clip: how far the ratio may go below and above 1; None: no ratio, ``-A ln p`` (REINFORCE).
        clip_most: the largest ratio that counts where the advantage is negative; None: none.
        kl_coef: weight of the estimated KL divergence from the reference.
        kl_correction: that estimate is weighed by the ratio, as its tokens come from the policy that drew them: its
            gradient is then that of the divergence (arXiv 2512.02556, section 3.1). False: as in GRPO's paper.
        entropy_coef: weight of the entropy.
        value_coef, value_clip: of the value head's loss.
        tally: means over tokens since it was last made new.
    """

    module: Any
    device: str
    temperature: float
    loss_type: LossType
    most_tokens: int
    clip: tuple[float, float] | None
    clip_most: float | None = None
    kl_coef: float = 0.0
    kl_correction: bool = False
    entropy_coef: float = 0.0
    value_coef: float = 0.0
    value_clip: float | None = None
    tally: Tally = field(default_factory=Tally)

    def loss(self, items: Sequence[Item]) -> Tensor:
        """The sum over these items that ``Trainee.step`` divides by the sum of ``weight``."""
        import torch

        batch = batch_of([each.rollout for each in items], self.device)
        made = forward(self.module, batch, self.temperature, entropy_gradient=self.entropy_coef != 0)
        mask = self._mask(items, batch)
        now = made.log_probs
        old = self._beside(now, mask, [None if each.old is None else _numbers(each.old) for each in items])
        advantages = self._numbers([each.advantages for each in items], batch)
        log_ratio = answer_log_ratio(now - old, mask) if self.loss_type == LossType.GSPO else now - old
        told = {"entropy": made.entropies, "approx_kl": approximate_kl(now - old)}
        if self.clip is None:
            per_token = -advantages * now
        else:
            per_token = clipped_loss(log_ratio, advantages, *self.clip, self.clip_most)
            told["clipped"] = clipped_share(log_ratio, advantages, *self.clip, self.clip_most)
        if any(each.reference for each in items):
            reference = self._beside(now, mask, [each.reference for each in items])
            told["kl"] = kl_estimate(now, reference)
            if self.kl_coef:
                correction = log_ratio.exp() if self.kl_correction else 1.0
                per_token = per_token + self.kl_coef * correction * told["kl"]
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * made.entropies
        if self.value_coef:
            told["value_loss"] = self._value_loss(items, made, batch)
            per_token = per_token + self.value_coef * told["value_loss"]
        self.tally.add(mask, **told)
        return summed(torch.where(mask, per_token, 0.0), mask, self.loss_type)

    def weight(self, items: Sequence[Item]) -> float:
        """What ``loss`` of these items is divided by."""
        return total_weight([sum(each.counts) for each in items], self.loss_type, self.most_tokens)

    def means(self, world: World) -> dict[str, float]:
        """The mean over tokens of each figure since the tally was last made new; the tally is then new."""
        names = ["entropy", "approx_kl"]
        names += ["clipped"] if self.clip is not None else []
        names += ["value_loss"] if self.value_coef else []
        names += ["kl"] if self.kl_coef else []
        told = self.tally.means(world, tuple(names))
        self.tally = Tally()
        return told

    def _mask(self, items: Sequence[Item], batch: Batch) -> Tensor:
        import torch

        wide = batch.answers.shape[1]
        rows = [[*each.counts, *[False] * (wide - len(each.rollout.ids))] for each in items]
        return torch.tensor(rows, dtype=torch.bool, device=self.device)

    def _numbers(self, rows: Sequence[Sequence[float]], batch: Batch) -> Tensor:
        return rectangle(rows, batch.answers.shape[1], self.device)

    def _beside(self, now: Tensor, mask: Tensor, rows: Sequence[Sequence[float] | None]) -> Tensor:
        """Other log-probs of the same tokens; where there are none, and where the mask is false, those of now without a
        gradient: exponentials of differences are 1 there, and never infinite."""
        import torch

        given = rectangle([row or () for row in rows], now.shape[1], self.device)
        there = mask & torch.tensor([[row is not None] for row in rows], device=self.device)
        return torch.where(there, given, now.detach())

    def _value_loss(self, items: Sequence[Item], made: Pass, batch: Batch) -> Tensor:
        if made.values is None:
            raise UsageError("a value loss is for a policy with a value head")
        old, returns = ([getattr(each, name) for each in items] for name in ("old_values", "returns"))
        return value_loss(made.values, self._numbers(old, batch), self._numbers(returns, batch), self.value_clip)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [each if each is not None and math.isfinite(each) else 0.0 for each in values]
