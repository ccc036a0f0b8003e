"""Losses of policy gradients, token by token, and how they are added up. Pure functions of tensors of any float dtype.

All take and return (rows, tokens); what stands where the policy did not choose is left out by ``summed``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.posttrain.policy_gradient.algorithm import LossType

if TYPE_CHECKING:
    from torch import Tensor


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
