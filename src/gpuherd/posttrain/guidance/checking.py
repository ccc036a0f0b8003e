"""Validation of a classifier in training, on examples that it does not learn from: loss, accuracy, and AUROC by the
token's place. A figure that is not defined is left out, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.lm.forward import plan_batches
from gpuherd.posttrain.guidance import losses
from gpuherd.posttrain.guidance.data import Example
from gpuherd.posttrain.guidance.losses import Objective
from gpuherd.posttrain.guidance.options import Loss, ValueOptions

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gpuherd.posttrain.engine.train_engine import TrainEngine


def validate(
    trainee: TrainEngine,
    examples: Sequence[Example],
    objective: Objective,
    options: ValueOptions,
    amp_dtype: str | None,
) -> dict[str, float]:
    """The mean loss and ``quality``'s figures over these examples, each named ``validation_``...; the same in every
    process. Of ``bradley_terry``, whose level means nothing, the share of comparisons in order instead."""
    found, total, weight = _predicted(trainee, trainee.world.share(examples), objective, options, amp_dtype)
    parts = trainee.world.gather((found, total, weight))
    whole = math.fsum(each for _, _, each in parts)
    figures = {"loss": math.fsum(each for _, each, _ in parts) / whole} if whole else {}
    predictions = [example for part, _, _ in parts for example in part]
    if objective.loss is Loss.BRADLEY_TERRY:
        figures |= pairs_in_order(predictions)
    else:
        ends = (options.V_min, options.V_max) if objective.atoms is not None else (0.0, 1.0)
        figures |= quality([each for example in predictions for each in example], *ends)
    return {f"validation_{name}": value for name, value in figures.items()}


def _predicted(
    trainee: TrainEngine,
    examples: Sequence[Example],
    objective: Objective,
    options: ValueOptions,
    amp_dtype: str | None,
) -> tuple[list[tuple[Predicted, ...]], float, float]:
    """The predictions of this process's examples, the sum of their losses and its weight."""
    import torch

    kind = objective.device.partition(":")[0]
    dtype: Any = None if amp_dtype is None else getattr(torch, amp_dtype)
    found: list[tuple[Predicted, ...]] = []
    total = weight = 0.0
    widths = [max(len(each.ids) for each in example) for example in examples]
    batches = plan_batches(widths, rows=trainee.steps.micro_batch_size, most_tokens=options.max_batch_num_tokens)
    with trainee.gathered(), torch.inference_mode(), torch.autocast(kind, dtype, enabled=dtype is not None):
        trainee.plain.eval()
        for arrays in losses.batches_of(examples, batches, 0):
            batch = losses.collate(arrays, objective.device)
            z = trainee.plain(batch.ids, batch.mask)
            total += float(objective.of(z, batch))
            weight += objective.weight(arrays)
            values = z.float() if objective.loss is Loss.BRADLEY_TERRY else losses.expected(z, objective.atoms)
            rows = iter(zip(values, batch.labelled, batch.target.tolist(), strict=True))
            found += [
                tuple(
                    Predicted(tuple(row[labelled].tolist()), target) for row, labelled, target in _next(rows, example)
                )
                for example in arrays
            ]
    return found, total, weight


def _next(rows: Any, example: Sequence[object]) -> list[Any]:
    return [next(rows) for _ in example]


QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predictions of one completion.

    Attributes:
        expected: the expected reward at each labelled token, in their order.
        target: what it earned.
    """

    expected: tuple[float, ...]
    target: float


def quality(predictions: Sequence[Predicted], v_min: float = 0.0, v_max: float = 1.0) -> dict[str, float]:
    """Figures by name, of the tokens of all completions:

    - ``error``: the mean squared difference of the expected reward and the reward;
    - ``accuracy``: the share of tokens at which both lie on the same side of the middle of [v_min, v_max] (where all
      rewards are one of the two ends);
    - ``auroc``: the chance that a token of a completion of the larger reward is predicted higher than one of the
      smaller (ties count half), and the same of each quarter of the completion, ``auroc_q1`` to ``auroc_q4``.
    """
    pairs = [(each.target, value) for each in predictions for value in each.expected]
    if not pairs:
        return {}
    figures = {"error": sum((value - target) ** 2 for target, value in pairs) / len(pairs)}
    if all(target in (v_min, v_max) for target, _ in pairs):
        middle = (v_min + v_max) / 2
        figures["accuracy"] = sum((value > middle) == (target > middle) for target, value in pairs) / len(pairs)
        named = {"auroc": range(QUARTERS), **{f"auroc_q{number + 1}": (number,) for number in range(QUARTERS)}}
        for name, quarters in named.items():
            some = [
                (each.target > middle, value)
                for each in predictions
                for place, value in enumerate(each.expected)
                if QUARTERS * place // len(each.expected) in quarters
            ]
            area = auroc([value for high, value in some if high], [value for high, value in some if not high])
            if area is not None:
                figures[name] = area
    return figures


def auroc(positives: ArrayLike, negatives: ArrayLike) -> float | None:
    """The chance that a positive scores above a negative, ties half: Mann and Whitney's U over the number of pairs.

    None where either is empty.

    >>> auroc([0.9, 0.5], [0.5, 0.1])
    0.875
    """
    import numpy as np
    from scipy.stats import rankdata

    high, low = np.asarray(positives, dtype=np.float64), np.asarray(negatives, dtype=np.float64)
    if not high.size or not low.size:
        return None
    ranks = rankdata(np.concatenate([high, low]))[: high.size]
    return float((ranks.sum() - high.size * (high.size + 1) / 2) / (high.size * low.size))


def pairs_in_order(comparisons: Sequence[Sequence[Predicted]]) -> dict[str, float]:
    """``pair_accuracy``: of comparisons (the preferred one first), the share in which the preferred one is predicted
    higher, by the mean over its tokens; ties count half."""
    gaps = [_mean(chosen.expected) - _mean(rejected.expected) for chosen, rejected in comparisons]
    if not gaps:
        return {}
    return {"pair_accuracy": sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps) / len(gaps)}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
