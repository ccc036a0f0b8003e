"""A causal language model in memory, by transformers: decodes answers, weighs given words, reads hidden states.

Works in batches that it halves where memory runs out. Knows nothing of questions, files or jobs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.lm.backend import Decoded, Decoding, Generation, PromptTokens
from gpuherd.lm.decoding import decode
from gpuherd.lm.forward import (
    BatchReading,
    CausalModel,
    causal_model,
    common_prefix,
    halving,
    padded,
    pieces,
    positions_of,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from gpuherd.lm.guidance.guidance import Guidance
    from gpuherd.models.load.loading import Loaded, LoadReport

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

MOST_NUMBERS = 1 << 26  # logits at a time: 256 MB in float32
WORTH_SHARING = 32  # tokens that all prompts of a batch begin with, from which on they are read once for all


class LanguageModel:
    """A model and its tokenizer.

    Attributes:
        tokenizer: transformers' tokenizer.
        guidance: what guides ``decode``, None where nothing does; log-probs are the model's own in any case.
        most_rows: rows of a batch that were found to fit, None as long as all did.
    """

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        *,
        device: str | None = None,
        exact: bool = False,
        guidance: Guidance | None = None,
    ):
        """``device``: where token ids go, that of the embedding by default. ``exact``: one prompt at a time, each read
        whole, so that nothing depends on what else is asked. Raises BadModel for models with an encoder, UsageError for
        a guide that has another tokenizer."""
        if guidance is not None:
            guidance.refuse_policy(tokenizer)
        self.tokenizer = tokenizer
        self.exact = exact
        self.guidance = guidance
        self.most_rows: int | None = None
        self._report: LoadReport | None = None
        self._model: CausalModel = causal_model(module, device)

    @classmethod
    def of(cls, loaded: Loaded, *, exact: bool = False, guidance: Guidance | None = None) -> LanguageModel:
        """A model that ``models.load.load_model`` loaded."""
        model = cls(loaded.model, loaded.tokenizer, device=loaded.input_device, exact=exact, guidance=guidance)
        model._report = loaded.report
        return model

    @property
    def module(self) -> Any:
        """The model as it is called: PEFT's around it taken off, its adapters active."""
        return self._model.module

    @property
    def most_positions(self) -> int | None:
        """The most tokens of prompt and answer together; None where the model does not say."""
        return self._model.most_positions

    def decode(self, prompts: Sequence[PromptTokens], how: Decoding) -> list[Decoded]:
        """The answers to each prompt, decoded together.

        An answer ends at the last position of the model, and of its guide, even if more tokens are allowed. Where
        memory runs out the batch is halved, among the answers to one prompt too, and later batches are no larger than
        what fitted; a single answer that does not fit raises.

        Raises:
            UsageError: a prompt that is empty, or so long that the model has no position left for an answer.
            BadModel: a guide says NaN.
        """
        most = [
            min(how.max_new_tokens, each.most or how.max_new_tokens, self._most_new_tokens(each, guided=True))
            for each in prompts
        ]

        drawn = range(how.first_sample, how.first_sample + how.samples)
        kinds: list[int | None] = [*([None] if how.greedy else []), *drawn]

        def answers(batch: Sequence[int]) -> list[Generation]:
            places = list(dict.fromkeys(row // len(kinds) for row in batch))
            some = [prompts[place] for place in places]
            wanted = [(places.index(row // len(kinds)), kinds[row % len(kinds)]) for row in batch]
            reading, logits = self._read([each.token_ids for each in some], how.max_new_tokens)
            guiding = None if self.guidance is None else self.guidance.begin([each.token_ids for each in some])
            longest = [most[place] for place in places]
            return decode(reading, logits[:, -1], some, longest, wanted, how, self.tokenizer, guiding)

        found = self._in_batches(prompts, answers, rows_each=len(kinds))
        rows = [found[start : start + len(kinds)] for start in range(0, len(found), len(kinds))]
        return [Decoded(each[0], tuple(each[1:])) if how.greedy else Decoded(None, tuple(each)) for each in rows]

    def weigh(
        self, prompts: Sequence[PromptTokens], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float | None, ...]]:
        """The natural log of the probability that each prompt goes on with each of these tokens, under the raw model.

        All that are one token are read off one forward pass. None where not finite (-inf, NaN).

        Args:
            prompts: a batch.
            continuations: one token or several each; the same for all prompts. A probability is that of the first
                tokens of whatever follows, not of an answer that ends there.
        """
        if any(not each for each in continuations):
            raise UsageError("a continuation has at least one token")

        def of_batch(batch: Sequence[int]) -> list[tuple[float | None, ...]]:
            rows = [prompts[place].token_ids for place in batch]
            reading, logits = self._read(rows, max(map(len, continuations), default=1))
            return weigh(self._model, reading, logits[:, -1], rows, continuations)

        for each in prompts:
            self._most_new_tokens(each)
        return self._in_batches(prompts, of_batch)

    def log_probs(
        self, prompts: Sequence[PromptTokens], answers: Sequence[Sequence[int]]
    ) -> list[tuple[float | None, ...]]:
        """The natural log of each token's probability, of the answer that is given to each prompt (teacher forcing).

        Float32 numbers, none for an empty answer; None where not finite.
        """

        def forced(batch: Sequence[int]) -> list[tuple[float | None, ...]]:
            return log_probs(
                self._model, [prompts[place].token_ids for place in batch], [answers[place] for place in batch]
            )

        whole = [
            PromptTokens(prompt.id, (*prompt.token_ids, *answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        for each in whole:
            self._most_new_tokens(PromptTokens(each.id, each.token_ids[:-1]))  # nothing is read behind the last
        return self._in_batches(whole, forced)

    def hidden(self, prompts: Sequence[PromptTokens]) -> NDArray[np.float32]:
        """The last layer's state of each prompt's last token, behind the final norm: (prompts, width) float32."""
        import numpy as np

        def states(batch: Sequence[int]) -> list[NDArray[np.float32]]:
            ids, mask = padded(self._model, [prompts[place].token_ids for place in batch])
            found = self._model.states(ids, mask, positions_of(mask))[:, -1]
            return list(found.float().cpu().numpy())

        for each in prompts:
            self._most_new_tokens(each)
        found: list[NDArray[np.float32]] = self._in_batches(prompts, states)
        return np.stack(found)

    def record(self) -> dict[str, Any]:
        """How it computes, for a run's record: versions, dtype, attention, and ``most_rows``."""
        import torch
        import transformers

        report = self._report
        return {
            "engine": "transformers",
            "versions": {"torch": str(torch.__version__), "transformers": transformers.__version__},
            "dtype": str(self.module.dtype).removeprefix("torch.") if report is None else str(report.precision),
            "attention": self.module.config._attn_implementation if report is None else report.attention,
            "most_rows": self.most_rows,
        }

    def _most_new_tokens(self, prompt: PromptTokens, *, guided: bool = False) -> int:
        """How many tokens may follow a prompt; ``guided``: of those that the guide can read too. Raises UsageError
        where none."""
        if not prompt.token_ids:
            raise UsageError(f"prompt {prompt.id}: it is empty; a model goes on from one token at least")
        limits = {"model": self.most_positions}
        if guided and self.guidance is not None:
            limits["classifier"] = self.guidance.classifier.most_positions
        room = 1 << 40
        for name, most in limits.items():
            if most is not None:
                room = min(room, most - len(prompt.token_ids))
            if room < 1:
                raise UsageError(
                    f"prompt {prompt.id}: {len(prompt.token_ids)} tokens, and the {name} has {most} places for prompt "
                    "and answer together; cut the prompt"
                )
        return room

    def _read(self, rows: Sequence[Sequence[int]], new_tokens: int) -> tuple[BatchReading, torch.Tensor]:
        """A reading of these prompts, and the logits behind them, (rows, 1, vocabulary)."""

        shared = 0 if self.exact or len(rows) == 1 else common_prefix(rows)
        if shared < WORTH_SHARING or not self._model.goes_on_behind_a_gap(max(map(len, rows)) + new_tokens):
            shared = 0
        if shared:
            reading = BatchReading(self._model, 1)
            first, mask = padded(self._model, [rows[0][:shared]])
            reading.read(first, mask)
            reading.repeat(len(rows))
        else:
            reading = BatchReading(self._model, len(rows))
        ids, mask = padded(self._model, [row[shared:] for row in rows])
        return reading, reading.read(ids, mask)

    def _in_batches(
        self, prompts: Sequence[PromptTokens], answer: Callable[[Sequence[int]], list[Answer]], rows_each: int = 1
    ) -> list[Answer]:
        """What ``answer`` says of each row, asked for as many together as may be, and as fit. Row ``r`` is of prompt
        ``r // rows_each``."""
        import torch

        def smaller(batch: Sequence[int], rows: int) -> None:
            self.most_rows = rows
            logger.warning("out of memory with %d rows; going on with %d", len(batch), rows)

        with torch.inference_mode():
            found = halving(self._together(prompts, rows_each), answer, smaller)
        return [found[row] for row in range(len(prompts) * rows_each)]

    def _together(self, prompts: Sequence[PromptTokens], rows_each: int) -> list[tuple[int, ...]]:
        """Rows that may be asked in one batch: those of one prompt in exact mode, those of prompts of one length where
        the model has a state that padding would pass through, and no more than were found to fit."""
        alike: dict[int, list[int]] = {}
        for row in range(len(prompts) * rows_each):
            length = 0 if self._model.takes_padding else len(prompts[row // rows_each].token_ids)
            alike.setdefault(row // rows_each if self.exact else length, []).append(row)
        return [
            tuple(same[place] for place in piece)
            for same in alike.values()
            for piece in pieces(len(same), self.most_rows)
        ]


# --- Log-probs of tokens that are given, not decoded ------------------------------------------------------------------


def weigh(
    model: CausalModel,
    reading: BatchReading,
    logits: torch.Tensor,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[tuple[float | None, ...]]:
    """Log-probs of each continuation behind each prompt; ``logits`` (prompts, vocabulary) are those behind the prompts,
    which ``reading`` has read."""
    import torch

    starts = [each[0] for each in continuations]
    found: list[list[float]] = torch.log_softmax(logits, dim=-1, dtype=torch.float32)[:, starts].tolist()
    longer = [place for place, each in enumerate(continuations) if len(each) > 1]
    if longer:
        rest = _behind_first(model, reading, prompts, [continuations[place] for place in longer])
        for row, more in zip(found, rest, strict=True):
            for place, each in zip(longer, more, strict=True):
                row[place] = math.fsum((row[place], *each))
    return [tuple(value if math.isfinite(value) else None for value in row) for row in found]


def log_probs(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    most_numbers: int = MOST_NUMBERS,
) -> list[tuple[float | None, ...]]:
    """The log-prob of each token of each answer, None where not finite. ``most_numbers``: logits made at a time."""
    rows = _forced(model, prompts, answers, most_numbers)
    return [tuple(value if math.isfinite(value) else None for value in row) for row in rows]


def _behind_first(
    model: CausalModel, reading: BatchReading, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[list[list[float]]]:
    """For each prompt and continuation the log-probs of its second and later tokens."""
    if not model.takes_padding:
        # A state can't always read on by several tokens at once.
        return [
            [_forced(model, [prompt], [continuation], MOST_NUMBERS)[0][1:] for continuation in continuations]
            for prompt in prompts
        ]
    import torch

    reading.select([row for row in range(len(prompts)) for _ in continuations])
    width = max(map(len, continuations)) - 1
    # Padded at the right: nothing is read behind it.
    ids = torch.tensor([[*each[:-1], *[0] * (width + 1 - len(each))] for each in continuations], device=model.device)
    mask = torch.tensor([[1] * (len(each) - 1) + [0] * (width + 1 - len(each)) for each in continuations])
    logits = reading.read(ids.repeat(len(prompts), 1), mask.to(model.device).repeat(len(prompts), 1), keep=width)
    targets = [[*each[1:], *[0] * (width + 1 - len(each))] for each in continuations] * len(prompts)
    values = _picked(logits, targets)
    count = len(continuations)
    cut = [row[: len(continuations[number % count]) - 1] for number, row in enumerate(values)]
    return [cut[start : start + count] for start in range(0, len(cut), count)]


def _forced(
    model: CausalModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], most_numbers: int
) -> list[list[float]]:
    """The log-prob of each token of each answer. Whole texts are padded at the left, so that the answers' ends lie
    below each other; logits are made of few places at a time."""
    longest = max(map(len, answers))
    if longest == 0:
        return [[] for _ in answers]
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    ids, mask = padded(model, whole)
    wide = ids.shape[1]
    reading = BatchReading(model, len(whole), keeping=model.takes_padding)
    picked: list[list[float]] = [[] for _ in whole]
    vocabulary = model.module.config.get_text_config(decoder=True).vocab_size
    at_once = max(1, most_numbers // (len(whole) * vocabulary)) if model.takes_padding else longest
    start, read = wide - longest, 0  # of the next target; what was read
    while start < wide:
        end = min(wide, start + at_once)
        logits = reading.read(ids[:, read : end - 1], mask[:, read : end - 1], keep=end - start)
        for row, more in zip(picked, _picked(logits, ids[:, start:end].tolist()), strict=True):
            row += more
        start, read = end, end - 1
    return [row[longest - len(answer) :] for row, answer in zip(picked, answers, strict=True)]


def _picked(logits: torch.Tensor, targets: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probs of the targets, (rows, places) each, of logits (rows, places, vocabulary)."""
    import torch

    chosen = torch.tensor(targets, device=logits.device)[..., None]
    values: list[list[float]] = (
        torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(2, chosen)[..., 0].tolist()
    )
    return values
