"""What the page's script is told: tables, comparisons, curves and jobs as JSON values, completions in chunks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import printable
from gpuherd.lm.backend import beyond_rounding
from gpuherd.posttrain.evaluation.answered import AnsweredProblem, Completion
from gpuherd.posttrain.evaluation.comparing import Comparison
from gpuherd.posttrain.evaluation.gathering import Gathered, Row
from gpuherd.posttrain.evaluation.result import REFERENCE
from gpuherd.posttrain.evaluation.telling import divergence
from gpuherd.posttrain.look.shown import Samples, Shown, Timeline
from gpuherd.qa.intervals import Figure
from gpuherd.report.packing import packed_json

_DIVERGENCES = ("kl", "kl a token")  # of the figures of a row


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


def index_values(shown: Shown, chunks: Chunks) -> dict[str, Any]:
    """The page's index. Names and sentences have what can't be seen written out."""
    found: dict[str, Any] = _printable(
        {
            "confidence": shown.gathered.confidence,
            "reference": REFERENCE,
            "rows": [_row_values(row) for row in shown.gathered.rows],
            "comparisons": [_comparison_values(each) for each in shown.gathered.comparisons],
            "trainings": [
                {
                    "name": each.name,
                    "steps": each.steps,
                    "series": {name: [[x, _short(y)] for x, y in points] for name, points in each.series.items()},
                }
                for each in shown.trainings
            ],
            "timeline": None if shown.timeline is None else _timeline_values(shown.timeline),
            "samples": [
                {"row": _place(shown.gathered, each.row), "problems": min(len(each.answered), chunks.limits.problems)}
                for each in shown.samples[: len(chunks.texts)]
            ],
            "left_out": len(shown.samples) - len(chunks.texts),
        }
    )
    return found


def _place(gathered: Gathered, row: Row) -> int:
    return next(place for place, each in enumerate(gathered.rows) if each is row)


def _row_values(row: Row) -> dict[str, Any]:
    about = row.about
    return {
        "algorithm": about.algorithm,
        "dataset": about.dataset,
        "on": about.evaluated_on,
        "family": about.family,
        "round": about.round,
        "eta": row.eta,
        "own": row.own,
        "seeds": list(row.seeds),
        "figures": {
            name: figure_values(divergence(figure) if name in _DIVERGENCES else figure)
            for name, figure in row.figures.items()
        },
        "bySeed": {
            name: [beyond_rounding(each) if name in _DIVERGENCES else each for each in values]
            for name, values in row.by_seed.items()
        },
        "problems": row.problems,
        "samples": row.samples,
        "estimator": row.estimator,
        "drawn": row.drawn,
        "tie": row.tie,
        "speed": _short(row.tokens_per_second),
        "gpuHours": _short(row.gpu_hours),
    }


def figure_values(figure: Figure) -> dict[str, Any]:
    """A figure as the script reads it."""
    ends = None if figure.interval is None else [_short(figure.interval.low), _short(figure.interval.high)]
    return {"value": _short(figure.value), "ends": ends, "note": figure.note}


def _comparison_values(comparison: Comparison) -> dict[str, Any]:
    return {
        "family": comparison.family,
        "dataset": comparison.dataset,
        "on": comparison.evaluated_on,
        "metric": comparison.metric,
        "differences": [
            {
                "one": each.one,
                "other": each.other,
                "problems": each.problems,
                "figure": figure_values(each.difference),
                "p": _short(each.p),
                "holm": _short(each.p_holm),
                "unit": each.unit,
            }
            for each in comparison.differences
        ],
        "atKl": [
            {"method": each.method, "kl": each.kl, "figure": figure_values(each.metric)}
            for each in comparison.at_equal_kl
        ],
        "differencesAtKl": [
            {
                "one": each.one,
                "other": each.other,
                "kl": each.kl,
                "figure": figure_values(each.difference),
                "p": _short(each.p),
                "holm": _short(each.p_holm),
                "unit": each.unit,
            }
            for each in comparison.differences_at_kl
        ],
        "unmoved": [[method, _short(beyond_rounding(kl))] for method, kl in comparison.unmoved.items()],
        "note": comparison.note,
    }


def _timeline_values(timeline: Timeline) -> dict[str, Any]:
    ends = [each.start if each.end is None else each.end for each in timeline.bars]
    return {
        "bars": [
            [
                each.job,
                each.phase,
                list(each.lanes),
                round(each.start, 2),
                None if each.end is None else round(each.end, 2),
                each.state,
            ]
            for each in timeline.bars
        ],
        "length": max(ends, default=0.0),
        "counts": dict(timeline.counts),
        "failures": [[each.job, each.kind, each.reason, each.final] for each in timeline.failures],
        "hours": {
            algorithm: {phase: _short(hours) for phase, hours in phases.items()}
            for algorithm, phases in timeline.hours.items()
        },
        "gpuHours": timeline.gpu_hours and {name: _short(hours) for name, hours in timeline.gpu_hours.items()},
    }


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


def _printable(value: Any) -> Any:
    """Names and sentences with what can't be seen written out: the script puts them where no element can be."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list | tuple) else value
