"""Decoding that a classifier guides: it reads the same rows as the policy and gives the guided distribution of the next
token, for our own decoding and, as a logits processor, for any ``generate`` of transformers.

Imports torch and transformers: imported only where models are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LogitsProcessor

from gpuherd.errors import BadModel, UsageError
from gpuherd.lm.guidance.classifier import Classifier, load_classifier
from gpuherd.lm.guidance.guide import (
    Guide,
    GuidedDistribution,
    Head,
    Kind,
    guided_distribution,
    most_probable,
    offsets,
    refuse_mode,
    refuse_other_tokens,
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
        guiding = Guiding(self, len(ids))
        guiding.read(ids, mask)
        return guiding


class Guiding:
    """Rows that are decoded, as the classifier has read them."""

    def __init__(self, guidance: Guidance, rows: int):
        """``rows`` of no token yet."""
        self._guide, self._classifier = guidance.guide, guidance.classifier
        self._model = guidance.classifier.module
        self._reading = guidance.classifier.readings.new(rows)
        self._lengths = torch.zeros(rows, dtype=torch.long)
        self._last: torch.Tensor | None = None
        self._device = guidance.classifier.device

    def read(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Reads on: (rows, new) int64; mask 0 for padding. Raises UsageError where a row is longer than the
        classifier's positions, or has a token that it has no embedding of."""
        self._grow(mask.sum(dim=1))
        ids = self._known(ids.masked_fill(mask == 0, 0))
        self._last = self._reading.read(ids.to(self._device), mask.to(self._device))

    def distribution(self, logits: torch.Tensor) -> GuidedDistribution:
        """The guided distribution behind each row, on the logits' device.

        Args:
            logits: (rows, vocabulary) of the reference, at temperature 1.

        Raises BadModel where the classifier says NaN.
        """
        candidates, reference = most_probable(logits, self._guide.top_k, self._model.vocabulary)
        values = self._values(candidates.to(self._device))
        added = offsets(values, self._guide.mode, self._guide.eta, self._model.form.atoms).to(logits.device)
        if not bool(added.isfinite().all()):
            raise BadModel(
                f"classifier {self._classifier.name}: its value of a token is no number (NaN); its training has "
                "failed, or its dtype is too narrow (try float32)"
            )
        return guided_distribution(candidates, reference, added)

    def take(self, tokens: Sequence[int] | torch.Tensor, counts: Sequence[bool] | torch.Tensor | None = None) -> None:
        """Each row's next token; behind ``distribution``. ``counts``: False for rows that have ended."""
        taken = torch.as_tensor(tokens)
        counted = torch.ones(len(taken), dtype=torch.bool) if counts is None else torch.as_tensor(counts)
        if self._model.form.kind is Kind.V:
            self._grow(counted.long())
            taken = self._known(taken.masked_fill(~counted, 0))
            self._reading.take(taken.to(self._device), counted.to(self._device))
        else:
            self.read(taken[:, None], counted.long()[:, None])

    def select(self, rows: Sequence[int]) -> None:
        """The rows that go on, in this order; one may be there several times."""
        index = torch.tensor(list(rows))
        self._lengths = self._lengths[index]
        index = index.to(self._device)
        self._reading.select(index)
        if self._last is not None:
            self._last = self._last.index_select(0, index)

    def _values(self, candidates: torch.Tensor) -> torch.Tensor:
        """Of the tokens (rows, k), each as the next of its row: (rows, k) or (rows, k, atoms) float32."""
        if self._model.form.kind is Kind.V:
            return self._model.values_at(self._reading.branch(candidates))
        if self._last is None:
            raise RuntimeError("tokens follow a row that was read")
        return self._model.values_of(self._last, candidates)

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        highest = int(tokens.max())
        if highest >= self._model.vocabulary:
            raise UsageError(
                f"classifier {self._classifier.name} has embeddings of {self._model.vocabulary} tokens, and a row has "
                f"the token {highest}"
            )
        return tokens

    def _grow(self, more: torch.Tensor) -> None:
        self._lengths = self._lengths + more.cpu()
        # Of kind V a candidate stands behind it.
        longest = int(self._lengths.max()) + (self._model.form.kind is Kind.V)
        most = self._classifier.most_positions
        if most is not None and longest > most:
            raise UsageError(
                f"classifier {self._classifier.name} has {most} places for prompt and answer together, and a row has "
                f"{longest} tokens with its next one; allow fewer new tokens, or cut the prompts"
            )


# ---- for any generate of transformers: a logits processor ------------------------------------------------------------


class GuidedLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Puts the guided distribution in place of the reference's, before temperature, top-k and top-p.

    It follows each row: a token that was chosen is read once, rows that beams reorder are found by their tokens, and
    what can't be followed is read anew. It may be used for one ``generate`` after another of prompts with this mask.

    >>> processor = GuidedLogitsProcessor(classifier, guide, attention_mask=batch["attention_mask"])  # doctest: +SKIP
    >>> model.generate(**batch, logits_processor=LogitsProcessorList([processor]))  # doctest: +SKIP
    """

    def __init__(self, classifier: Classifier, guide: Guide, *, attention_mask: torch.Tensor | None = None):
        """``attention_mask``: of the prompts, (prompts, tokens), padded at the left; None: no row is padded. Raises
        UsageError where the guide's mode and the classifier's head don't go together."""
        self._guidance = Guidance(classifier, guide)
        self._prompts = attention_mask
        self._guiding: Guiding | None = None
        self._seen: torch.LongTensor | None = None

    @torch.no_grad()
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Log-probs under the guided distribution, (rows, vocabulary), -inf for what is no candidate.

        Args:
            input_ids: (rows, tokens): prompts and what was generated.
            scores: (rows, vocabulary): logits or log-probs of the reference.

        Raises UsageError where a row is longer than the classifier's positions, or the mask is of other prompts.
        """
        guiding = self._followed(input_ids)
        self._guiding, self._seen = guiding, input_ids
        return guiding.distribution(scores).scores(scores.shape[1]).to(scores.dtype)

    def _followed(self, ids: torch.Tensor) -> Guiding:
        """These rows, read: those of the step before with one more token each, or anew."""
        if self._guiding is None or self._seen is None or ids.shape[1] != self._seen.shape[1] + 1:
            return self._anew(ids)
        places = _places(self._seen, ids[:, :-1])
        if places is None:
            return self._anew(ids)
        if places != list(range(len(self._seen))):
            self._guiding.select(places)
        # Of unknown tokens only the padding of a row that has ended can come: none was a candidate.
        self._guiding.take(ids[:, -1], ids[:, -1] < self._guidance.classifier.module.vocabulary)
        return self._guiding

    def _anew(self, ids: torch.Tensor) -> Guiding:
        mask = torch.ones_like(ids)
        if self._prompts is not None:
            prompts, tokens = self._prompts.shape
            if len(ids) % prompts or tokens > ids.shape[1]:
                raise UsageError(
                    f"the processor was made for the mask of {prompts} prompts of {tokens} tokens, and generates from "
                    f"{len(ids)} rows of {ids.shape[1]}; make one for each batch"
                )
            # generate puts the sequences of one prompt side by side.
            mask[:, :tokens] = self._prompts.to(ids.device).repeat_interleave(len(ids) // prompts, dim=0)
        return self._guidance.begin_padded(ids, mask)


def _places(before: torch.Tensor, now: torch.Tensor) -> list[int] | None:
    """Of which row each is the same; None where one is new."""
    if before.shape == now.shape and bool((before == now).all()):
        return list(range(len(now)))
    there: dict[tuple[int, ...], int] = {}
    for place, row in enumerate(before.tolist()):
        there.setdefault(tuple(row), place)
    found = [there.get(tuple(row)) for row in now.tolist()]
    return [place for place in found if place is not None] if None not in found else None
