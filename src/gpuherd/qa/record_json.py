"""Records of answers as lines of JSON, and back: every number that was written is read again to the bit."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from gpuherd.errors import GpuherdError
from gpuherd.qa.record import Answered, Finish, Generation, Guided, Prompted, Question


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
