"""A classifier beside a policy while it decodes: it reads the rows that the policy reads, and says the guided law.

Imports torch through what it calls: imported only where models are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpuherd.errors import BadModel
from gpuherd.lm.guidance.classifier import Classifier, load_classifier
from gpuherd.lm.guidance.form import Head
from gpuherd.lm.guidance.guide import Guide
from gpuherd.lm.guidance.law import Law, guided_law, most_probable
from gpuherd.lm.guidance.offsets import offsets, refuse_mode
from gpuherd.lm.guidance.scoring import CandidateScorer
from gpuherd.lm.guidance.tokens import refuse_other_tokens


@dataclass(eq=False)
class Guidance:
    """A classifier in memory and how it is used; ``LanguageModel(..., guidance=...)`` decodes by it.

    Raises UsageError where the guide's mode and the classifier's head don't go together.
    """

    classifier: Classifier
    guide: Guide

    def __post_init__(self) -> None:
        refuse_mode(self.guide.mode, atoms=self.classifier.form.head is Head.ATOMS)

    @classmethod
    def load(cls, guide: Guide, *, device: str = "cpu", dtype: str | None = None) -> Guidance:
        """With the classifier of the guide's folder. Raises what ``load_classifier`` raises."""
        return cls(load_classifier(guide.classifier, device, dtype), guide)

    def at(self, eta: float) -> Guidance:
        """The same classifier at another eta."""
        return Guidance(self.classifier, replace(self.guide, eta=eta))

    def refuse_policy(self, tokenizer: Any) -> None:
        """Raises UsageError where a policy with this tokenizer can't be guided, with the first token that differs."""
        refuse_other_tokens(tokenizer.get_vocab(), self.classifier.tokenizer.get_vocab(), self.classifier.name)

    def begin(self, rows: Sequence[Sequence[int]]) -> Guiding:
        """Reads rows of tokens, of one token at least each."""
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        return self.begin_padded(ids, mask)

    def begin_padded(self, ids: torch.Tensor, mask: torch.Tensor) -> Guiding:
        """The same for rows that are padded at the left: (rows, tokens) int64, mask 0 for padding."""
        scorer = CandidateScorer(self.classifier, len(ids))
        scorer.read(ids, mask)
        return Guiding(self, scorer)


class Guiding:
    """Rows that are decoded, as the classifier has read them."""

    def __init__(self, guidance: Guidance, scorer: CandidateScorer):
        self._guidance, self._scorer = guidance, scorer

    def law(self, logits: torch.Tensor) -> Law:
        """The guided law behind each row, on the logits' device.

        Args:
            logits: (rows, vocabulary) of the reference, at temperature 1.

        Raises BadModel where the classifier says NaN.
        """
        guide, classifier = self._guidance.guide, self._guidance.classifier
        candidates, reference = most_probable(logits, guide.top_k, classifier.module.vocabulary)
        values = self._scorer.values(candidates)
        added = offsets(values, guide.mode, guide.eta, classifier.form.atoms).to(logits.device)
        if not bool(added.isfinite().all()):
            raise BadModel(
                f"classifier {classifier.name}: its value of a token is no number (NaN); its training has failed, or "
                "its dtype is too narrow (try float32)"
            )
        return guided_law(candidates, reference, added)

    def take(self, tokens: Sequence[int] | torch.Tensor, counts: Sequence[bool] | torch.Tensor | None = None) -> None:
        """Each row's next token; behind ``law``. ``counts``: False for rows that have ended."""
        taken = torch.as_tensor(tokens)
        counted = torch.ones(len(taken), dtype=torch.bool) if counts is None else torch.as_tensor(counts)
        self._scorer.take(taken, counted)

    def select(self, rows: Sequence[int]) -> None:
        """The rows that go on, in this order; one may be there several times."""
        self._scorer.select(torch.tensor(list(rows)))
