"""Decodes answers to a batch of prompts, the greedy one and the drawn ones of a prompt together, from one reading.

The prompts are read once; their cache is then repeated for each answer. Of each step a token and a float32 log-prob a
row are kept, never the logits. Rows that have ended are taken out when they are many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuherd.lm.backend import Decoding, GuidedTokens, PromptTokens, Tokens
from gpuherd.lm.forward import Reading
from gpuherd.lm.sampling import choose, draw_key
from gpuherd.lm.text import Growing, cut

if TYPE_CHECKING:
    from array import array

    import torch

    from gpuherd.lm.guidance.guidance import Guiding
    from gpuherd.lm.guidance.law import Law


Wanted = tuple[int, int | None]

_CROWDED = 0.75  # of the rows: with fewer left than this the others are taken out, which costs a copy of the cache


@dataclass(eq=False, slots=True)
class Row:
    """An answer as it comes.

    Attributes:
        prompt: its place in the batch.
        sample: the answer's number, None for the greedy one.
        most: the most tokens of it, the one that ends it counted.
        log_probs: 4 bytes a token.
        broken: places of tokens whose log-probs are not finite.
        guided: of each token, the end token too, its log-prob under the guided law and the law's KL there.
    """

    prompt: int
    sample: int | None
    most: int
    growing: Growing
    log_probs: array[float]
    broken: set[int] = field(default_factory=set)
    guided: list[tuple[float | None, float | None]] = field(default_factory=list)
    end_id: int | None = None
    end_log_prob: float | None = None
    stop_at: int | None = None
    ended: bool = False

    def take(self, token_id: int, log_prob: float | None, how: Decoding) -> None:
        """The next token; decides whether the answer ends by it."""
        if token_id in how.end_ids:
            self.end_id, self.end_log_prob, self.ended = token_id, log_prob, True
            return
        if log_prob is None:
            self.broken.add(len(self.log_probs))
        self.log_probs.append(0.0 if log_prob is None else log_prob)
        self.growing.add(token_id)
        # A token that no distribution gave makes no stop string.
        self.stop_at = None if log_prob is None else self.growing.find(how.stop)
        # Behind logits that are no distribution there is nothing to go on with.
        self.ended = self.stop_at is not None or log_prob is None or len(self.log_probs) >= self.most

    def tokens(self) -> Tokens:
        """The answer, cut before its stop string."""
        text, ends = self.growing.divided()
        if self.stop_at is not None:
            text, ends = cut(text, ends, self.stop_at)
        log_probs = (None if place in self.broken else each for place, each in enumerate(self.log_probs[: len(ends)]))
        return Tokens(
            token_ids=tuple(self.growing.token_ids[: len(ends)]),
            log_probs=tuple(log_probs),
            text=text,
            ends=ends,
            end_id=self.end_id,
            end_log_prob=self.end_log_prob,
            stopped=self.stop_at is not None,
            guided=self._guided(len(ends)),
        )

    def _guided(self, tokens: int) -> GuidedTokens | None:
        if not self.guided:
            return None
        log_probs, kl = zip(*self.guided, strict=True)
        end = (None, None) if self.end_id is None else self.guided[-1]
        return GuidedTokens(log_probs[:tokens], kl[:tokens], *end)


def decode(
    reading: Reading,
    logits: torch.Tensor,
    prompts: Sequence[PromptTokens],
    most: Sequence[int],
    wanted: Sequence[Wanted],
    how: Decoding,
    tokenizer: Any,
    guiding: Guiding | None = None,
) -> list[Tokens]:
    """The answers that are wanted, in their order.

    Args:
        reading: of the prompts, a row each.
        logits: behind each prompt, (prompts, vocabulary).
        prompts: their ids, for the draws.
        most: the most tokens of an answer to each.
        wanted: of each answer its prompt's place, and its number, None for the greedy one.
        guiding: a classifier that has read the prompts too, a row each, and chooses the tokens.
    """
    from array import array

    rows = [Row(prompt, sample, most[prompt], Growing(tokenizer), array("f")) for prompt, sample in wanted]
    owners = [prompt for prompt, _ in wanted]
    if owners != list(range(len(prompts))):
        if len(prompts) == 1:
            reading.repeat(len(owners))
        else:
            reading.select(owners)
        logits = logits[owners]
        if guiding is not None:
            guiding.select(owners)
    _run(reading, logits, rows, prompts, how, guiding)
    return [row.tokens() for row in rows]


def _run(
    reading: Reading,
    logits: torch.Tensor,
    rows: Sequence[Row],
    prompts: Sequence[PromptTokens],
    how: Decoding,
    guiding: Guiding | None,
) -> None:
    import torch

    there = list(rows)  # those that the reading has, in its order; some may have ended
    step = 0
    while True:
        keys = {
            place: draw_key(how.seed, prompts[row.prompt].id, row.sample, step)
            for place, row in enumerate(there)
            if row.sample is not None and not row.ended
        }
        law = None if guiding is None else guiding.law(logits)
        ids, log_probs = choose(logits, keys, how, None if law is None else law.scores(logits.shape[1]))
        if law is not None:
            _note(law, ids, there)
        for row, token_id, log_prob in zip(there, ids, log_probs, strict=True):
            if not row.ended:
                row.take(token_id, log_prob, how)
        going = [place for place, row in enumerate(there) if not row.ended]
        if not going:
            return
        if guiding is not None:
            guiding.take(ids, [not row.ended for row in there])
        if len(going) < _CROWDED * len(there):
            reading.select(going)
            if guiding is not None:
                guiding.select(going)
            there = [there[place] for place in going]
            ids = [ids[place] for place in going]
        # Rows that have ended read on, and what they read does not count: their positions stay within the model's.
        mask = torch.tensor([[0 if row.ended else 1] for row in there], device=reading.mask.device)
        logits = reading.read(torch.tensor(ids, device=mask.device)[:, None], mask)[:, -1]
        step += 1


def _note(law: Law, ids: Sequence[int], rows: Sequence[Row]) -> None:
    """What the guided law says of the tokens that were chosen."""
    import torch

    log_probs = law.of(torch.tensor(ids, device=law.kl.device))
    for row, *told in zip(rows, log_probs.tolist(), law.kl.tolist(), strict=True):
        if not row.ended:
            log_prob, kl = (value if math.isfinite(value) else None for value in told)
            row.guided.append((log_prob, kl))
