"""What a classifier's prediction adds to the reference's log-prob of a candidate token. Pure functions of tensors.

eta is that of the papers: the optimum of E[r] - eta KL(pi || pi_ref) with a reward at the end is

    pi(y | x)  proportional to  pi_ref(y | x) E[exp(r / eta)],

the expectation over what follows y under pi_ref (Zhou et al. 2025, arXiv 2502.20548, equations 4 and 5). A small eta
guides strongly. Whoever needs eta's meaning finds it here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Mode

if TYPE_CHECKING:
    import torch


def offsets(values: torch.Tensor, mode: Mode, eta: float, atoms: Sequence[float] = ()) -> torch.Tensor:
    """What is added to the log-prob of each candidate, float64.

    Args:
        values: the classifier's logits: (...) for a Bernoulli head, (..., atoms) where atoms are given.
        mode: BERNOULLI (Q#): ln(1 - p + p e^(1/eta)) with p = sigmoid(value). DISTRIBUTIONAL (Q#):
            ln sum_i p_i e^(a_i/eta) with p = softmax(values). EXPECTATION (controlled decoding, Mudgal et al. 2024,
            arXiv 2310.17022): the expected reward over eta, of either head.
        eta: above 0; with infinity all are 0.
        atoms: the rewards that a distributional head predicts, in its order.

    Raises UsageError where the mode and the head don't go together.
    """
    import torch
    from torch.nn.functional import logsigmoid

    refuse_mode(mode, atoms=bool(atoms))
    wide = values.double()
    if not atoms:
        if mode is Mode.EXPECTATION:
            return torch.sigmoid(wide) / eta
        return torch.logaddexp(logsigmoid(-wide), logsigmoid(wide) + 1 / eta)
    rewards = torch.tensor(list(atoms), dtype=torch.float64, device=wide.device)
    if mode is Mode.EXPECTATION:
        return torch.softmax(wide, dim=-1) @ rewards / eta
    return torch.logsumexp(torch.log_softmax(wide, dim=-1) + rewards / eta, dim=-1)


def refuse_mode(mode: Mode, *, atoms: bool) -> None:
    """Raises UsageError where a classifier with, or without, atoms can't guide in this mode."""
    if mode is Mode.BERNOULLI and atoms:
        raise UsageError("guide mode bernoulli: the classifier predicts atoms of a reward; use distributional")
    if mode is Mode.DISTRIBUTIONAL and not atoms:
        raise UsageError("guide mode distributional: the classifier predicts one probability; use bernoulli")
