"""Guidance for any ``generate`` of transformers: a logits processor.

Imports torch and transformers: imported only where models are called.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.classifier import Classifier
from gpuherd.lm.guidance.guidance import Guidance, Guiding
from gpuherd.lm.guidance.guide import Guide


class GuidedLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Puts the guided law in place of the reference's, before temperature, top-k and top-p.

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
        """Log-probs under the guided law, (rows, vocabulary), -inf for what is no candidate.

        Args:
            input_ids: (rows, tokens): prompts and what was generated.
            scores: (rows, vocabulary): logits or log-probs of the reference.

        Raises UsageError where a row is longer than the classifier's positions, or the mask is of other prompts.
        """
        guiding = self._followed(input_ids)
        self._guiding, self._seen = guiding, input_ids
        return guiding.law(scores).scores(scores.shape[1]).to(scores.dtype)

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
