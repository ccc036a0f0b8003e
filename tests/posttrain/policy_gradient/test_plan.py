"""Which problems stand in which step, and which rollouts in which minibatch."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.posttrain.policy_gradient.rollouts import rollout

from gpuherd.errors import UsageError
from gpuherd.posttrain.policy_gradient.plan import Plan, digest_of, grouped, groups_of, plan_of
from gpuherd.posttrain.types import Problem, Rollout


def made(sizes: list[int], batch: int, epochs: int = 1, minibatch: int | None = None, passes: int = 1) -> Plan:
    return plan_of(
        sizes, batch_size=batch, epochs=epochs, max_steps=None, minibatch_size=minibatch, passes=passes, seed="s"
    )


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3))
def test_every_epoch_has_every_problem_once(count: int, batch: int, epochs: int) -> None:
    plan = made([1] * count, batch, epochs)
    each = plan.steps // epochs

    assert plan.steps % epochs == 0 and each == -(-count // batch)
    for epoch in range(epochs):
        steps = [plan.units(step) for step in range(epoch * each, (epoch + 1) * each)]
        assert sorted(chain(*steps)) == list(range(count))
        assert all(len(units) == batch for units in steps[:-1])


@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 3))
def test_every_pass_has_every_rollout_once(count: int, minibatch: int, pass_number: int) -> None:
    parts = made([1] * 3, 3, minibatch=minibatch).minibatches(0, pass_number, count)

    assert sorted(chain(*parts)) == list(range(count))
    sizes = [len(part) for part in parts]
    assert max(sizes) <= minibatch and max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=10), st.integers(1, 4), st.integers(1, 7), st.integers(1, 3))
def test_updates_are_counted(sizes: list[int], batch: int, minibatch: int, passes: int) -> None:
    plan = made(sizes, batch, 2, minibatch, passes)
    counts = [sum(sizes[unit] for unit in plan.units(step)) for step in range(plan.steps)]
    assert plan.updates() == sum(
        len(plan.minibatches(step, number, count)) for step, count in enumerate(counts) for number in range(passes)
    )
    assert counts == [plan.count(step) for step in range(plan.steps)]
    assert plan.updates() == sum(plan.updates_of(step) for step in range(plan.steps))


def test_orders_belong_to_the_seed_the_step_and_the_pass() -> None:
    plan = made([1] * 30, 30, 2, minibatch=10)
    assert plan.units(0) == made([1] * 30, 30, 2).units(0) != plan.units(1)
    assert plan.minibatches(0, 0, 30) != plan.minibatches(0, 1, 30) != plan.minibatches(1, 1, 30)
    assert made([1], 1).minibatches(0, 0, 4) == [[0, 1, 2, 3]]


def test_there_is_something_to_learn_from() -> None:
    with pytest.raises(UsageError, match="nothing to learn from"):
        made([], 4)


def test_a_group_has_one_problem_and_one_prompt() -> None:
    some = [
        rollout((1,), (2,), problem="a", sample=1),
        rollout((1,), (2,), problem="b"),
        rollout((1,), (3,), problem="a", sample=0),
        rollout((9,), (2,), problem="a"),
    ]
    assert groups_of(some) == [0, 1, 0, 2]
    assert [[(each.problem, each.sample) for each in group] for group in grouped(some)] == [
        [("a", 0), ("a", 1)],
        [("b", 0)],
        [("a", 0)],
    ]


def test_a_digest_tells_data_apart() -> None:
    one, other = Problem("1", "1+1="), Problem("1", "1+2=")
    drawn = rollout((5,), (6, 7))
    kinds: list[list[list[Problem | Rollout]]] = [
        [[one]],
        [[other]],
        [[one, other]],
        [[other, one]],
        [[drawn]],
        [[rollout((5,), (6, 8))]],
    ]
    assert len({digest_of(each) for each in kinds}) == len(kinds)
    assert digest_of([[Problem("1", "1+1=")]]) == digest_of([[one]])
