"""Weighted NLL, ``sum_i w_i n_i / sum_i w_i`` over the greedy answer's tokens, for each of 42 weightings.

They are those that nllSAR compared with the uniform one (which is ``ln-nll``).

Each gives weights (N) of an answer's N tokens, from their places, their NLLs ``n_i = -l_i``, or their relevance; only
their ratios matter. ``i`` counts from 0; ``u = i / (N - 1)`` goes from 0 to 1 (a token alone weighs 1).

Against nllSAR's code (phase 6): its thirds end at 0.33 N and 0.67 N, so that three tokens have no beginning; here they
end at N/3 and 2N/3. Its fallback from a weighted mean to a sum, where all weights are 0, is left out: there all tokens
weigh alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpuherd.qa.measures import given
from gpuherd.qa.measures.evidence import Evidence, EvidenceNeed, ScoredText
from gpuherd.qa.measures.registry import measure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

Scheme = Callable[["AnswerTokens"], "Array"]

_LITTLE = 0.1  # of tokens outside the first or last few, or the (un)certain quarter
_LEAST = 0.01  # of tokens that are negated


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """An answer's tokens: NLLs (N), all finite, and relevance (N) where it is measured."""

    nll: Array
    relevance: Array | None = None


@dataclass(frozen=True, slots=True)
class Weighting:
    """A named weighting: its formula in words for lists, and whether it looks at relevance."""

    name: str
    formula: str
    scheme: Scheme
    relevance: bool = False


def by_place(shape: Callable[[int], Array]) -> Scheme:
    """A weighting that depends on the number of tokens alone; each is computed once."""

    @functools.lru_cache(maxsize=512)
    def kept(tokens: int) -> Array:
        weights = np.ones(1) if tokens == 1 else shape(tokens)
        weights.flags.writeable = False
        return weights

    return lambda tokens: kept(len(tokens.nll))


def _along(tokens: int) -> Array:
    return np.arange(tokens) / (tokens - 1)


def _power(power: float, *, falling: bool = False) -> Scheme:
    return by_place(lambda count: (1 - _along(count) if falling else _along(count)) ** power)


def _exponential(rate: float) -> Scheme:
    """``exp(rate u)``, moved and stretched to [0, 1]."""

    def shape(count: int) -> Array:
        weights = np.exp(rate * _along(count))
        stretched: Array = (weights - weights.min()) / (weights.max() - weights.min())
        return stretched

    return by_place(shape)


def _from_middle(count: int) -> Array:
    """Distance from the middle, 1 at both ends."""
    distance: Array = np.abs(2 * _along(count) - 1)
    return distance


def _gaussian(count: int) -> Array:
    centre, width = (count - 1) / 2, 0.3 * count
    weights: Array = np.exp(-((np.arange(count) - centre) ** 2) / (2 * width**2))
    return weights


def _places(chosen: Callable[[Array, int], NDArray[np.bool_]], inside: float, outside: float) -> Scheme:
    """``inside`` where ``chosen(i, N)``, else ``outside``."""
    return by_place(lambda count: np.where(chosen(np.arange(count, dtype=np.float64), count), inside, outside))


def _first_and_last(places: Array, count: int) -> NDArray[np.bool_]:
    few = min(3, count // 2)
    return (places < few) | (places >= count - few)


def _nll_power(power: float) -> Scheme:
    """``(n_i / max n)^power``: divided first, so that no power overflows."""

    def scheme(tokens: AnswerTokens) -> Array:
        largest = tokens.nll.max()
        if largest <= 0:
            return np.zeros_like(tokens.nll)
        weights: Array = np.maximum(tokens.nll / largest, 0.0) ** power
        return weights

    return scheme


def _confidence(tokens: AnswerTokens) -> Array:
    """The probabilities, from the largest: their ratios survive where they themselves underflow."""
    weights: Array = np.exp(tokens.nll.min() - tokens.nll)
    return weights


def _surprisal(tokens: AnswerTokens) -> Array:
    least, largest = tokens.nll.min(), tokens.nll.max()
    if largest <= least:
        return np.ones_like(tokens.nll)
    weights: Array = (tokens.nll - least) / (largest - least) + 0.1
    return weights


def _quantile(values: Array, share: float) -> float:
    """Linear between the two nearest, as ``numpy.percentile`` does by default, at a tenth of its cost."""
    place = (len(values) - 1) * share
    below = math.floor(place)
    inside = np.partition(values, (below, min(below + 1, len(values) - 1)))[below : below + 2]
    return float(inside[0] + (inside[-1] - inside[0]) * (place - below))


def _most_uncertain(tokens: AnswerTokens) -> Array:
    return np.where(tokens.nll >= _quantile(tokens.nll, 0.75), 1.0, _LITTLE)


def _least_uncertain(tokens: AnswerTokens) -> Array:
    return np.where(tokens.nll <= _quantile(tokens.nll, 0.25), 1.0, _LITTLE)


def _relevance(tokens: AnswerTokens) -> Array:
    if tokens.relevance is None:
        raise ValueError("this weighting looks at relevance")
    return tokens.relevance


def _mixed(shape: Scheme, share: float) -> Scheme:
    return lambda tokens: share * shape(tokens) + (1 - share) * _relevance(tokens)


def _times(first: Scheme, second: Scheme) -> Scheme:
    return lambda tokens: first(tokens) * second(tokens)


_MIDDLE = by_place(lambda count: 1 - _from_middle(count))
_GAUSSIAN = by_place(_gaussian)
_NEGATE_LAST_FIFTH = _places(lambda i, n: i < 4 * n // 5, 1.0, _LEAST)

_ALL = (
    Weighting("linear-increasing", "u", _power(1)),
    Weighting("linear-decreasing", "1 - u", _power(1, falling=True)),
    Weighting("quadratic-increasing", "u^2", _power(2)),
    Weighting("quadratic-decreasing", "(1 - u)^2", _power(2, falling=True)),
    Weighting("exponential-increasing", "(e^(2u) - 1) / (e^2 - 1)", _exponential(2)),
    Weighting("exponential-decreasing", "(e^(-2u) - e^-2) / (1 - e^-2)", _exponential(-2)),
    Weighting("middle-peak", "1 - |2u - 1|", _MIDDLE),
    Weighting("edges-peak", "|2u - 1|", by_place(_from_middle)),
    Weighting("gaussian-middle", "exp(-(i - (N-1)/2)^2 / (2 (0.3 N)^2))", _GAUSSIAN),
    Weighting("nll-proportional", "n", _nll_power(1)),
    Weighting("confidence-proportional", "e^-n", _confidence),
    Weighting("surprisal", "(n - min n) / (max n - min n) + 0.1", _surprisal),
    Weighting("first-k", "1 for the first 3, else 0.1", _places(lambda i, _: i < 3, 1.0, _LITTLE)),
    Weighting("last-k", "1 for the last 3, else 0.1", _places(lambda i, n: i >= n - 3, 1.0, _LITTLE)),
    Weighting(
        "first-last-k",
        "1 for the first and last min(3, floor(N/2)), else 0.1",
        _places(_first_and_last, 1.0, _LITTLE),
    ),
    Weighting("recency-bias", "0.95^(N - 1 - i)", by_place(lambda count: 0.95 ** np.arange(count - 1.0, -1.0, -1.0))),
    Weighting("high-uncertainty-only", "1 where n >= its 75th percentile, else 0.1", _most_uncertain),
    Weighting("low-uncertainty-only", "1 where n <= its 25th percentile, else 0.1", _least_uncertain),
    Weighting("sar-relevance", "R", _relevance, relevance=True),
    Weighting("hybrid-middle-sar-50", "0.5 (1 - |2u - 1|) + 0.5 R", _mixed(_MIDDLE, 0.5), relevance=True),
    Weighting("hybrid-gaussian-sar-50", "0.5 gaussian-middle + 0.5 R", _mixed(_GAUSSIAN, 0.5), relevance=True),
    Weighting("hybrid-middle-sar-70", "0.7 (1 - |2u - 1|) + 0.3 R", _mixed(_MIDDLE, 0.7), relevance=True),
    Weighting("hybrid-gaussian-sar-70", "0.7 gaussian-middle + 0.3 R", _mixed(_GAUSSIAN, 0.7), relevance=True),
    Weighting("nll-sqrt", "n^0.5", _nll_power(0.5)),
    Weighting("nll-cubic", "n^3", _nll_power(3)),
    Weighting("nll-quartic", "n^4", _nll_power(4)),
    Weighting("nll-quintic", "n^5", _nll_power(5)),
    Weighting("negate-last-3", "0.01 for the last 3, else 1", _places(lambda i, n: i >= n - 3, _LEAST, 1.0)),
    Weighting("negate-last-5", "0.01 for the last 5, else 1", _places(lambda i, n: i >= n - 5, _LEAST, 1.0)),
    Weighting("negate-last-20pct", "0.01 from floor(0.8 N) on, else 1", _NEGATE_LAST_FIFTH),
    Weighting("negate-first-3", "0.01 for the first 3, else 1", _places(lambda i, _: i < 3, _LEAST, 1.0)),
    Weighting("negate-first-20pct", "0.01 before floor(0.2 N), else 1", _places(lambda i, n: i < n // 5, _LEAST, 1.0)),
    Weighting("unweight-beginning", "0.01 before floor(N/3), else 1", _places(lambda i, n: i < n // 3, _LEAST, 1.0)),
    Weighting(
        "unweight-middle",
        "0.01 from floor(N/3) to before floor(2N/3), else 1",
        _places(lambda i, n: (i >= n // 3) & (i < 2 * n // 3), _LEAST, 1.0),
    ),
    Weighting("unweight-end", "0.01 from floor(2N/3) on, else 1", _places(lambda i, n: i >= 2 * n // 3, _LEAST, 1.0)),
    Weighting("only-beginning", "1 before floor(N/3), else 0.01", _places(lambda i, n: i < n // 3, 1.0, _LEAST)),
    Weighting(
        "only-middle",
        "1 from floor(N/3) to before floor(2N/3), else 0.01",
        _places(lambda i, n: (i >= n // 3) & (i < 2 * n // 3), 1.0, _LEAST),
    ),
    Weighting("only-end", "1 from floor(2N/3) on, else 0.01", _places(lambda i, n: i >= 2 * n // 3, 1.0, _LEAST)),
    Weighting("nll-squared-negate-end", "n^2 times negate-last-20pct", _times(_nll_power(2), _NEGATE_LAST_FIFTH)),
    Weighting("nll-cubic-negate-end", "n^3 times negate-last-20pct", _times(_nll_power(3), _NEGATE_LAST_FIFTH)),
    Weighting("nll-squared-middle-focus", "n^2 (1 - |2u - 1|)", _times(_nll_power(2), _MIDDLE)),
    Weighting("nll-cubic-middle-focus", "n^3 (1 - |2u - 1|)", _times(_nll_power(3), _MIDDLE)),
)

WEIGHTINGS = {each.name: each for each in _ALL}


# --- the measures -----------------------------------------------------------------------------------------------------

PREFIX = "weighted-nll:"


def shares(weighting: Weighting, answer: ScoredText) -> NDArray[np.float64]:
    """The weights (N), float64, of an answer's N >= 1 tokens, as shares of 1; where all are 0, all tokens weigh alike.

    Raises Undefined where the weighting looks at relevance and that is not measured.
    """
    relevance = np.array(given.relevance(answer)) if weighting.relevance else None
    weights = weighting.scheme(AnswerTokens(_nll(answer.log_probs), relevance))
    total = np.add.reduce(weights)
    return weights / total if total > 0 else np.full(len(weights), 1 / len(weights))


@functools.lru_cache(maxsize=8)
def _nll(log_probs: tuple[float, ...]) -> NDArray[np.float64]:
    """Kept for the weightings of the same answer that come next."""
    nll: NDArray[np.float64] = -np.array(log_probs, dtype=np.float64)
    nll.flags.writeable = False
    return nll


def _of_greedy(weighting: Weighting) -> Callable[[Evidence], float]:
    def function(evidence: Evidence) -> float:
        answer = given.greedy(evidence)
        # Shares first, so that no product with a tiny weight loses its digits.
        return float(shares(weighting, answer) @ _nll(answer.log_probs))

    function.__doc__ = f"Weighted NLL of the greedy answer, weights {weighting.formula}"
    return function


for _each in WEIGHTINGS.values():
    measure(
        PREFIX + _each.name,
        needs=[EvidenceNeed.GREEDY, EvidenceNeed.RELEVANCE] if _each.relevance else [EvidenceNeed.GREEDY],
        source="nllSAR, phase 6: weighting schemes",
    )(_of_greedy(_each))
