"""PPO's rewards of tokens, advantages and returns."""

from __future__ import annotations

import math

import pytest
from tests.posttrain.policy_gradient.rollouts import rollout

from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.policy_gradient.advantages import estimated, token_rewards

TURNS = rollout((5,), (6, 7, 20, 8), by_policy=(True, True, False, True), reward=3.0, turn_rewards=((1, 1.0), (3, 2.0)))


def test_tokens_earn_the_rewards_of_their_turns_less_the_divergence() -> None:
    rewards = token_rewards(TURNS, [-1.0, -2.0, -9.0, -1.0], [-1.5, -1.0, -1.0, -1.0], 0.1)
    assert rewards == pytest.approx([-0.05, 1.1, 0.0, 2.0])
    assert token_rewards(rollout((5,), (6, 7), reward=0.5), [-1.0, -1.0], (), 0.1) == [0.0, 0.5]


def test_advantages_are_gae_over_the_policys_own_tokens() -> None:
    other = rollout((5,), (6,), reward=-1.0)
    items, told = estimated(
        [TURNS, other], [[-1.0] * 4, [-1.0]], [[-1.0] * 4, [-2.0]], [[0.5, 1.0, 9.0, 2.0], [0.25]], [(), ()], 0.1,
        DistEnv.single(), gamma=0.9, lam=0.8, normalise=False,
    )  # fmt: skip
    third = 2.0 - 2.0
    second = 1.0 + 0.9 * 2.0 - 1.0 + 0.9 * 0.8 * third
    first = 0.0 + 0.9 * 1.0 - 0.5 + 0.9 * 0.8 * second
    assert items[0].advantages == pytest.approx([first, second, 0.0, third])
    assert items[0].returns == pytest.approx([first + 0.5, second + 1.0, 0.0, third + 2.0])
    assert items[1].advantages == pytest.approx([-1.25]) and items[1].returns == pytest.approx([-1.0])
    assert items[0].old_values == pytest.approx([0.5, 1.0, 9.0, 2.0]) and items[1].old == [-2.0]
    assert told["value"] == pytest.approx((0.5 + 1.0 + 2.0 + 0.25) / 4)
    assert told["return"] == pytest.approx((first + 0.5 + second + 1.0 + 2.0 - 1.0) / 4)
    assert "divergence" not in told


def test_normalised_advantages_have_mean_0_and_spread_1_over_all_tokens() -> None:
    some = [TURNS, rollout((5,), (6,), reward=-1.0)]
    now, reference = [[-1.0] * 4, [-1.0]], [[-1.5, -1.5, 5.0, -1.5], [-3.0]]
    items, told = estimated(
        some, now, now, [[0.0] * 4, [0.0]], reference, 0.0, DistEnv.single(), gamma=1.0, lam=1.0, normalise=True
    )
    values = [items[0].advantages[place] for place in (0, 1, 3)] + [items[1].advantages[0]]
    assert math.fsum(values) == pytest.approx(0, abs=1e-6)
    assert math.fsum(each * each for each in values) / 3 == pytest.approx(1, abs=1e-5)
    assert told["divergence"] == pytest.approx((3 * 0.5 + 2.0) / 2)


def test_no_rollout_is_no_trouble() -> None:
    items, told = estimated([], [], [], [], [], 0.1, DistEnv.single(), gamma=1.0, lam=0.95, normalise=True)
    assert items == [] and told == {"value": 0.0, "return": 0.0}
