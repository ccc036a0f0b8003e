"""How far the policy that sampled is from the same policy as the trainer computes it, and weights that correct for it.

A sampler of its own (vLLM) rounds in other places than the trainer, so that its draws come from a slightly other law,
and a policy gradient of them is biased. w = pi_train(y_t) / pi_sampler(y_t), both with the weights that sampled, is the
importance weight of a token; truncated weights bound its variance (Ionides 2008, doi 10.1198/106186008X320456; for this
mismatch: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError

if TYPE_CHECKING:
    import torch

    from gpuherd.posttrain.engine.dist_env import DistEnv


class Correction(StrEnum):
    """Which factor a token's gradient gets; C is the cap, w a token's weight, and W a sequence's: their product."""

    NONE = "none"  # 1
    TOKEN = "token"  # noqa: S105 - no password: min(w, C)
    SEQUENCE = "sequence"  # min(W, C)
    MASKED_TOKEN = "masked_token"  # noqa: S105 - no password: w where it is in [1/C, C], else 0
    MASKED_SEQUENCE = "masked_sequence"  # W where it is in [1/C, C], else 0


ROUNDING = 1e-4  # nats: log-probs of one token by the same weights in other batches differ by less in float32


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Figures of the tokens of a batch.

    Attributes:
        tokens: that are compared.
        mean, max: of w.
        gap: the largest |ln w|.
        kl: the estimate of KL(sampler || trainer), the mean of -ln w, in nats a token.
    """

    tokens: int
    mean: float
    max: float
    gap: float
    kl: float

    def figures(self, *, rounding: bool = False) -> dict[str, float]:
        """For the curves of a training; none where the log-probs differ by rounding alone, unless that is wanted."""
        if self.gap <= ROUNDING and not rounding:
            return {}
        return {"sampler_weight": self.mean, "sampler_weight_max": self.max, "sampler_kl": self.kl}


def pooled(parts: Sequence[Mismatch | None]) -> Mismatch | None:
    """The figures of several batches together; None where none of them has any."""
    known = [each for each in parts if each is not None]
    tokens = sum(each.tokens for each in known)
    if not tokens:
        return None
    return Mismatch(
        tokens,
        math.fsum(each.tokens * each.mean for each in known) / tokens,
        max(each.max for each in known),
        max(each.gap for each in known),
        math.fsum(each.tokens * each.kl for each in known) / tokens,
    )


def mismatch(train: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> Mismatch | None:
    """The figures of a batch; None where no token has both log-probs.

    Args:
        train, sampler: log-probs of the tokens that were drawn, (rows, tokens), at the sampling temperature; NaN where
            one is not known.
        mask: which tokens the policy drew, the same shape, bool.
    """
    import torch

    log_w, known = _log_weights(train, sampler, mask)
    found = log_w[known]
    if not found.numel():
        return None
    w = found.exp()
    mean, most, gap, kl = torch.stack([w.mean(), w.max(), found.abs().max(), -found.mean()]).tolist()
    return Mismatch(found.numel(), mean, most, gap, kl)


class MismatchMeter:
    """Figures of the mismatch of each step, over the tokens of all processes: of each rollout as it is first learnt
    from. Where its log-probs before the step were not computed apart, that is when the policy is nearest to it.

    Args:
        module: the policy in training.
        apart: the sampler computes apart from it: figures are given where log-probs differ by rounding alone too.
    """

    def __init__(self, module: Any, *, apart: bool = False):
        self._module, self._apart = module, apart
        self._seen: set[int] = set()
        self._found: list[Mismatch | None] = []
        self._steady: bool | None = None

    def add(
        self,
        items: Sequence[object],
        train: torch.Tensor,
        sampler: torch.Tensor,
        mask: torch.Tensor,
        *,
        scored: bool = False,
    ) -> None:
        """Notes the rows of a batch that were not seen in this step. Of a module in which something drops out nothing
        is noted: the difference would be that of the dropout.

        Args:
            items: what the rows are of, the same objects whenever they are learnt from.
            train, sampler, mask: as of ``mismatch``.
            scored: ``train`` is of the policy before the step, without dropout.
        """
        import torch

        new = [id(each) not in self._seen for each in items]
        if not any(new) or not (scored or self._is_steady()):
            return
        self._seen |= {id(each) for each in items}
        self._found.append(mismatch(train, sampler, mask & torch.tensor(new, device=mask.device)[:, None]))

    def figures(self, world: DistEnv) -> dict[str, float]:
        """``sampler_weight`` (the mean of w), ``sampler_weight_max`` and ``sampler_kl`` (nats a token) since this was
        last called, in all processes together. Empty where log-probs differ by rounding alone and the sampler is not
        ``apart``, and where only passes with dropout were there to compare with."""
        found = pooled(world.gather(pooled(self._found)))
        self._seen, self._found = set(), []
        return {} if found is None else found.figures(rounding=self._apart)

    def _is_steady(self) -> bool:
        """Whether two passes give the same: nothing drops out."""
        from torch import nn

        if self._steady is None:
            self._steady = not any(isinstance(each, nn.Dropout) and each.p > 0 for each in self._module.modules())
        return self._steady


def importance_weights(
    train: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor, correction: Correction, cap: float = 2.0
) -> torch.Tensor:
    """The factor of each token's gradient, (rows, tokens) float32, without a gradient of its own; 0 outside the mask.

    A token without both log-probs counts as w = 1. Arguments as of ``mismatch``.

    Raises UsageError for a cap below 1.
    """
    import torch

    if not 1 <= cap < float("inf"):
        raise UsageError(f"the cap of importance weights is {cap}; it is a finite number of at least 1")
    drawn = mask.bool()
    log_w, _ = _log_weights(train, sampler, drawn)
    if correction is Correction.NONE:
        return drawn.float()
    if correction in (Correction.SEQUENCE, Correction.MASKED_SEQUENCE):
        log_w = log_w.sum(dim=-1, keepdim=True).expand_as(log_w)
    # In logs: the product of a long answer's weights may be more than a float holds.
    bound = torch.tensor(cap, dtype=torch.float64).log()
    factor = log_w.clamp(max=bound).exp()
    if correction in (Correction.MASKED_TOKEN, Correction.MASKED_SEQUENCE):
        factor = factor.masked_fill(log_w.abs() > bound, 0.0)
    return factor.masked_fill(~drawn, 0.0).float()


def _log_weights(train: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ln w of each token, float64, 0 where one of the two is not known or the token is not drawn; and where it is."""
    log_w = train.detach().double() - sampler.detach().double()
    known = mask.bool() & log_w.isfinite()
    return log_w.masked_fill(~known, 0.0), known
