"""Rewards on a histogram's range."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.guidance.scale import Scale, atoms, scale_of

FINITE = st.floats(-1e6, 1e6)


@settings(max_examples=40)
@given(st.lists(FINITE, min_size=2).filter(lambda rewards: max(rewards) - min(rewards) > 1e-3))
def test_rewards_seen_lie_between_the_ends_and_keep_their_order(rewards: list[float]) -> None:
    scale = scale_of(rewards, -1.0, 3.0)
    told = [scale(each) for each in sorted(rewards)]
    assert told == sorted(told)
    assert told[0] == -1.0
    assert told[-1] == pytest.approx(3.0)
    assert scale.known_from == "data"


def test_a_tasks_range_goes_before_what_was_seen() -> None:
    assert scale_of([0.2, 0.4], 0, 1, (-1.0, 1.0)) == Scale(-1.0, 1.0, 0, 1, "task")
    assert scale_of([0.2, 0.4], 0, 1, (-math.inf, math.inf)) == Scale(0.2, 0.4, 0, 1, "data")


def test_a_reward_outside_of_the_range_is_put_at_its_end() -> None:
    scale = Scale(0.0, 2.0, 0.0, 1.0, "task")
    assert (scale(-1.0), scale(5.0), scale(1.0)) == (0.0, 1.0, 0.5)


def test_equal_rewards_teach_nothing() -> None:
    with pytest.raises(UsageError, match=r"all 2 rewards are 0\.5"):
        scale_of([0.5, 0.5], 0, 1)
    with pytest.raises(UsageError, match="there is no reward"):
        scale_of([], 0, 1)


def test_atoms() -> None:
    assert atoms(11, 0.0, 1.0) == pytest.approx([number / 10 for number in range(11)])
    for count, low, high in ((1, 0.0, 1.0), (3, 1.0, 1.0)):
        with pytest.raises(UsageError, match="atoms"):
            atoms(count, low, high)
