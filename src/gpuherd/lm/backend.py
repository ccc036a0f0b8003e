"""What a language model is asked to decode, what comes back, and the protocol of the backends. No torch.

``lm.model.LanguageModel`` is the backend of Hugging Face models with our own decoding, ``lm.vllm.VllmBackend`` that of
vLLM.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from gpuherd.errors import UsageError


@dataclass(frozen=True, slots=True)
class Decoding:
    """How answers are decoded; every setting is said, none is inherited from a checkpoint's generation config.

    Attributes:
        greedy: one answer of the most probable tokens.
        samples: so many drawn answers besides.
        first_sample: the number of the first drawn answer, for drawing some now and others later.
        temperature, top_p, top_k: of the draws; 1, 1 and 0 are the model's own distribution. Recorded log-probs are
            those of the raw model in any case, without top_p and top_k.
        tempered: log-probs are recorded at the temperature, as what samples is weighed in policy gradients.
        max_new_tokens: the most tokens of an answer, the one that ends it counted.
        end_ids: tokens that end an answer; all that the model's configs and tokenizer name.
        stop: strings that end an answer before them.
        seed: of the draws: each answer's random numbers depend on it, the question's id and the sample's number alone.
    """

    greedy: bool = True
    samples: int = 0
    first_sample: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    end_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    tempered: bool = False

    def __post_init__(self) -> None:
        if not self.greedy and self.samples == 0:
            raise UsageError("nothing to decode: neither greedy nor samples")
        if min(self.samples, self.first_sample, self.top_k) < 0 or self.max_new_tokens < 1:
            raise UsageError("samples, first_sample and top_k are 0 or more, max_new_tokens 1 or more")
        if not 0 < self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise UsageError("temperature is above 0, top_p above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as token ids, special tokens included; ``id`` is the question's (random numbers depend on it);
    ``most``: the most tokens of an answer to it, where that is less than what is allowed to all."""

    id: str
    token_ids: tuple[int, ...]
    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise UsageError(f"prompt {self.id}: an answer of at most {self.most} tokens; the least is 1")


class Finish(StrEnum):
    """Why a generation ended."""

    EOS = "eos"  # one of the model's end-of-sequence tokens; it is ``Generation.end_id``
    STOP = "stop"  # a stop string: the text ends before it
    LENGTH = "length"  # the maximum of new tokens
    NAN = "nan"  # the model's numbers were not finite (NaN, infinity): this is no answer


@dataclass(frozen=True, slots=True)
class GuidedTokens:
    """What guidance did at each token of an answer. Both distributions are at temperature 1, before top-k and top-p;
    the guided one gives what is no candidate the probability 0.

    Attributes:
        log_probs: the token's natural log-prob under the guided distribution.
        kl: KL(guided || reference) at the token's place, over the whole vocabulary, in nats.
        end_log_prob, end_kl: those of the end token, which stands in neither; None where there is none.

    None stands for what is not finite.
    """

    log_probs: tuple[float | None, ...]
    kl: tuple[float | None, ...]
    end_log_prob: float | None = None
    end_kl: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A decoded answer, from the backend to the files of a run.

    Attributes:
        token_ids: the answer's tokens in order, without the token that ended it; never tokenised from the text.
        log_probs: natural log of each token's probability under the model: of the raw logits in float32, at
            temperature 1 (at the sampling temperature with ``Decoding.tempered``), before any processor. Each is a
            float32 number, or None if it was not finite.
        text: decoded from all these tokens, not stripped; special tokens are skipped, except those that mark thoughts
            (``lm.tokens``).
        ends: for each token the index in ``text`` after its last character; not decreasing, the last is ``len(text)``.
            A token that completes no character (half of one in UTF-8, a special token) ends where the previous one
            does. So the text is divided among the tokens: see ``pieces``.
        finish: why it ended.
        end_id: the end-of-sequence token if ``finish`` is EOS, else None.
        end_log_prob: its log-prob, in the same way; None if there is none or it was not finite.
        guided: what the classifier did, of a guided answer; None otherwise.
        in_thought: the prompt ended with an open thought, so that the text begins inside it (``qa.span``); False from a
            backend, which knows no thoughts.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    text: str
    ends: tuple[int, ...]
    finish: Finish
    end_id: int | None = None
    end_log_prob: float | None = None
    guided: GuidedTokens | None = None
    in_thought: bool = False

    @property
    def is_nan(self) -> bool:
        """Whether the model's numbers were not finite, so that it is no answer. Runs of versions without ``Finish.NAN``
        have only a missing log-prob."""
        without_end = self.end_id is not None and self.end_log_prob is None
        return self.finish is Finish.NAN or None in self.log_probs or without_end

    @property
    def pieces(self) -> tuple[str, ...]:
        """The part of the text that each token adds; together they are the text."""
        return tuple(self.text[start:end] for start, end in zip((0, *self.ends), self.ends, strict=False))


@dataclass(frozen=True, slots=True)
class Decoded:
    """The answers to one prompt."""

    greedy: Generation | None
    samples: Sequence[Generation] = ()


class Backend(Protocol):
    """A model in memory that decodes answers. Log-probs are those of the raw model in float32, by every backend."""

    def decode(self, prompts: Sequence[PromptTokens], how: Decoding) -> Sequence[Decoded]:
        """The answers to each prompt of a batch, in its order."""

    def record(self) -> Mapping[str, Any]:
        """How it computes, for the run's record: the engine, its versions, the dtype."""


# Log-probs are taken in float32, whose steps at 16 are 2e-6 and at 1 are 1e-7: of equal laws, or of two passes of one
# model, the mean divergence comes out some 1e-8 to 1e-7 nats to either side of 0.
_LEAST_NATS = 1e-6


def beyond_rounding(nats: float) -> float:
    """A KL divergence for people and tables: 0 where it is no more than rounding, so that equal laws don't seem to
    differ.

    >>> beyond_rounding(-4e-08), beyond_rounding(-0.0), beyond_rounding(0.25), beyond_rounding(-0.01)
    (0.0, 0.0, 0.25, -0.01)
    """
    return 0.0 if abs(nats) < _LEAST_NATS else nats


def as_float32(value: float) -> float:
    """The nearest float32, which is what is recorded of a number."""
    number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return number
