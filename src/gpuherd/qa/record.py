"""The records of a run of answers: questions, one record for each with its answers; and their lines of JSON.

Frozen data that knows no files and loads no models. Every number is read again as it was written, to the bit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import GpuherdError
from gpuherd.lm.backend import Finish, Generation, GuidedTokens


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its reference answers.

    Attributes:
        id: unique in the data set, and the same whenever it is read.
        question: the text.
        answers: acceptable answers; there is one at least, and none is empty.
        context: the text that the question is about, if the data set has one.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    context: str | None = None


@dataclass(frozen=True, slots=True)
class Prompted:
    """The prompt of a question, as it is recorded.

    Attributes:
        sha256: of the token ids as little-endian int32, in hex.
        tokens: their number.
        cut: how many tokens of the context were dropped to make it fit.
    """

    sha256: str
    tokens: int
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """All answers to one question.

    Attributes:
        number: the question's index in the run, from 0.
        greedy: the answer by greedy decoding, if the run has one.
        samples: the sampled answers, in order.
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
        """The answer that is judged and scored where there can be only one: the greedy one, else the first."""
        return self.samples[0] if self.greedy is None else self.greedy


class BadRecord(GpuherdError):
    """A line of a run's file is no record."""


def line_of(answered: Answered) -> str:
    """The record as one line of JSON without the line break. Equal records give equal lines."""
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
    # ASCII only: no reader can take a line separator in an answer for the end of the line.
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def answered_of(line: str | bytes) -> Answered:
    """The record that ``line_of`` wrote. Raises BadRecord."""
    try:
        value = json.loads(line)
        prompt = value["prompt"]
        return Answered(
            number=_integer(value["number"]),
            question=question_of(value),
            prompt=Prompted(str(prompt["sha256"]), _integer(prompt["tokens"]), _integer(prompt["cut"])),
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


def _guided_values(guided: GuidedTokens) -> dict[str, Any]:
    return {
        "log_probs": [_shortest(each) for each in guided.log_probs],
        "kl": [_shortest(each) for each in guided.kl],
        "end_log_prob": _shortest(guided.end_log_prob),
        "end_kl": _shortest(guided.end_kl),
    }


def _guided_of(value: Any, tokens: int) -> GuidedTokens | None:
    if value is None:
        return None
    log_probs, kl = (tuple(_float32(each) for each in value[name]) for name in ("log_probs", "kl"))
    if not len(log_probs) == len(kl) == tokens:
        raise ValueError("as many guided log-probs and divergences as tokens")
    return GuidedTokens(log_probs, kl, _float32(value["end_log_prob"]), _float32(value["end_kl"]))


def _generation_of(value: Mapping[str, Any]) -> Generation:
    token_ids = tuple(_integer(each) for each in value["token_ids"])
    log_probs = tuple(_float32(each) for each in value["log_probs"])
    ends = tuple(_integer(each) for each in value["ends"])
    text = value["text"]
    if not isinstance(text, str) or not len(token_ids) == len(log_probs) == len(ends):
        raise ValueError("as many log-probs and ends as tokens")
    if any(later < earlier for earlier, later in zip((0, *ends), ends, strict=False)) or (ends or (0,))[-1] != len(
        text
    ):
        raise ValueError("the tokens' ends don't divide the text")
    end_id = None if value["end_id"] is None else _integer(value["end_id"])
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


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _shortest(value: float | None) -> float | None:
    """The number with the fewest digits (at most 9) that is equal as a float32: far fewer than a float64 has."""
    if value is None:
        return None
    for digits in (6, 7, 8):
        short = float(f"{value:.{digits}g}")
        if as_float32(short) == value:
            return short
    return float(f"{value:.9g}")


def _float32(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return as_float32(float(value))


def as_float32(value: float) -> float:
    """The nearest float32, which is what a record keeps of a number."""
    number: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return number
