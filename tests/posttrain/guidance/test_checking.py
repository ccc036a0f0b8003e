"""Figures of a classifier on what it did not learn from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.posttrain.guidance.checking import Predicted, auroc, quality

SCORES = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=12)


@settings(max_examples=40)
@given(SCORES, SCORES)
def test_auroc_is_the_share_of_pairs_in_order(high: list[float], low: list[float]) -> None:
    pairs = [1.0 if one > other else 0.5 if one == other else 0.0 for one in high for other in low]
    assert auroc(high, low) == pytest.approx(sum(pairs) / len(pairs))


def test_no_pairs_no_auroc() -> None:
    assert auroc([], [1.0]) is None
    assert auroc([1.0], []) is None


def test_quality_by_hand() -> None:
    told = quality([Predicted((0.4, 0.6, 0.8, 0.9), 1.0), Predicted((0.5, 0.3), 0.0)])
    assert told["accuracy"] == pytest.approx(5 / 6)  # 0.4 of a right one is wrong; 0.5 is not above the middle
    assert told["error"] == pytest.approx((0.36 + 0.16 + 0.04 + 0.01 + 0.25 + 0.09) / 6)
    assert told["auroc"] == pytest.approx(7 / 8)
    assert told["auroc_q1"] == 0.0  # the first quarter: 0.4 against 0.5
    assert told["auroc_q3"] == 1.0
    assert "auroc_q2" not in told  # of the short one no token lies in its second quarter


def test_figures_that_are_not_defined_are_left_out() -> None:
    assert quality([]) == {}
    assert set(quality([Predicted((0.5,), 0.25)])) == {"error"}
    assert set(quality([Predicted((0.5,), 1.0)])) == {"error", "accuracy"}
