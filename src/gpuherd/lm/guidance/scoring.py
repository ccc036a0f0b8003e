"""Values of the tokens that may come next behind rows that a classifier reads along.

Imports torch through what it calls: imported only where a classifier is asked.
"""

from __future__ import annotations

import torch

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.classifier import Classifier
from gpuherd.lm.guidance.form import Kind


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
