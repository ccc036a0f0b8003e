"""What holds for measures whatever the answers: order, duplicates, bounds, and that less likely is less certain."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from tests.qa.measures.made import evidence

from gpuherd.qa.measures.evidence import Evidence, EvidenceNeed, ScoredText
from gpuherd.qa.measures.likelihood import log_sum_exp
from gpuherd.qa.measures.registry import compute, measures

SEEDS = strategies.integers(0, 10_000)
OF_SAMPLES = [each.name for each in measures() if EvidenceNeed.SAMPLES in each.needs]


def shuffled(question: Evidence, order: list[int]) -> Evidence:
    """The same question with its samples in another order."""
    assert question.similarity is not None and question.affinity is not None and question.clusters is not None
    numbers: dict[int, int] = {}
    return dataclasses.replace(
        question,
        samples=tuple(question.samples[place] for place in order),
        similarity=question.similarity[np.ix_(order, order)],
        affinity=question.affinity[np.ix_(order, order)],
        clusters=tuple(numbers.setdefault(question.clusters[place], len(numbers)) for place in order),
    )


def values(question: Evidence, names: list[str]) -> list[float]:
    found = [column[0] for column in compute(names, [question]).columns.values()]
    assert None not in found
    return [each for each in found if each is not None]


@settings(max_examples=25)
@given(SEEDS, strategies.randoms(use_true_random=False))
def test_the_order_of_samples_makes_no_difference(seed: int, draw: random.Random) -> None:
    question = evidence(seed)
    order = list(range(len(question.samples)))
    draw.shuffle(order)
    # A text's first log-prob stands for it in mc-unique, so only samples of equal texts must keep their order.
    names = [name for name in OF_SAMPLES if name != "semantic-entropy:mc-unique"]
    assert values(shuffled(question, order), names) == pytest.approx(values(question, names), rel=1e-9, abs=1e-9)


def test_rounding_breaks_no_ties_between_the_same_samples_in_another_order() -> None:
    """Shared words give few values, so that many questions tie; a last digit that differs would rank them."""
    draw = random.Random(5)
    for _ in range(100):
        count = draw.randrange(2, 9)
        shared = np.array([[draw.choice((0.0, 1 / 3, 0.2, 1.0)) for _ in range(count)] for _ in range(count)])
        affinity = np.maximum(np.maximum(shared, shared.T), np.eye(count))
        question = Evidence("q", samples=(ScoredText((-1.0,), "x"),) * count, affinity=affinity)
        order = draw.sample(range(count), count)
        other = dataclasses.replace(question, affinity=affinity[np.ix_(order, order)])
        columns = compute(["u-deg", "u-eigv", "eccentricity"], [question, other]).columns
        assert all(first == second for first, second in columns.values())
        same = compute(["u-deg", "u-eigv", "eccentricity"], [dataclasses.replace(question, affinity=shared * 0 + 1)])
        assert list(same.columns.values()) == [(0.0,), (1.0,), (0.0,)]


@settings(max_examples=25)
@given(SEEDS)
def test_the_whole_set_drawn_again_changes_no_share(seed: int) -> None:
    question = evidence(seed)
    count = len(question.samples)
    twice = shuffled(question, [*range(count), *range(count)])
    names = ["predictive-entropy", "ln-predictive-entropy", "semantic-entropy:rao", "discrete-semantic-entropy"]
    names += ["semantic-sets", "semantic-entropy:mc-unique", "u-deg"]
    assert values(twice, names) == pytest.approx(values(question, names), rel=1e-9, abs=1e-9)
    # What sums the probabilities of samples counts each twice: log 2 less, by issue 223 of LM-Polygraph.
    summed = ["semantic-entropy:mc", "semantic-entropy:kuhn"]
    less = [each - math.log(2) for each in values(question, summed)]
    assert values(twice, summed) == pytest.approx(less, rel=1e-9, abs=1e-9)


@settings(max_examples=25)
@given(SEEDS)
def test_measures_keep_their_bounds(seed: int) -> None:
    question = evidence(seed)
    count, sets = len(question.samples), len(set(question.clusters or ()))
    bounds = {
        "nll": (0, math.inf),
        "perplexity": (1, math.inf),
        "mean-token-probability": (0, 1),
        "semantic-entropy:rao": (0, math.log(sets)),
        "discrete-semantic-entropy": (0, math.log(sets)),
        "semantic-sets": (1, count),
        "lexical-similarity": (-1, 0),
        "u-deg": (0, 1 - 1 / count),
        "u-eigv": (1, count),
        "eccentricity": (0, math.sqrt(count)),
        "p-true:nll": (0, math.inf),
        "p-ik": (0, 1),
    }
    for (name, (low, high)), value in zip(bounds.items(), values(question, list(bounds)), strict=True):
        rounding = 1e-9 if name.startswith(("u-", "ecc")) else 0
        assert low - rounding <= value <= high + 1e-9


@settings(max_examples=25)
@given(SEEDS, strategies.floats(0.01, 5))
def test_less_likely_tokens_are_more_uncertain(seed: int, less: float) -> None:
    question = evidence(seed)
    rising = [
        "nll",
        "ln-nll",
        "perplexity",
        "mean-token-probability",
        "token-sar",
        "token-sar:samples",
        "sentence-sar",
        "sar",
    ]
    rising += ["predictive-entropy", "ln-predictive-entropy", "semantic-entropy:mc", "semantic-entropy:kuhn"]
    lower = dataclasses.replace(
        question,
        greedy=_lowered(question.greedy, less),
        samples=tuple(_lowered(each, less) for each in question.samples),
    )
    for before, after in zip(values(question, rising), values(lower, rising), strict=True):
        assert after > before


@settings(max_examples=25)
@given(SEEDS)
def test_meanings_that_are_one_are_less_uncertain_than_many(seed: int) -> None:
    question = evidence(seed)
    one = dataclasses.replace(question, clusters=(0,) * len(question.samples))
    many = dataclasses.replace(question, clusters=tuple(range(len(question.samples))))
    names = ["semantic-entropy:rao", "semantic-entropy:mc", "discrete-semantic-entropy", "semantic-sets"]
    for low, middle, high in zip(values(one, names), values(question, names), values(many, names), strict=True):
        assert low - 1e-12 <= middle <= high + 1e-12
    assert values(one, names[:1]) == [0.0]
    # Each meaning its own: nothing is summed, and the Monte Carlo estimate is the predictive entropy.
    assert values(many, ["se:mc"]) == pytest.approx(values(many, ["pe"]))


@given(strategies.lists(strategies.floats(-1e4, 0), min_size=1, max_size=30))
def test_log_sum_exp_lies_between_the_largest_and_as_many_of_it(logs: list[float]) -> None:
    found = log_sum_exp(logs)
    assert max(logs) <= found <= max(logs) + math.log(len(logs)) + 1e-9
    assert log_sum_exp(reversed(logs)) == found
    assert log_sum_exp([each - 5e5 for each in logs]) == pytest.approx(found - 5e5, abs=1e-6)


def _lowered(answer: ScoredText | None, less: float) -> ScoredText:
    assert answer is not None
    return dataclasses.replace(answer, log_probs=tuple(each - less for each in answer.log_probs))
