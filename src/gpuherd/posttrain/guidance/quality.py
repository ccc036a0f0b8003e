"""How well a classifier predicts, of completions that it did not learn from: accuracy, and AUROC by the token's place.

Plain figures of plain numbers. A figure that is not defined is left out, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Predicted:
    """What was predicted of one completion.

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
