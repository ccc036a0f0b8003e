"""The guided law of the next token: the reference's most probable tokens, reweighed. Pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
