"""What a run of answers consists of: questions, generations, and a record a question. Plain frozen data.

Knows nothing of files (``record_json`` writes these) and nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Finish(StrEnum):
    """Why a generation ended."""

    EOS = "eos"  # one of the model's end-of-sequence tokens; it is ``Generation.end_id``
    STOP = "stop"  # a stop string: the text ends before it
    LENGTH = "length"  # as many new tokens as were allowed
    NAN = "nan"  # the model gave no finite numbers (NaN, infinity): this is no answer


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its reference answers.

    Attributes:
        id: unique in the data set, and the same whenever that is read.
        question: the text.
        answers: acceptable answers; never empty, and no one of them empty.
        context: what the question is about, where the data set has that.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    context: str | None = None


@dataclass(frozen=True, slots=True)
class Guided:
    """What a classifier that guided an answer did at each of its tokens, both laws at temperature 1.

    Attributes:
        log_probs: natural log of each token's probability under the guided law; float32, None where not finite.
        kl: KL(guided || model) at the token's place, in nats, in the same way.
        end_log_prob, end_kl: those of the end token; None where there is none.
    """

    log_probs: tuple[float | None, ...]
    kl: tuple[float | None, ...]
    end_log_prob: float | None = None
    end_kl: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer, as the model gave it.

    Attributes:
        token_ids: the answer's tokens in order, without the token that ended it. Never made from the text again.
        log_probs: natural log of each token's probability under the model itself: of the raw logits in float32, at
            temperature 1, before any processor. Each is a float32 number; None where it was not finite.
        text: the answer as it was decoded from all these tokens, nothing stripped; special tokens are skipped, but for
            those that mark thoughts (``lm.detokenising``).
        ends: for each token the place in ``text`` behind its last character; not decreasing, the last is ``len(text)``.
            A token that completes no character (half of one in UTF-8, a special token) ends where the one before it
            does. ``text`` is thereby divided among the tokens: see ``pieces``.
        finish: why it ended.
        end_id: the end-of-sequence token, where ``finish`` is EOS, else None.
        end_log_prob: its log-prob, in the same way; None where there is none or it was not finite.
        guided: of an answer that a classifier guided; None where none did.
        in_thought: the prompt ended with an open thought, so that the text begins inside it (``span``).
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float | None, ...]
    text: str
    ends: tuple[int, ...]
    finish: Finish
    end_id: int | None = None
    end_log_prob: float | None = None
    guided: Guided | None = None
    in_thought: bool = False

    @property
    def is_nan(self) -> bool:
        """Whether the model's numbers broke down: then it is no answer. Runs of versions before ``Finish.NAN`` tell
        it by a log-prob that is missing alone."""
        without_end = self.end_id is not None and self.end_log_prob is None
        return self.finish is Finish.NAN or None in self.log_probs or without_end

    @property
    def pieces(self) -> tuple[str, ...]:
        """The part of the text that each token brings; together they are the text."""
        return tuple(self.text[start:end] for start, end in zip((0, *self.ends), self.ends, strict=False))


@dataclass(frozen=True, slots=True)
class Prompted:
    """What the model was given for a question.

    Attributes:
        sha256: of the token ids as little-endian int32, in hex.
        tokens: how many there were.
        cut: how many tokens of the context were left out to make it fit.
    """

    sha256: str
    tokens: int
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """All answers to one question.

    Attributes:
        number: the question's place among those of the run, from 0.
        greedy: the answer by greedy decoding, where it was asked for.
        samples: answers drawn at the run's temperature, in order.
    """

    number: int
    question: Question
    prompt: Prompted
    greedy: Generation | None
    samples: tuple[Generation, ...] = ()

    @property
    def which(self) -> dict[str, Generation]:
        """The answers by name: ``greedy``, ``sample-0``, ``sample-1``, ..."""
        named = {} if self.greedy is None else {"greedy": self.greedy}
        return named | {f"sample-{number}": each for number, each in enumerate(self.samples)}

    @property
    def main(self) -> Generation:
        """The answer that is judged and scored where one has to stand for all: the greedy one, else the first."""
        return self.samples[0] if self.greedy is None else self.greedy
