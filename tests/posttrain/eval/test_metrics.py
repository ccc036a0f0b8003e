"""Metrics against their definitions written out, and their intervals against what they promise."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain.eval.made import drawn_scores, made_scores

from gpuherd.posttrain.eval.metrics import (
    FIRST,
    KL,
    KL_TOKEN,
    PASS_1,
    REWARD,
    majority,
    metrics_of,
    pass_at,
    ratios,
    vote,
)
from gpuherd.posttrain.eval.results import Estimator, EvaluationOptions, Tie

EIGHT = EvaluationOptions(samples=8, pass_at=(2, 8), majority_at=(4, 8))


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_subsets(right: list[bool], k: int) -> None:
    k = min(k, len(right))
    literal = statistics.mean(float(any(subset)) for subset in itertools.combinations(right, k))
    assert pass_at(len(right), sum(right), k) == pytest.approx(literal)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, None]), st.booleans()), min_size=1, max_size=8))
def test_a_vote_by_its_rules(completions: list[tuple[int | None, bool]]) -> None:
    answers = [answer for answer, _ in completions]
    first_said = dict(reversed(completions))
    correct = [first_said[answer] for answer, _ in completions]  # equal answers are equally right
    counts = {answer: answers.count(answer) for answer in answers if answer is not None}
    found = {tie: vote(answers, correct, tie) for tie in Tie}
    if not counts:
        assert set(found.values()) == {0.0}
        return
    modes = [answer for answer, count in counts.items() if count == max(counts.values())]
    assert found[Tie.SHARE] == pytest.approx(statistics.mean(float(first_said[answer]) for answer in modes))
    assert found[Tie.FIRST] == float(first_said[next(answer for answer in answers if answer in modes)])
    assert found[Tie.UNIQUE] == (float(first_said[modes[0]]) if len(modes) == 1 else 0.0)


def test_majority_of_fewer_than_all_is_the_mean_over_disjoint_groups() -> None:
    answers, right = [0, 0, 1, 2, 2, 2, 0], [True, True, False, False, False, False, True]
    # Of three: (0 0 1) right, (2 2 2) wrong; the seventh belongs to no group.
    assert majority(answers, right, 3, Tie.SHARE) == 0.5
    assert majority(answers, right, 7, Tie.SHARE) == 0.5  # 0 and 2, three times each
    assert majority(answers, right, 7, Tie.UNIQUE) == 0.0


def test_every_metric_of_a_small_table_by_hand() -> None:
    scores = made_scores(
        [[True, False, True, True], [False, False, False, True]],
        answers=[[0, 1, 0, 0], [0, 0, None, 1]],
        kl=[[1.0, 2.0, None, None], [3.0, None, None, None]],
        tokens=[[2, 4, 9, 9], [6, 9, 9, 9]],
        estimator=Estimator.K3,
    )
    found = metrics_of(scores, EvaluationOptions(samples=4, pass_at=(1, 2, 4), majority_at=(2, 4), tie=Tie.UNIQUE))
    assert found.problems == 2 and found.samples == 4
    assert found.reward.value == found.pass_at_1.value == (3 / 4 + 1 / 4) / 2  # type: ignore[union-attr]
    assert found.first is not None and found.first.value == 0.5
    assert {each.k: each.figure.value for each in found.pass_at} == {
        2: pytest.approx((1 + (1 - 3 / 6)) / 2),  # 3 of 4 right, any two; 1 of 4: C(3,2)/C(4,2) miss it
        4: 1.0,
    }
    # Of two: (0 1) ties and earns nothing, (0 0) right; (0 0) wrong, (- 1) right. Of four: 0 right; 0 wrong.
    assert {each.k: each.figure.value for each in found.majority} == {2: 0.5, 4: 0.5}
    assert found.kl is not None and found.kl.estimator is Estimator.K3 and found.kl.completions == 3
    assert found.kl.sequence.value == pytest.approx(6 / 3)
    assert found.kl.token.value == pytest.approx(6 / 12)
    assert found.tokens.value == pytest.approx((24 / 4 + 33 / 4) / 2)


def test_where_nothing_is_right_or_wrong() -> None:
    import dataclasses

    scores = dataclasses.replace(made_scores([[True, False], [False, False]]), correct=None)
    found = metrics_of(scores, EvaluationOptions(samples=2))
    assert found.pass_at_1 is None and found.first is None and found.pass_at == () and found.majority == ()
    assert found.reward.value == 0.25 and found.kl is None


def test_all_alike_has_wilsons_interval_and_one_problem_none() -> None:
    found = metrics_of(made_scores([[True] * 8] * 20), EIGHT)
    assert found.pass_at_1 is not None and found.pass_at_1.value == 1 and found.pass_at_1.interval is not None
    assert found.pass_at_1.interval.low == pytest.approx(0.8389, abs=1e-4) and found.pass_at_1.interval.high == 1
    assert "20 problems" in (found.pass_at_1.note or "")
    assert found.tokens.interval is None  # a mean of equal lengths has no spread, and is no share
    one = metrics_of(made_scores([[True] * 8]), EIGHT)
    assert one.pass_at_1 is not None and one.pass_at_1.interval is None and one.pass_at_1.note is not None


def test_one_problem_whose_divergence_is_unknown() -> None:
    one = metrics_of(made_scores([[True, False]], kl=[[None, None]]), EvaluationOptions(samples=2))
    assert one.kl is not None and one.kl.sequence.value is None and one.kl.token.value is None


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(3)
    held = 0
    for number in range(40):
        chances = draw.beta(2, 2, 60)  # a new set of problems each time: the mean over all is 1/2
        right = draw.random((60, 4)) < chances[:, None]
        scores = made_scores(right.tolist())
        figure = metrics_of(scores, EvaluationOptions(samples=4, resamples=200)).pass_at_1
        assert figure is not None and figure.interval is not None, number
        held += 0.5 in figure.interval
    assert 33 <= held <= 40  # 38 expected


def test_metrics_are_ratios_whose_value_is_the_figure() -> None:
    scores = drawn_scores(0.6, problems=30, samples=8, seed=1, kl=2.0)
    found, figures = ratios(scores, EIGHT), metrics_of(scores, EIGHT)
    assert figures.pass_at_1 is not None and figures.first is not None and figures.kl is not None
    assert found[PASS_1].value == pytest.approx(figures.pass_at_1.value)
    assert found[REWARD].value == pytest.approx(figures.reward.value)
    assert found[FIRST].value == pytest.approx(figures.first.value)
    assert found[KL].value == pytest.approx(figures.kl.sequence.value)
    assert found[KL_TOKEN].value == pytest.approx(figures.kl.token.value)
    weights = np.zeros((1, 30), dtype=np.int64)
    weights[0, 4] = 3
    assert found[PASS_1].weighted(weights)[0] == pytest.approx(np.mean(scores.correct[4]))  # type: ignore[index]
