"""NLL of the first tokens, and place by place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from gpuherd.qa.evaluation.measuring import places, prefix
from gpuherd.qa.measures.evidence import ScoredText

ANSWERS = [ScoredText((-1.0, -2.0, -6.0), "a b c"), ScoredText((), ""), ScoredText((-4.0,), "d")]


def test_a_prefix_is_the_mean_of_its_tokens() -> None:
    assert prefix(ANSWERS, 1).nll == (1.0, None, 4.0)
    assert prefix(ANSWERS, 2).nll == (1.5, None, 4.0)
    assert prefix(ANSWERS, 3).nll == (3.0, None, 4.0)


def test_shorter_answers_stand_whole_and_are_counted() -> None:
    assert [prefix(ANSWERS, length).shorter for length in (1, 2, 3, 4)] == [0, 1, 1, 2]
    assert prefix(ANSWERS, 50).nll == (3.0, None, 4.0)
    with pytest.raises(ValueError, match="at least one"):
        prefix(ANSWERS, 0)


def test_places_are_token_by_token() -> None:
    found = places(ANSWERS)
    assert found.nll.tolist() == [[1.0, 2.0, 6.0], [0.0, 0.0, 0.0], [4.0, 0.0, 0.0]]
    assert found.there.tolist() == [[True, True, True], [False] * 3, [True, False, False]]
    assert places(ANSWERS, most=1).nll.tolist() == [[1.0], [0.0], [4.0]]


def test_no_answers_have_no_places() -> None:
    assert places([]).nll.shape == (0, 0)
    assert places([ScoredText((), "")]).nll.shape == (1, 0)


@settings(max_examples=40)
@given(
    strategies.lists(strategies.lists(strategies.floats(-100, 0), max_size=12), max_size=8), strategies.integers(1, 15)
)
def test_prefixes_and_places_agree(answers: list[list[float]], length: int) -> None:
    made = [ScoredText(tuple(each), "") for each in answers]
    found = places(made, most=length)
    for row, value in enumerate(prefix(made, length).nll):
        there = found.nll[row][found.there[row]]
        assert there.size == min(length, len(answers[row]))
        assert value is None if there.size == 0 else value == pytest.approx(float(np.mean(there)), abs=1e-12)
