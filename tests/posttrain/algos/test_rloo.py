"""RLOO compares each answer with the others to its prompt, learns, and goes on exactly."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.posttrain.algos.training_work import curves, same, work
from tests.posttrain.letters import Letters
from tests.posttrain.policy_gradient.rollouts import rollout

from gpuherd.errors import UsageError
from gpuherd.posttrain.algos.registry import algorithm_class
from gpuherd.posttrain.algos.rloo import RLOO, RLOOOptions, divergence, leave_one_out
from gpuherd.posttrain.engine.options import Scheduler, Stopped
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.types import Policy

FAST = RLOOOptions(lr=5e-3, kl_coef=0.01, epochs=3, batch_size=4, samples_per_prompt=8)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-40, 40)), min_size=1, max_size=12))
def test_each_reward_is_compared_with_the_mean_of_the_others(pairs: list[tuple[int, int]]) -> None:
    groups, rewards = [group for group, _ in pairs], [number / 8 for _, number in pairs]
    found = leave_one_out(rewards, groups)
    for place, (group, reward) in enumerate(zip(groups, rewards, strict=True)):
        others = [rewards[at] for at in range(len(pairs)) if groups[at] == group and at != place]
        wanted = reward - math.fsum(others) / len(others) if others else 0.0
        assert found[place] == pytest.approx(wanted, abs=1e-12)
    for group in set(groups):
        assert math.fsum(each for each, of in zip(found, groups, strict=True) if of == group) == pytest.approx(0)


def test_groups_of_equal_rewards_say_nothing() -> None:
    assert leave_one_out([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1]) == [0.0] * 4
    assert leave_one_out([0.1, 0.1 + 1e-8], [0, 0]) == [0.0] * 2  # rounding of a divergence


def test_the_divergence_of_an_answer_is_that_of_the_tokens_of_the_policy() -> None:
    each = rollout((5,), (6, 7, 8), by_policy=(True, False, True), log_probs=(-1.0, None, -0.5))
    assert divergence(each, [-1.5, -9.0, -0.25]) == pytest.approx(0.5 - 0.25)
    assert divergence(each, []) == 0


def test_it_learns(policy_model: Path, tmp_path: Path) -> None:
    assert algorithm_class("rloo") is RLOO
    RLOO(replace(FAST, epochs=6)).train(work(policy_model, tmp_path))
    lines = curves(tmp_path)
    assert lines[0]["reward"] < 0.35 < 0.6 < lines[-1]["reward"]
    assert lines[0]["divergence"] == pytest.approx(0, abs=1e-4) and lines[-1]["divergence"] > 0.01


def test_the_divergence_is_paid_for(policy_model: Path, tmp_path: Path) -> None:
    class Flat(Letters):
        reward_range = (0.0, 0.0)

        def rewards(self, problems, completions):  # type: ignore[no-untyped-def]
            return [replace(each, value=0.0) for each in super().rewards(problems, completions)]

    far = RLOO(replace(FAST, epochs=6)).train(work(policy_model, tmp_path / "far"))
    told = work(policy_model, tmp_path / "back", policy=far, reference=Policy(str(policy_model)), task=Flat())
    RLOO(replace(FAST, kl_coef=1.0, epochs=6)).train(told)
    lines = curves(tmp_path / "back")
    assert lines[-1]["divergence"] < 0.5 * lines[0]["divergence"]
    free = replace(told, folder=tmp_path / "free")
    RLOO(replace(FAST, kl_coef=0.0, epochs=1)).train(free)
    assert same(tmp_path / "free/model", tmp_path / "far/model")  # equal rewards, and nothing else to learn from


def test_a_training_that_was_stopped_goes_on_exactly(policy_model: Path, tmp_path: Path) -> None:
    options = replace(FAST, num_iterations=2, minibatch_size=16, scheduler=Scheduler.LINEAR)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    RLOO(options).train(work(policy_model, straight))
    stopping = iter([False, False, True]).__next__
    with pytest.raises(Stopped):
        RLOO(options).train(work(policy_model, broken, hooks=Hooks(stopping=stopping)))
    RLOO(options).train(work(policy_model, broken))
    assert same(straight / "model", broken / "model")
    assert curves(straight) == curves(broken)


def test_what_it_can_not_do_is_refused() -> None:
    with pytest.raises(UsageError, match="samples_per_prompt=1; an answer is compared with the others"):
        RLOOOptions(samples_per_prompt=1)
    with pytest.raises(UsageError, match="loss_type=gspo"):
        RLOOOptions(loss_type="gspo")  # type: ignore[arg-type]
