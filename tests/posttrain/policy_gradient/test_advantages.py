"""Advantages equal what plain loops in float64 say."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.policy_gradient.advantages import (
    Normalization,
    RunningMoments,
    constant_groups,
    generalised_advantages,
    grouped_advantages,
    whitened,
)

REWARDS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 1.0, 0.1, -2.5, 7.0])), min_size=1, max_size=12)


@given(REWARDS)
def test_grouped_advantages_are_those_of_each_group_alone(pairs: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in pairs], [reward for _, reward in pairs]
    found = grouped_advantages(rewards, groups)

    for (group, reward), advantage in zip(pairs, found, strict=True):
        own = [other for number, other in pairs if number == group]
        if len(set(own)) == 1:
            assert advantage == 0.0
        else:
            wanted = (reward - statistics.fmean(own)) / (statistics.stdev(own) + 1e-4)
            assert advantage == pytest.approx(wanted, rel=1e-12)
    assert constant_groups(rewards, groups) == sum(
        len({reward for number, reward in pairs if number == group}) == 1 for group in set(groups)
    )


@given(REWARDS)
def test_the_order_of_answers_changes_nothing(pairs: list[tuple[int, float]]) -> None:
    forth = grouped_advantages([reward for _, reward in pairs], [group for group, _ in pairs])
    back = grouped_advantages([reward for _, reward in pairs[::-1]], [group for group, _ in pairs[::-1]])
    assert back[::-1] == forth


def test_spreads_of_the_batch_of_all_that_was_seen_and_none() -> None:
    rewards, groups = [1.0, 0.0, 5.0, 3.0], [0, 0, 1, 1]
    over = statistics.stdev(rewards) + 1e-4

    assert grouped_advantages(rewards, groups, Normalization.BATCH) == pytest.approx(
        [0.5 / over, -0.5 / over, 1 / over, -1 / over]
    )
    assert grouped_advantages(rewards, groups, Normalization.NONE) == [0.5, -0.5, 1.0, -1.0]
    moments = RunningMoments().after([10.0, 20.0]).after(rewards)
    seen = statistics.stdev([10.0, 20.0, *rewards]) + 1e-4
    assert grouped_advantages(rewards, groups, Normalization.RUNNING, moments)[0] == pytest.approx(0.5 / seen)
    # What was seen before counts with no other normalization, though a training has it at hand always.
    for each in (Normalization.BATCH, Normalization.GROUP, Normalization.NONE):
        assert grouped_advantages(rewards, groups, each, moments) == grouped_advantages(rewards, groups, each)
    with pytest.raises(UsageError, match="running"):
        grouped_advantages(rewards, groups, Normalization.RUNNING)


def test_a_group_of_one_says_nothing() -> None:
    assert grouped_advantages([3.0, 1.0], [0, 1]) == [0.0, 0.0]
    assert grouped_advantages([3.0, 1.0], [0, 1], Normalization.BATCH) == [0.0, 0.0]


@given(st.lists(st.lists(st.floats(-100, 100), max_size=4), max_size=4))
def test_running_moments_are_those_of_all_values_together(parts: list[list[float]]) -> None:
    moments = RunningMoments()
    for part in parts:
        moments = moments.after(part)
    values = [value for part in parts for value in part]

    assert moments.count == len(values)
    if values:
        assert moments.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert moments.std == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0.0, abs=1e-7)


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE by its sum: eq. 16 of arXiv 1506.02438."""
    ahead = [*values[1:], 0.0][: len(values)]
    deltas = [reward + gamma * after - value for reward, after, value in zip(rewards, ahead, values, strict=True)]
    return [
        math.fsum((gamma * lam) ** (later - place) * deltas[later] for later in range(place, len(deltas)))
        for place in range(len(deltas))
    ]


@settings(max_examples=30)
@given(st.data())
def test_gae_is_its_sum_over_the_tokens_that_the_policy_chose(data: st.DataObject) -> None:
    gamma, lam = data.draw(st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)]))
    number = st.floats(-3, 3)
    rows = data.draw(
        st.lists(st.lists(st.tuples(st.booleans(), number, number), min_size=5, max_size=5), min_size=1, max_size=3)
    )
    mask, rewards, values = (torch.tensor([[each[part] for each in row] for row in rows]) for part in range(3))
    found, returns = generalised_advantages(rewards.double(), values.double(), mask, gamma=gamma, lam=lam)

    for row, advantages, wanted_returns in zip(rows, found.tolist(), returns.tolist(), strict=True):
        places = [place for place, (chosen, _, _) in enumerate(row) if chosen]
        # A reward on a word of the environment belongs to the last choice before it.
        earned = [0.0] * len(places)
        for place, (_, reward, _) in enumerate(row):
            before = [number for number, chosen in enumerate(places) if chosen <= place]
            if before:
                earned[before[-1]] += float(torch.tensor(reward))
        own = [float(torch.tensor(row[place][2])) for place in places]
        wanted = by_hand(earned, own, gamma, lam)
        assert [advantages[place] for place in places] == pytest.approx(wanted, abs=1e-5)
        assert [wanted_returns[place] for place in places] == pytest.approx(
            [a + v for a, v in zip(wanted, own, strict=True)], abs=1e-5
        )
        assert all(advantages[place] == wanted_returns[place] == 0 for place in range(5) if place not in places)


def test_with_no_discount_and_no_values_every_token_has_the_reward_to_come() -> None:
    rewards, mask = torch.tensor([[0.0, 0.5, 0.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool)
    advantages, returns = generalised_advantages(rewards, torch.zeros(1, 4), mask, gamma=1, lam=1)
    assert advantages.tolist() == returns.tolist() == [[2.5, 2.5, 2.0, 2.0]]


def test_whitened_values_have_mean_0_and_spread_1() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    total = torch.tensor([4.0, values.sum(), (values * values).sum()], dtype=torch.float64)
    found = whitened(values, total)
    assert float(found.mean()) == pytest.approx(0, abs=1e-12)
    assert float(found.std()) == pytest.approx(1)
    assert whitened(torch.ones(2), torch.tensor([2.0, 2.0, 2.0])).tolist() == [0.0, 0.0]
