"""The loss of some rollouts with their advantages, as an optimiser step takes it: losses token by token, how they
are added up, and figures of them.

Losses are pure functions of tensors of any float dtype; all take and return (rows, tokens), and what stands where the
policy did not choose is left out by ``summed``. ``Objective`` is the one place where they come together: algorithms
differ in which they use. Torch inside functions only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.policy_gradient.algorithm import LossType
from gpuherd.posttrain.policy_gradient.forward import Batch, Pass, batch_of, forward, rectangle
from gpuherd.posttrain.rollout.mismatch import Correction, MismatchMeter, importance_weights
from gpuherd.posttrain.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from gpuherd.posttrain.engine.train_engine import Loss


def clipped_loss(log_ratio: Tensor, advantages: Tensor, low: float, high: float, most: float | None = None) -> Tensor:
    """``-min(rho A, clip(rho, 1 - low, 1 + high) A)`` (PPO, arXiv 1707.06347, eq. 7; two bounds: arXiv 2503.14476).

    Args:
        log_ratio: ln rho: the log-prob now less that under the policy that sampled.
        most: rho counts as no more than this, which is above ``1 + high``: felt where A is negative alone, and then the
            loss is ``-most A`` at most (dual clip, arXiv 1912.09729, eq. 5). None: without a bound.
    """
    import torch

    ratio = log_ratio.exp()
    bounded = ratio if most is None else ratio.clamp(max=most)
    return -torch.minimum(bounded * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def clipped_share(log_ratio: Tensor, advantages: Tensor, low: float, high: float, most: float | None = None) -> Tensor:
    """1 where the clip has taken the gradient away, else 0; no gradient."""
    ratio = log_ratio.detach().exp()
    clipped = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    if most is not None:
        clipped = clipped | ((ratio > most) & (advantages < 0))
    return clipped.to(log_ratio.dtype)


def answer_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The mean of ln rho over the tokens of each answer that count, at each of its tokens (GSPO, arXiv 2507.18071,
    eq. 7). The gradient goes to all of them."""
    chosen = mask.bool()
    added = log_ratio.masked_fill(~chosen, 0.0).sum(dim=-1, keepdim=True)
    return (added / chosen.sum(dim=-1, keepdim=True).clamp(min=1)).expand_as(log_ratio)


def kl_estimate(log_probs: Tensor, reference: Tensor) -> Tensor:
    """``exp(d) - d - 1`` with ``d = ln reference - ln policy``: an unbiased, never negative estimate of KL(policy ||
    reference) from tokens of the policy (k3 of joschu.net/blog/kl-approx.html; GRPO, arXiv 2402.03300, eq. 4)."""
    gap = reference - log_probs
    return gap.exp() - gap - 1


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """``(rho - 1) - ln rho``: an estimate of KL(policy that sampled || policy now); no gradient."""
    gap = log_ratio.detach()
    return gap.exp() - 1 - gap


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """``(V - R)^2 / 2``; with a clip the larger of it and that of V held within ``clip`` of what it was (the clipped
    value loss of OpenAI's baselines, as arXiv 2005.12729, section 3, writes it down)."""
    import torch

    plain = (values - returns) ** 2
    if clip is not None:
        held = old_values + (values - old_values).clamp(-clip, clip)
        plain = torch.maximum(plain, (held - returns) ** 2)
    return 0.5 * plain


def summed(per_token: Tensor, mask: Tensor, kind: LossType) -> Tensor:
    """What the rows add to a step's loss, before it is divided by ``total_weight`` of all rows of the step: a scalar.

    Rows without a token that counts add 0.
    """
    kept = per_token.masked_fill(~mask.bool(), 0.0).sum(dim=-1)
    if kind in (LossType.GRPO, LossType.GSPO):
        kept = kept / mask.sum(dim=-1).clamp(min=1)
    return kept.sum()


def total_weight(tokens: list[int], kind: LossType, most_tokens: int) -> float:
    """What ``summed`` over these rows is divided by; sums over micro-batches and processes.

    Args:
        tokens: of each row, how many the policy chose.
        most_tokens: the most that an answer may have.

    >>> [total_weight([3, 5], kind, 10) for kind in LossType]
    [2.0, 8.0, 20.0, 2.0]
    """
    if kind == LossType.DAPO:
        return float(sum(tokens))
    return float(len(tokens) * (most_tokens if kind == LossType.DR_GRPO else 1))


def sums_of(mask: Tensor, **figures: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """As ``Loss`` has figures: of each the sum over the tokens that the mask has, and their number."""
    chosen = mask.bool()
    count = chosen.sum()
    return {name: (each.detach().double().masked_fill(~chosen, 0.0).sum(), count) for name, each in figures.items()}


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
        module: the policy, called with gradients (``TrainEngine.module``).
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
        recorded: the old log-probs of items are those that the sampler recorded; False: the policy's own before the
            step.
        correction: how the loss of a token is weighed by its probability under the policy before the step over that
            which the sampler recorded (``Rollout.log_probs``). The divisor stays.
        correction_cap: of these weights.
        meter: notes how far the recorded log-probs are from the policy's before the step.
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
    recorded: bool = False
    correction: Correction = Correction.NONE
    correction_cap: float = 2.0
    meter: MismatchMeter | None = None

    def loss(self, items: Sequence[Item]) -> Loss:
        """The sum over these items that ``TrainEngine.step`` divides by the sum of ``weight``; its figures are means
        over the tokens that count."""
        import torch

        from gpuherd.posttrain.engine.train_engine import Loss

        batch = batch_of([each.rollout for each in items], self.device)
        mask = self._mask(items, batch)
        made = forward(self.module, batch, self.temperature, mask, entropy_gradient=self.entropy_coef != 0)
        now = made.log_probs
        old = self._beside(now, mask, [None if each.old is None else _numbers(each.old) for each in items])
        advantages = self._numbers([each.advantages for each in items], batch)
        log_ratio = answer_log_ratio(now - old, mask) if self.loss_type == LossType.GSPO else now - old
        figures = {"entropy": made.entropies, "approx_kl": approximate_kl(now - old)}
        if self.clip is None:
            per_token = -advantages * now
        else:
            per_token = clipped_loss(log_ratio, advantages, *self.clip, self.clip_most)
            figures["clipped"] = clipped_share(log_ratio, advantages, *self.clip, self.clip_most)
        if self.kl_coef:
            reference = self._beside(now, mask, [each.reference for each in items])
            figures["kl"] = kl_estimate(now, reference)
            correction = log_ratio.exp() if self.kl_correction else 1.0
            per_token = per_token + self.kl_coef * correction * figures["kl"]
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * made.entropies
        if self.value_coef:
            figures["value_loss"] = self._value_loss(items, made, batch)
            per_token = per_token + self.value_coef * figures["value_loss"]
        before = now.detach() if self.recorded else old
        sampler = recorded_log_probs([each.rollout for each in items], batch)
        if self.meter is not None:
            scored = not self.recorded and any(each.old is not None for each in items)
            self.meter.add(items, before, sampler, mask, scored=scored)
        if self.correction is not Correction.NONE:
            per_token = per_token * importance_weights(before, sampler, mask, self.correction, self.correction_cap)
        return Loss(summed(torch.where(mask, per_token, 0.0), mask, self.loss_type), sums_of(mask, **figures))

    def weight(self, items: Sequence[Item]) -> float:
        """What ``loss`` of these items is divided by."""
        return total_weight([sum(each.counts) for each in items], self.loss_type, self.most_tokens)

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
        there = mask & torch.tensor([[bool(row)] for row in rows], device=self.device)
        return torch.where(there, given, now.detach())

    def _value_loss(self, items: Sequence[Item], made: Pass, batch: Batch) -> Tensor:
        if made.values is None:
            raise UsageError("a value loss is for a policy with a value head")
        old, returns = ([getattr(each, name) for each in items] for name in ("old_values", "returns"))
        return value_loss(made.values, self._numbers(old, batch), self._numbers(returns, batch), self.value_clip)


def recorded_log_probs(rollouts: Sequence[Rollout], batch: Batch) -> Tensor:
    """The log-probs that the sampler recorded of a batch's answers, (rows, tokens); NaN where none is known."""
    rows = [_numbers(each.log_probs, math.nan) for each in rollouts]
    return rectangle(rows, batch.answers.shape[1], str(batch.answers.device))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _numbers(values: Sequence[float | None], unknown: float = 0.0) -> list[float]:
    return [each if each is not None and math.isfinite(each) else unknown for each in values]
