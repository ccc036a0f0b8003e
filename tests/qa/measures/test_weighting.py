"""The 42 weightings of tokens against plain loops of nllSAR's formulas, and what holds for any of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from tests.qa.measures.made import evidence

from gpuherd.qa.measures.evidence import Evidence, ScoredText, Undefined
from gpuherd.qa.measures.registry import compute, measures
from gpuherd.qa.measures.weighting import WEIGHTINGS, AnswerTokens
from gpuherd.qa.measures.weighting import shares as shares_of

Loop = Callable[[int, int, list[float], list[float]], float]  # of token i of n, with all NLLs and relevances


def u(i: int, n: int) -> float:
    return i / (n - 1)


def middle(i: int, n: int) -> float:
    half = (n - 1) / 2
    return 1 - abs(i - half) / half


def gaussian(i: int, n: int) -> float:
    return math.exp(-((i - (n - 1) * 0.5) ** 2) / (2 * (n * 0.3) ** 2))


def stretched(rate: float) -> Loop:
    def loop(i: int, n: int, nll: list[float], relevance: list[float]) -> float:
        every = [math.exp(rate * u(j, n)) for j in range(n)]
        return (every[i] - min(every)) / (max(every) - min(every))

    return loop


def surprisal(i: int, n: int, nll: list[float], relevance: list[float]) -> float:
    if max(nll) == min(nll):
        return 1.0
    return (nll[i] - min(nll)) / (max(nll) - min(nll)) + 0.1


def power(exponent: float, shape: Callable[[int, int], float] = lambda i, n: 1.0) -> Loop:
    return lambda i, n, nll, relevance: (nll[i] / max(nll)) ** exponent * shape(i, n)


def where(chosen: Callable[[int, int], bool], inside: float, outside: float) -> Loop:
    return lambda i, n, nll, relevance: inside if chosen(i, n) else outside


def mixed(shape: Callable[[int, int], float], alpha: float) -> Loop:
    return lambda i, n, nll, relevance: alpha * shape(i, n) + (1 - alpha) * relevance[i]


def beginning(i: int, n: int) -> bool:
    return i < n // 3


def end(i: int, n: int) -> bool:
    return i >= 2 * n // 3


def centre(i: int, n: int) -> bool:
    return not beginning(i, n) and not end(i, n)


def last_fifth(i: int, n: int) -> bool:
    return i >= 4 * n // 5


def negated(i: int, n: int) -> float:
    return 0.01 if last_fifth(i, n) else 1.0


LOOPS: dict[str, Loop] = {
    "linear-increasing": lambda i, n, nll, r: u(i, n),
    "linear-decreasing": lambda i, n, nll, r: (n - 1 - i) / (n - 1),
    "quadratic-increasing": lambda i, n, nll, r: u(i, n) ** 2,
    "quadratic-decreasing": lambda i, n, nll, r: ((n - 1 - i) / (n - 1)) ** 2,
    "exponential-increasing": stretched(2),
    "exponential-decreasing": stretched(-2),
    "middle-peak": lambda i, n, nll, r: middle(i, n),
    "edges-peak": lambda i, n, nll, r: 1 - middle(i, n),
    "gaussian-middle": lambda i, n, nll, r: gaussian(i, n),
    "nll-proportional": lambda i, n, nll, r: nll[i],
    "confidence-proportional": lambda i, n, nll, r: math.exp(-nll[i]),
    "surprisal": surprisal,
    "first-k": where(lambda i, n: i < 3, 1.0, 0.1),
    "last-k": where(lambda i, n: i >= n - 3, 1.0, 0.1),
    "first-last-k": where(lambda i, n: i < min(3, n // 2) or i >= n - min(3, n // 2), 1.0, 0.1),
    "recency-bias": lambda i, n, nll, r: 0.95 ** (n - 1 - i),
    "high-uncertainty-only": lambda i, n, nll, r: 1.0 if nll[i] >= np.percentile(nll, 75) else 0.1,
    "low-uncertainty-only": lambda i, n, nll, r: 1.0 if nll[i] <= np.percentile(nll, 25) else 0.1,
    "sar-relevance": lambda i, n, nll, r: r[i],
    "hybrid-middle-sar-50": mixed(middle, 0.5),
    "hybrid-gaussian-sar-50": mixed(gaussian, 0.5),
    "hybrid-middle-sar-70": mixed(middle, 0.7),
    "hybrid-gaussian-sar-70": mixed(gaussian, 0.7),
    "nll-sqrt": power(0.5),
    "nll-cubic": power(3),
    "nll-quartic": power(4),
    "nll-quintic": power(5),
    "negate-last-3": where(lambda i, n: i >= n - 3, 0.01, 1.0),
    "negate-last-5": where(lambda i, n: i >= n - 5, 0.01, 1.0),
    "negate-last-20pct": where(last_fifth, 0.01, 1.0),
    "negate-first-3": where(lambda i, n: i < 3, 0.01, 1.0),
    "negate-first-20pct": where(lambda i, n: i < n // 5, 0.01, 1.0),
    "unweight-beginning": where(beginning, 0.01, 1.0),
    "unweight-middle": where(centre, 0.01, 1.0),
    "unweight-end": where(end, 0.01, 1.0),
    "only-beginning": where(beginning, 1.0, 0.01),
    "only-middle": where(centre, 1.0, 0.01),
    "only-end": where(end, 1.0, 0.01),
    "nll-squared-negate-end": power(2, negated),
    "nll-cubic-negate-end": power(3, negated),
    "nll-squared-middle-focus": power(2, middle),
    "nll-cubic-middle-focus": power(3, middle),
}


def by_loop(name: str, answer: ScoredText) -> float:
    """nllSAR's weighted NLL, with all tokens alike where no weight is above 0."""
    assert answer.relevance is not None
    nll, relevance = [-each for each in answer.log_probs], list(answer.relevance)
    if len(nll) == 1:
        return nll[0]
    weights = [LOOPS[name](i, len(nll), nll, relevance) for i in range(len(nll))]
    if sum(weights) == 0:
        return sum(nll) / len(nll)
    return sum(weight * each for weight, each in zip(weights, nll, strict=True)) / sum(weights)


def greedy(question: Evidence) -> ScoredText:
    assert question.greedy is not None
    return question.greedy


def shares(name: str, answer: ScoredText) -> np.ndarray:
    return shares_of(WEIGHTINGS[name], answer)


def of(*log_probs: float, relevance: tuple[float, ...] | None = None) -> ScoredText:
    return ScoredText(log_probs, "text", relevance)


@pytest.mark.parametrize("name", LOOPS)
def test_a_weighting_is_nllsars(name: str) -> None:
    compare(name, [*cases(20), *short_cases(14)])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_weighting_is_nllsars_on_two_hundred_questions(name: str) -> None:
    compare(name, [*cases(200), *short_cases(35)])


@functools.cache
def cases(count: int) -> tuple[Evidence, ...]:
    return tuple(map(evidence, range(count)))


@functools.cache
def short_cases(count: int) -> tuple[Evidence, ...]:
    """Answers of 1 to 7 tokens."""
    return tuple(evidence(seed, samples=2, tokens=1 + seed % 7) for seed in range(1000, 1000 + count))


def compare(name: str, questions: Sequence[Evidence]) -> None:
    column = compute([f"weighted-nll:{name}"], questions).columns[f"weighted-nll:{name}"]
    for question, ours in zip(questions, column, strict=True):
        assert ours == pytest.approx(by_loop(name, greedy(question)), rel=1e-10), question.id


def test_there_are_the_42() -> None:
    assert len(WEIGHTINGS) == 42
    assert WEIGHTINGS.keys() == LOOPS.keys()
    registered = [each.name.removeprefix("weighted-nll:") for each in measures() if each.name.startswith("weighted")]
    assert registered == list(WEIGHTINGS)


def test_by_relevance_alone_it_is_token_sar_and_no_other_two_measures_say_the_same() -> None:
    columns = compute([each.name for each in measures()], cases(20)).columns
    same = [
        (first, second)
        for first, second in combinations(columns, 2)
        if columns[first] == pytest.approx(columns[second], rel=1e-9)
    ]
    assert same == [("token-sar", "weighted-nll:sar-relevance")]


@settings(max_examples=30)
@given(
    strategies.lists(strategies.tuples(strategies.floats(-1e5, 0), strategies.floats(0, 1)), min_size=1, max_size=40)
)
def test_shares_sum_to_one_and_the_mean_is_between_the_tokens(tokens: list[tuple[float, float]]) -> None:
    log_probs, relevance = (tuple(each) for each in zip(*tokens, strict=True))
    answer = of(*log_probs, relevance=relevance)
    columns = compute([f"weighted-nll:{name}" for name in LOOPS], [Evidence("one", greedy=answer)]).columns
    least, most = -max(log_probs), -min(log_probs)
    for name, (value,) in zip(LOOPS, columns.values(), strict=True):
        found = shares(name, answer)
        assert found.shape == (len(tokens),)
        assert (found >= 0).all() and found.sum() == pytest.approx(1)
        assert value is not None
        assert least * (1 - 1e-12) - 1e-300 <= value <= most * (1 + 1e-12) + 1e-300, name
        assert value == pytest.approx(float(-found @ np.array(log_probs)), rel=1e-9, abs=1e-300), name


@pytest.mark.parametrize("name", LOOPS)
def test_one_token_is_its_own_mean(name: str) -> None:
    assert shares(name, of(-2.5, relevance=(0.0,))).tolist() == [1.0]


@pytest.mark.parametrize("name", ["middle-peak", "nll-cubic-middle-focus"])
def test_where_every_weight_is_zero_all_tokens_are_alike(name: str) -> None:
    """The peak is between two tokens, and neither has any of it."""
    question = Evidence("one", greedy=of(-1.0, -3.0))
    assert compute([f"weighted-nll:{name}"], [question]).columns[f"weighted-nll:{name}"] == (2.0,)


def test_tokens_that_are_certain_are_alike() -> None:
    assert shares("nll-quintic", of(0.0, 0.0, 0.0, 0.0)).tolist() == [0.25] * 4
    assert shares("surprisal", of(-0.7, -0.7)).tolist() == [0.5, 0.5]


def test_powers_and_probabilities_do_not_leave_the_range_of_a_float() -> None:
    assert shares("nll-quintic", of(-1e80, -5e79)).tolist() == pytest.approx([32 / 33, 1 / 33])
    assert shares("confidence-proportional", of(-1e4, -1e4 - math.log(3))).tolist() == pytest.approx([0.75, 0.25])


def test_relevances_of_no_size_at_all_are_still_in_proportion() -> None:
    question = Evidence("one", greedy=of(-1e5, -1.0, relevance=(5e-324, 1e-323)))
    columns = compute(["weighted-nll:sar-relevance", "token-sar"], [question]).columns
    assert [column[0] for column in columns.values()] == pytest.approx([(1e5 + 2) / 3] * 2)


def test_three_tokens_have_a_beginning_a_middle_and_an_end() -> None:
    answer = of(-1.0, -2.0, -3.0)
    for place, name in enumerate(("only-beginning", "only-middle", "only-end")):
        assert shares(name, answer).argmax() == place
        assert shares(name.replace("only", "unweight"), answer).argmin() == place


def test_relevance_that_is_not_measured_is_not_guessed() -> None:
    with pytest.raises(Undefined, match="relevance"):
        shares("hybrid-middle-sar-50", of(-1.0, -2.0))


def test_weights_of_one_answer_cannot_be_changed_for_the_next() -> None:
    first = shares("linear-increasing", of(-1.0, -2.0, -3.0))
    first[:] = 0
    assert shares("linear-increasing", of(-1.0, -2.0, -3.0)).tolist() == pytest.approx([0, 1 / 3, 2 / 3])
    with pytest.raises(ValueError, match="read-only"):
        WEIGHTINGS["linear-increasing"].scheme(AnswerTokens(np.ones(3)))[0] = 1.0
