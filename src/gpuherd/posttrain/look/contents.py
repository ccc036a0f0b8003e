"""The completions that a page has room for, packed: a text for each policy. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import printable
from gpuherd.lm.backend import beyond_rounding
from gpuherd.posttrain.evaluation.answered import AnsweredProblem, Completion
from gpuherd.posttrain.look.shown import Samples
from gpuherd.report.packing import packed_json


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of each: problems of a policy, completions of a problem, characters of a text."""

    problems: int
    completions: int
    characters: int


# The first that fits is taken.
LEVELS = (Limits(40, 8, 4000), Limits(40, 4, 1500), Limits(20, 4, 800), Limits(10, 2, 400), Limits(4, 1, 200))


@dataclass(frozen=True, slots=True)
class Chunks:
    """The completions of each policy, packed; a text each, in the order of ``Shown.samples``; as many as fit."""

    texts: tuple[str, ...]
    limits: Limits


def chunks_of(samples: Sequence[Samples], room: int) -> Chunks:
    """The completions, as many and as long as fit into so many characters."""
    for limits in LEVELS:
        texts, left = [], room
        for each in samples:
            text = packed_json([_problem_values(row, limits) for row in each.answered[: limits.problems]])
            left -= len(text)
            if left < 0:
                break
            texts.append(text)
        else:
            return Chunks(tuple(texts), limits)
    return Chunks(tuple(texts), LEVELS[-1])


def _problem_values(answered: AnsweredProblem, limits: Limits) -> dict[str, Any]:
    return {
        "id": printable(answered.problem),
        "prompt": _cut(answered.prompt, limits.characters),
        "completions": [_completion_values(each, limits) for each in answered.completions[: limits.completions]],
        "more": max(0, len(answered.completions) - limits.completions),
    }


def _completion_values(completion: Completion, limits: Limits) -> list[Any]:
    return [
        _cut(completion.text, limits.characters),
        _short(completion.reward),
        completion.correct,
        len(completion.ids),
        completion.finished,
        None if completion.kl is None else _short(beyond_rounding(completion.kl)),
        None if completion.note is None else _cut(completion.note, 300),
    ]


def _cut(text: str, most: int) -> str | list[Any]:
    """The text, or its beginning and how many characters are left out."""
    return text if len(text) <= most else [text[:most], len(text) - most]


def _short(value: float | None) -> float | None:
    """Five digits: more than the page shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
