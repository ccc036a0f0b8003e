"""The guided law of the next token: the reference's most probable tokens, reweighed by a classifier. Pure functions.

eta is that of the papers: the optimum of E[r] - eta KL(pi || pi_ref) with a reward at the end is

    pi(y | x)  proportional to  pi_ref(y | x) E[exp(r / eta)],

the expectation over what follows y under pi_ref (Zhou et al. 2025, arXiv 2502.20548, equations 4 and 5). A small eta
guides strongly. eta has this meaning everywhere in gpuherd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False, slots=True)
class Law:
    """The guided law behind each row, at temperature 1; all but its candidates have the probability 0.

    Attributes:
        candidates: (rows, k) int64, most probable under the reference first.
        log_probs: (rows, k) float64, natural.
        kl: (rows,) float64, nats: KL(guided || reference) over the whole vocabulary, sum_c pi(c) ln(pi(c) / pi_ref(c)).
    """

    candidates: torch.Tensor
    log_probs: torch.Tensor
    kl: torch.Tensor

    def scores(self, vocabulary: int) -> torch.Tensor:
        """(rows, vocabulary) float32 log-probs, -inf for what is no candidate."""
        import torch

        scores = torch.full((len(self.candidates), vocabulary), -torch.inf, device=self.candidates.device)
        return scores.scatter_(1, self.candidates, self.log_probs.float())

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The log-probs of tokens (rows,), float64; -inf where one is no candidate."""
        import torch

        found = self.candidates == tokens[:, None]
        return torch.where(found, self.log_probs, -torch.inf).amax(dim=1)


def most_probable(logits: torch.Tensor, top_k: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's ``top_k`` most probable tokens of each row with their log-probs: (rows, k) int64 and float64.

    Args:
        logits: (rows, tokens), of any float dtype; the log-probs are of their whole softmax, in float32.
        vocabulary: ids from here on the classifier has no embedding of: rows that models are padded by, which stand
            for no token. They are no candidates.
    """
    import torch

    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    usable = log_probs[:, :vocabulary]
    best = usable.topk(min(top_k, usable.shape[1]), dim=-1)
    return best.indices, best.values.double()


def guided_law(candidates: torch.Tensor, reference: torch.Tensor, added: torch.Tensor) -> Law:
    """The law in proportion to pi_ref e^added on the candidates.

    With equal ``added`` (eta infinite, or a classifier that knows nothing) it is the reference's, restricted to them.

    Args:
        candidates: (rows, k).
        reference: (rows, k) float64, the reference's log-probs of them.
        added: (rows, k) float64, ``offsets.offsets``.
    """
    import torch

    log_probs = torch.log_softmax(reference + added, dim=-1)
    # A candidate that can't come (-inf: a vocabulary of few) adds nothing, and not 0 times infinity.
    terms = torch.where(log_probs.isneginf(), 0.0, log_probs.exp() * (log_probs - reference))
    return Law(candidates, log_probs, terms.sum(dim=-1))
