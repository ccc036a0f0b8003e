"""A classifier next to a policy while it decodes: it reads the same rows, and gives the guided law of the next token.

Imports torch: imported only where models are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpuherd.errors import BadModel, UsageError
from gpuherd.lm.guidance.classifier import Classifier, load_classifier
from gpuherd.lm.guidance.guide import Guide, Head, Kind, refuse_other_tokens
from gpuherd.lm.guidance.law import Law, guided_law, most_probable, offsets, refuse_mode


class CandidateScorer:
    """Rows of tokens as a classifier has read them. Tensors are on the classifier's device, ``device``."""

    def __init__(self, classifier: Classifier, rows: int):
        """``rows`` of no token yet."""
        self._model = classifier.module
        self._most = classifier.most_positions
        self._name = classifier.name
        self._reading = classifier.readings.new(rows)
        self._lengths = torch.zeros(rows, dtype=torch.long)
        self._last: torch.Tensor | None = None
        self.device = classifier.device

    def read(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Reads on: (rows, new) int64; mask 0 for padding. Raises UsageError where a row is longer than the
        classifier's positions, or has a token that it has no embedding of."""
        self._grow(mask.sum(dim=1))
        ids = self._known(ids.masked_fill(mask == 0, 0))
        self._last = self._reading.read(ids.to(self.device), mask.to(self.device))

    def values(self, candidates: torch.Tensor) -> torch.Tensor:
        """Of the tokens (rows, k), each as the next of its row: (rows, k) or (rows, k, atoms) float32."""
        candidates = candidates.to(self.device)
        if self._model.form.kind is Kind.V:
            return self._model.values_at(self._reading.branch(candidates))
        if self._last is None:
            raise RuntimeError("tokens follow a row that was read")
        return self._model.values_of(self._last, candidates)

    def take(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Each row's next token, (rows,); behind ``values``. ``counts``: of bool, False for rows that have ended."""
        if self._model.form.kind is Kind.V:
            self._grow(counts.long())
            tokens = self._known(tokens.masked_fill(~counts, 0))
            self._reading.take(tokens.to(self.device), counts.to(self.device))
        else:
            self.read(tokens[:, None], counts.long()[:, None])

    def select(self, rows: torch.Tensor) -> None:
        """The rows that go on, in this order; one may be there several times."""
        self._lengths = self._lengths[rows.cpu()]
        rows = rows.to(self.device)
        self._reading.select(rows)
        if self._last is not None:
            self._last = self._last.index_select(0, rows)

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        highest = int(tokens.max())
        if highest >= self._model.vocabulary:
            raise UsageError(
                f"classifier {self._name} has embeddings of {self._model.vocabulary} tokens, and a row has the token "
                f"{highest}"
            )
        return tokens

    def _grow(self, more: torch.Tensor) -> None:
        self._lengths = self._lengths + more.cpu()
        # Of kind V a candidate stands behind it.
        longest = int(self._lengths.max()) + (self._model.form.kind is Kind.V)
        if self._most is not None and longest > self._most:
            raise UsageError(
                f"classifier {self._name} has {self._most} places for prompt and answer together, and a row has "
                f"{longest} tokens with its next one; allow fewer new tokens, or cut the prompts"
            )


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
