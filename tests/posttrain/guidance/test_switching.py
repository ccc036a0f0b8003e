"""Rollouts of Q# and CD, collected from a real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain.guidance.letters import SAMPLING, Letters, collecting
from tests.posttrain.guidance.rows import rollout

from gpuherd.posttrain.guidance.switching import behind_the_switch, reference_rollouts, rolled_in, switched_rollouts
from gpuherd.posttrain.types import Split


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 3), st.text(max_size=5), st.integers(0, 9))
def test_at_least_one_token_is_left_to_the_reference(
    length: int, seed: int, number: int, problem: str, sample: int
) -> None:
    assert 0 <= rolled_in(length, seed, number, problem, sample) < length


def test_switch_times_are_even() -> None:
    told = [rolled_in(4, 0, 1, f"p{number}", 0) for number in range(2000)]
    assert all(abs(told.count(kept) - 500) < 80 for kept in range(4))  # 4 standard deviations are 77


def test_tokens_before_the_switch_are_another_policys() -> None:
    told = behind_the_switch(rollout(ids=(1, 2, 3)), 2)
    assert (told.rolled_in, told.by_policy) == (2, (False, False, True))


def test_the_first_round_is_of_the_reference(reference: Path) -> None:
    task = Letters()
    rows = list(switched_rollouts(collecting(reference, task), 3))
    problems = task.problems(Split.TRAIN, None, 0)
    assert [(each.problem, each.sample) for each in rows] == [
        (each.id, sample) for each in problems for sample in range(3)
    ]
    assert all(each.rolled_in == 0 and all(each.by_policy) for each in rows)
    assert all(each.reward == float(each.text.count("a") == 1) and each.correct is not None for each in rows)
    assert 0 < sum(each.reward for each in rows) < len(rows)
    assert rows == list(reference_rollouts(collecting(reference, task), 3))


def test_rows_are_the_same_for_any_division_and_batch(reference: Path) -> None:
    task = Letters()
    whole = list(switched_rollouts(collecting(reference, task), 4))
    problems = task.problems(Split.TRAIN, None, 0)
    parts = [
        row
        for shard in (problems[:1], problems[1:6], problems[6:])
        for row in switched_rollouts(
            collecting(reference, task, problems=shard, sampling=replace(SAMPLING, batch_size=3)), 4
        )
    ]
    assert [(each.problem, each.sample, each.ids, each.reward) for each in parts] == [
        (each.problem, each.sample, each.ids, each.reward) for each in whole
    ]


def test_each_round_of_the_reference_draws_anew(reference: Path) -> None:
    task = Letters()
    first, second = (list(reference_rollouts(collecting(reference, task, number=number), 4)) for number in (0, 1))
    assert [each.ids for each in first] != [each.ids for each in second]


def test_rewards_are_asked_for_in_batches(reference: Path) -> None:
    task = Letters()
    list(switched_rollouts(replace(collecting(reference, task), reward_batch_size=5), 2))
    assert task.asked == [5, 5, 5, 3]
