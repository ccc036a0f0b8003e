"""First tokens and positions: which answers have a part, and the figures by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from gpuherd.qa.evaluation.measuring import MOST_POSITIONS, mean_figure, positions, prefixes
from gpuherd.qa.evaluation.result import EvaluateSettings
from gpuherd.qa.measures.evidence import ScoredText

SETTINGS = EvaluateSettings(bootstrap=100, prefixes=(1, 3))


def some(n: int = 60) -> tuple[list[ScoredText], list[bool]]:
    draw = np.random.default_rng(0)
    wrong = [bool(each) for each in draw.random(n) < 0.4]
    answers = [
        ScoredText(tuple(float(-each) for each in draw.exponential(1.5 if label else 1, size=draw.integers(1, 6))), "x")
        for label in wrong
    ]
    return answers, wrong


def test_aurocs_of_first_tokens() -> None:
    answers, wrong = some()
    one, three = prefixes(answers, wrong, SETTINGS)
    assert (one.length, one.answers, one.shorter) == (1, 60, 0)
    assert (
        one.nll.value == one.mean_nll.value == pytest.approx(roc_auc_score(wrong, [-a.log_probs[0] for a in answers]))
    )
    assert three.shorter == sum(len(answer.log_probs) < 3 for answer in answers) > 0
    sums = [-sum(answer.log_probs[:3]) for answer in answers]
    means = [-np.mean(answer.log_probs[:3]) for answer in answers]
    assert three.nll.value == pytest.approx(roc_auc_score(wrong, sums))
    assert three.mean_nll.value == pytest.approx(roc_auc_score(wrong, means))
    assert three.nll.interval is not None


def test_unknown_empty_and_unlabelled_answers_have_no_part() -> None:
    answers, wrong = some()
    more: list[ScoredText | None] = [*answers, None, ScoredText((), ""), ScoredText((-1.0,), "x")]
    labels: list[bool | None] = [*wrong, True, True, None]
    assert prefixes(more, labels, SETTINGS) == prefixes(answers, wrong, SETTINGS)
    assert positions(more, labels, SETTINGS) == positions(answers, wrong, SETTINGS)


def test_positions_are_means_with_students_interval() -> None:
    answers, wrong = some()
    found = positions(answers, wrong, SETTINGS)
    for at, row in enumerate(found):
        assert row.position == at
        for label, figure, count in ((False, row.right, row.right_answers), (True, row.wrong, row.wrong_answers)):
            values = [
                -a.log_probs[at]
                for a, each in zip(answers, wrong, strict=True)
                if each == label and len(a.log_probs) > at
            ]
            assert count == len(values)
            if len(values) > 1:
                expected = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
                assert figure.value == pytest.approx(np.mean(values))
                assert figure.interval is not None
                assert (figure.interval.low, figure.interval.high) == pytest.approx(expected, abs=1e-9)
    longest = max(len(answer.log_probs) for answer in answers)
    assert len(found) == longest


def test_of_one_or_none_there_is_no_interval() -> None:
    assert mean_figure(np.array([]), 0.95).value is None
    one = mean_figure(np.array([2.0]), 0.95)
    assert (one.value, one.interval) == (2.0, None)
    assert mean_figure(np.array([2.0]), 0.95).note


def test_one_class_and_nothing() -> None:
    answers, _ = some(5)
    assert prefixes(answers, [True] * 5, SETTINGS)[0].nll.value is None
    rows = positions(answers, [True] * 5, SETTINGS)
    assert rows[0].right.value is None and rows[0].wrong.value is not None
    assert positions([None], [True], SETTINGS) == ()
    assert prefixes([None], [True], SETTINGS)[0].answers == 0


def test_positions_end_where_a_single_answer_goes_on() -> None:
    answers = [ScoredText((-0.5,) * length, "x") for length in (7, 3, 2)]
    assert [row.position for row in positions(answers, [True, False, True], SETTINGS)] == [0, 1, 2]


def test_long_answers_end_somewhere() -> None:
    answers = [ScoredText((-0.5,) * 2000, "x"), ScoredText((-1.0,) * 2000, "x")]
    assert len(positions(answers, [True, False], SETTINGS)) == MOST_POSITIONS
    assert prefixes(answers, [True, False], EvaluateSettings(bootstrap=100, prefixes=(5000,)))[0].nll.value == 0
