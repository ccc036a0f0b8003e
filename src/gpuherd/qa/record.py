"""What a run of answers consists of: questions, generations, and a record a question; and their lines of JSON.

Plain frozen data that knows nothing of files and of models. Every number that was written is read again to the bit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpuherd.errors import GpuherdError


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


class BadRecord(GpuherdError):
    """A line of a run's file is not what gpuherd writes there."""


def line_of(answered: Answered) -> str:
    """The record as one line of JSON, without the line break. Equal records give equal lines."""
    value = {
        "number": answered.number,
        **question_values(answered.question),
        "prompt": {
            "sha256": answered.prompt.sha256,
            "tokens": answered.prompt.tokens,
            "cut": answered.prompt.cut,
        },
        "greedy": None if answered.greedy is None else _generation_values(answered.greedy),
        "samples": [_generation_values(each) for each in answered.samples],
    }
    # ASCII alone: no reader can take a line separator in an answer for the end of the line.
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def answered_of(line: str | bytes) -> Answered:
    """The record that ``line_of`` wrote. Raises BadRecord."""
    try:
        value = json.loads(line)
        prompt = value["prompt"]
        return Answered(
            number=_whole(value["number"]),
            question=question_of(value),
            prompt=Prompted(str(prompt["sha256"]), _whole(prompt["tokens"]), _whole(prompt["cut"])),
            greedy=None if value["greedy"] is None else _generation_of(value["greedy"]),
            samples=tuple(_generation_of(each) for each in value["samples"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise BadRecord(f"no record of an answer: {type(problem).__name__}: {problem}") from None


def question_values(question: Question) -> dict[str, Any]:
    """A question as JSON values."""
    return {
        "id": question.id,
        "question": question.question,
        "answers": list(question.answers),
        "context": question.context,
    }


def question_of(value: Mapping[str, Any]) -> Question:
    """The question that ``question_values`` wrote. Raises KeyError, TypeError."""
    context = value["context"]
    answers = value["answers"]
    if not all(isinstance(each, str) for each in (value["id"], value["question"], *answers)):
        raise TypeError("question and answers are texts")
    if context is not None and not isinstance(context, str):
        raise TypeError("a context is a text")
    return Question(value["id"], value["question"], tuple(answers), context)


def _generation_values(generation: Generation) -> dict[str, Any]:
    return {
        "text": generation.text,
        "finish": generation.finish.value,
        "token_ids": list(generation.token_ids),
        "log_probs": [_shortest(each) for each in generation.log_probs],
        "ends": list(generation.ends),
        "end_id": generation.end_id,
        "end_log_prob": _shortest(generation.end_log_prob),
        **({} if generation.guided is None else {"guided": _guided_values(generation.guided)}),
        **({"in_thought": True} if generation.in_thought else {}),
    }


def _guided_values(guided: Guided) -> dict[str, Any]:
    return {
        "log_probs": [_shortest(each) for each in guided.log_probs],
        "kl": [_shortest(each) for each in guided.kl],
        "end_log_prob": _shortest(guided.end_log_prob),
        "end_kl": _shortest(guided.end_kl),
    }


def _guided_of(value: Any, tokens: int) -> Guided | None:
    if value is None:
        return None
    log_probs, kl = (tuple(_float32(each) for each in value[name]) for name in ("log_probs", "kl"))
    if not len(log_probs) == len(kl) == tokens:
        raise ValueError("as many guided log-probs and divergences as tokens")
    return Guided(log_probs, kl, _float32(value["end_log_prob"]), _float32(value["end_kl"]))


def _generation_of(value: Mapping[str, Any]) -> Generation:
    token_ids = tuple(_whole(each) for each in value["token_ids"])
    log_probs = tuple(_float32(each) for each in value["log_probs"])
    ends = tuple(_whole(each) for each in value["ends"])
    text = value["text"]
    if not isinstance(text, str) or not len(token_ids) == len(log_probs) == len(ends):
        raise ValueError("as many log-probs and ends as tokens")
    if any(later < earlier for earlier, later in zip((0, *ends), ends, strict=False)) or (ends or (0,))[-1] != len(
        text
    ):
        raise ValueError("the tokens' ends don't divide the text")
    end_id = None if value["end_id"] is None else _whole(value["end_id"])
    return Generation(
        token_ids,
        log_probs,
        text,
        ends,
        Finish(value["finish"]),
        end_id,
        _float32(value["end_log_prob"]),
        _guided_of(value.get("guided"), len(token_ids)),
        in_thought=value.get("in_thought") is True,
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _shortest(value: float | None) -> float | None:
    """The number of the fewest digits (at most 9) that is the same as a float32: a third of the digits of a float64."""
    if value is None:
        return None
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if _as_float32(short) == value:
            return short
    return float(f"{value:.9g}")


def _float32(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return _as_float32(float(value))


def _as_float32(value: float) -> float:
    number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return number
