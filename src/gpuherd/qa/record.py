"""The records of a run of answers: questions, one record for each with its answers; and their lines of JSON.

Frozen data that knows no files and loads no models. Every number is read again as it was written, to the bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from gpuherd.errors import GpuherdError
from gpuherd.lm.backend import Generation, GuidedTokens, as_float32
from gpuherd.runs import records


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

    @property
    def main_name(self) -> str:
        """The name of ``main``."""
        return "sample-0" if self.greedy is None else "greedy"


class BadRecord(GpuherdError):
    """A line of a run's file is no record."""


def line_of(answered: Answered) -> str:
    """The record as one line of JSON without the line break. Equal records give equal lines."""
    value = {
        "number": answered.number,
        **records.jsonable(answered.question),
        "prompt": records.jsonable(answered.prompt),
        "greedy": None if answered.greedy is None else _generation_values(answered.greedy),
        "samples": [_generation_values(each) for each in answered.samples],
    }
    # ASCII only: no reader can take a line separator in an answer for the end of the line.
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def answered_of(line: str | bytes) -> Answered:
    """The record that ``line_of`` wrote. Raises BadRecord."""
    try:
        value = json.loads(line)
        return Answered(
            number=records.read(int, value["number"]),
            question=records.read(Question, value),
            prompt=records.read(Prompted, value["prompt"]),
            greedy=None if value["greedy"] is None else _generation_of(value["greedy"]),
            samples=tuple(map(_generation_of, value["samples"])),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as problem:
        raise BadRecord(f"no record of an answer: {type(problem).__name__}: {problem}") from None


def _generation_values(generation: Generation) -> dict[str, Any]:
    return {
        "text": generation.text,
        "finish": generation.finish.value,
        "token_ids": generation.token_ids,
        "log_probs": [*map(_shortest, generation.log_probs)],
        "ends": generation.ends,
        "end_id": generation.end_id,
        "end_log_prob": _shortest(generation.end_log_prob),
        **({} if generation.guided is None else {"guided": _guided_values(generation.guided)}),
        **({"in_thought": True} if generation.in_thought else {}),
    }


def _guided_values(guided: GuidedTokens) -> dict[str, Any]:
    return {
        "log_probs": [*map(_shortest, guided.log_probs)],
        "kl": [*map(_shortest, guided.kl)],
        "end_log_prob": _shortest(guided.end_log_prob),
        "end_kl": _shortest(guided.end_kl),
    }


def _generation_of(value: Any) -> Generation:
    found: Generation = records.read(Generation, value)
    ends, tokens = found.ends, len(found.token_ids)
    if not tokens == len(found.log_probs) == len(ends):
        raise ValueError("as many log-probs and ends as tokens")
    if sorted((0, *ends)) != [0, *ends] or (0, *ends)[-1] != len(found.text):
        raise ValueError("the tokens' ends don't divide the text")
    guided = found.guided
    if guided is not None:
        if not len(guided.log_probs) == len(guided.kl) == tokens:
            raise ValueError("as many guided log-probs and divergences as tokens")
        log_probs, kl = _in_float32(guided.log_probs), _in_float32(guided.kl)
        guided = GuidedTokens(log_probs, kl, *_in_float32((guided.end_log_prob, guided.end_kl)))
    log_probs, (end,) = _in_float32(found.log_probs), _in_float32((found.end_log_prob,))
    return replace(found, log_probs=log_probs, end_log_prob=end, guided=guided)


def _in_float32(values: tuple[float | None, ...]) -> tuple[float | None, ...]:
    """Numbers are written in fewer digits than a float64 has."""
    return tuple(None if each is None else as_float32(each) for each in values)


def _shortest(value: float | None) -> float | None:
    """The number with the fewest digits (at most 9) that is equal as a float32: far fewer than a float64 has."""
    if value is None:
        return None
    single = as_float32(value)
    for digits in (6, 7, 8):
        short = float(f"{single:.{digits}g}")
        if as_float32(short) == single:
            return short
    return float(f"{single:.9g}")
