"""From the rows of all rounds to what a classifier learns from and what it is checked on. Pure.

Rounds are put together (DAgger: Ross et al. 2011, as in Q#'s Algorithm 1). Some problems are kept apart by their ids:
the same in every round, so that no classifier is checked on what one before it has learnt.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Mode
from gpuherd.posttrain.guidance import labels
from gpuherd.posttrain.guidance.draws import uniform
from gpuherd.posttrain.guidance.labels import Lesson
from gpuherd.posttrain.guidance.options import Loss, ValueOptions
from gpuherd.posttrain.guidance.scale import Scale, atoms, scale_of
from gpuherd.posttrain.types import Comparison, Rollout, Row

T = TypeVar("T")

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Data:
    """What one training is about.

    Attributes:
        lessons: to learn from.
        held_out: of other problems, for checking.
        loss: by which it is learnt.
        atoms: of the histogram, empty for a head of one logit.
        told: counts and the scale, for ``classifier.json``, the log and people.
    """

    lessons: tuple[Lesson, ...]
    held_out: tuple[Lesson, ...]
    loss: Loss
    atoms: tuple[float, ...]
    told: dict[str, Any]


def of_rollouts(rounds: Sequence[Sequence[Row]], options: ValueOptions, reward_range: Range | None = None) -> Data:
    """Tokens labelled with what their completion earned: 1 and 0 where rewards say right or wrong and no more, else the
    reward on the histogram's scale.

    Args:
        rounds: rollouts, a sequence a round.
        reward_range: of the task; where it is None or endless, the rewards of the rows tell it.

    Raises UsageError where nothing is left to learn from, and for a loss of comparisons.
    """
    asked = [rows_of(Rollout, rows) for rows in rounds]
    known = labels.verifiable(each for rows in asked for each in rows)
    loss = options.loss_type or (Loss.BCE if known else Loss.MLE)
    if loss is Loss.BRADLEY_TERRY:
        raise UsageError("loss_type=bradley_terry learns from comparisons; these rows are single completions")
    rollouts, counts = _informative(asked) if known else ([each for rows in asked for each in rows], {})
    scale = _scale(rollouts, options, loss, reward_range, known=known)
    lessons = [labels.of_rollout(each, scale(each.reward)) for each in rollouts]
    return _divided(lessons, loss, options, {"rollouts": sum(map(len, asked)), **counts, "scale": scale.to_dict()})


def _informative(rounds: Sequence[Sequence[Rollout]]) -> tuple[list[Rollout], dict[str, int]]:
    """The rollouts of each round's problems that are neither all right nor all wrong, and how many are."""
    kept = [labels.informative(rows) for rows in rounds]
    rollouts = [each for one in kept for each in one.rollouts]
    right, wrong = sum(one.all_right for one in kept), sum(one.all_wrong for one in kept)
    if not rollouts:
        raise UsageError(
            f"nothing to learn from: of {sum(map(len, rounds))} rollouts all problems' are all right or all wrong "
            f"({right} and {wrong} problems); collect more samples of each, or other problems"
        )
    return rollouts, {"problems_all_right": right, "problems_all_wrong": wrong}


def of_comparisons(
    rounds: Sequence[Sequence[Row]], options: ValueOptions, scores: Sequence[tuple[float, float]] | None = None
) -> Data:
    """Tokens labelled with what their side of a comparison is worth: 1 for the preferred and 0 for the other (PITA), or
    their scores on the histogram's scale (Q#-HF).

    Args:
        rounds: comparisons, a sequence a round.
        scores: of the chosen and the rejected completion of each, in the same order; None: 1 and 0.
    """
    comparisons = [each for rows in rounds for each in rows_of(Comparison, rows)]
    if not comparisons:
        raise UsageError("nothing to learn from: no comparison was collected; collect more samples or other problems")
    loss = options.loss_type or (Loss.BCE if scores is None else Loss.MLE)
    if scores is None:
        pairs = [(1.0, 0.0)] * len(comparisons)
        scale = Scale(0.0, 1.0, *_ends(options, loss), "preferences")
    else:
        pairs = list(scores)
        scale = scale_of((each for pair in pairs for each in pair), *_ends(options, loss))
    lessons = [
        labels.of_comparison(each, scale(chosen), scale(rejected))
        for each, (chosen, rejected) in zip(comparisons, pairs, strict=True)
    ]
    return _divided(lessons, loss, options, {"comparisons": len(comparisons), "scale": scale.to_dict()})


def digest(lessons: Iterable[Lesson]) -> str:
    """What tells lessons apart: 16 hex digits of the BLAKE2b digest of all ids, labels and targets, in their order."""
    told = hashlib.blake2b(digest_size=8)
    for lesson in lessons:
        for each in lesson:
            told.update(struct.pack("<qd", len(each.ids), each.target))
            told.update(array("q", each.ids).tobytes() + bytes(each.labelled))
    return told.hexdigest()


def kept_apart(problem: str, share: float) -> bool:
    """Whether a problem is for checking and not for learning: by its id alone, whatever the seed of a round."""
    return uniform(0, "validation", problem, 0) < share


def rows_of(kind: type[T], rows: Iterable[Row]) -> list[T]:
    """The rows, which are all of this kind. Raises UsageError where one is not."""
    found: list[T] = []
    for each in rows:
        if not isinstance(each, kind):
            raise UsageError(
                f"rows of a {type(each).__name__.lower()} among those of a {kind.__name__.lower()}: they "
                "were collected by another algorithm; give this one a folder of its own"
            )
        found.append(each)
    return found


def _ends(options: ValueOptions, loss: Loss) -> Range:
    """What targets lie between: a probability's ends, or the histogram's."""
    return (options.V_min, options.V_max) if loss is Loss.MLE else (0.0, 1.0)


def _scale(
    rollouts: Sequence[Rollout], options: ValueOptions, loss: Loss, reward_range: Range | None, *, known: bool
) -> Scale:
    ends = _ends(options, loss)
    if known:
        return Scale(0.0, 1.0, *ends, "right or wrong")
    return scale_of((each.reward for each in rollouts), *ends, reward_range)


def _divided(lessons: Sequence[Lesson], loss: Loss, options: ValueOptions, told: dict[str, Any]) -> Data:
    there = [each for each in lessons if each]
    learnt = tuple(each for each in there if not kept_apart(each[0].problem, options.validation_share))
    held_out = tuple(each for each in there if kept_apart(each[0].problem, options.validation_share))
    if not learnt:
        raise UsageError(
            f"nothing to learn from: {len(lessons)} rows, {len(lessons) - len(there)} of them with no token to label, "
            f"{len(held_out)} kept apart for validation; collect more, or lower validation_share"
        )
    if loss is not Loss.MLE and options.guidance.mode is Mode.DISTRIBUTIONAL:
        raise UsageError(f"guidance.mode=distributional is for loss_type=mle, and it is {loss}")
    if loss is Loss.MLE and options.guidance.mode is Mode.BERNOULLI:
        raise UsageError("guidance.mode=bernoulli is for a loss of one logit, and loss_type is mle")
    if loss is not Loss.MLE and (options.V_min, options.V_max) != (0, 1):
        raise UsageError(
            f"V_min={options.V_min}, V_max={options.V_max}: the loss is {loss} here, which predicts 0 to 1; set "
            "loss_type=mle, or leave both out"
        )
    counts = {
        **told,
        "learnt_from": len(learnt),
        "held_out": len(held_out),
        "without_a_token": len(lessons) - len(there),
        "tokens": sum(example.tokens for each in learnt for example in each),
    }
    histogram = atoms(options.num_atoms, options.V_min, options.V_max) if loss is Loss.MLE else ()
    return Data(learnt, held_out, loss, histogram, counts)
