"""Rollouts of Q# and CD, and comparisons of PITA and Q#-HF, collected from a real model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain.guidance.letters import SAMPLING, Letters, collecting
from tests.posttrain.guidance.rows import rollout

from gpuherd.errors import UsageError
from gpuherd.posttrain.guidance.collecting import (
    behind_the_switch,
    comparisons,
    reference_rollouts,
    rolled_in,
    switched_rollouts,
)
from gpuherd.posttrain.guidance.options import ComparingOptions
from gpuherd.posttrain.types import Reward, Split


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


SURE = ComparingOptions(samples_per_example=4, bradley_terry_sampling=False)
DRAWN = replace(SURE, bradley_terry_sampling=True)


def test_a_right_completion_scores_its_bonus_too() -> None:
    assert SURE.score(Reward(0.5, True)) == 5.5
    assert SURE.score(Reward(0.5, False)) == SURE.score(Reward(0.5, None)) == 0.5


def test_the_higher_score_is_preferred_and_none_of_equal_ones() -> None:
    assert SURE.prefers_first(2.0, 1.0, 0.99) is True
    assert SURE.prefers_first(1.0, 2.0, 0.0) is False
    assert SURE.prefers_first(1.0, 1.0, 0.5) is None


def test_preferences_are_drawn_by_bradley_and_terrys_probability() -> None:
    p = 1 / (1 + math.exp(-2.0 * (1.0 - 0.25)))
    how = replace(DRAWN, bradley_terry_beta=2.0)
    assert how.prefers_first(1.0, 0.25, p - 1e-9) is True
    assert how.prefers_first(1.0, 0.25, p + 1e-9) is False
    assert DRAWN.prefers_first(1.0, 1.0, 0.49) is True
    assert DRAWN.prefers_first(1.0, 1.0, 0.51) is False
    assert DRAWN.prefers_first(-1e9, 1e9, 0.0) is False  # no overflow, and never
    assert DRAWN.prefers_first(1e9, -1e9, 0.999999) is True


@pytest.mark.parametrize(
    "words",
    [{"bradley_terry_beta": 0.0}, {"bradley_terry_beta": math.inf}, {"correct_bonus": math.nan}, {"first_cut": 2}],
)
def test_numbers_that_can_not_be_are_refused(words: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(words))}="):
        ComparingOptions(**words)  # type: ignore[arg-type]


def test_comparisons_begin_with_the_greedy_answer_and_prefer_by_score(
    reference: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from gpuherd.posttrain.rollout.sampler import Prefix, Sampler
    from gpuherd.posttrain.types import Policy, Precision

    task = Letters()
    work = collecting(reference, task, sampling=replace(SAMPLING, max_new_tokens=5))
    caplog.set_level("INFO", logger="gpuherd.posttrain.guidance.collecting")
    rows = list(comparisons(work, SURE))
    sampler = Sampler(Policy(str(reference)), Precision("float32"), "cpu", work.sampling)
    prompts = {each.id: sampler.prompt_ids(each) for each in work.problems}
    greedy = {
        name: only.ids
        for name, (only,) in zip(
            prompts,
            sampler.continuations([Prefix(name, ids) for name, ids in prompts.items()], greedy=True),
            strict=True,
        )
    }
    assert rows
    for row in rows:
        whole = greedy[row.problem]
        length = len(row.context_ids)
        assert 1 <= length < len(whole)
        assert row.prompt_ids == prompts[row.problem]
        assert row.context_ids == whole[:length]
        assert whole[length:] in (row.chosen_ids, row.rejected_ids)
        assert row.chosen_ids != row.rejected_ids
        assert row.chosen_reward == 1.0 and row.rejected_reward == 0.0
        assert task.reward(row.chosen).correct and not task.reward(row.rejected).correct
    assert "comparisons left out in round 0" in caplog.text
    assert "with equal scores" in caplog.text


def test_comparisons_are_the_same_for_any_division_and_batch(reference: Path) -> None:
    task = Letters()
    sampling = replace(SAMPLING, max_new_tokens=5)
    whole = list(comparisons(collecting(reference, task, sampling=sampling), DRAWN))
    problems = task.problems(Split.TRAIN, None, 0)
    parts = [
        row
        for shard in (problems[:2], problems[2:3], problems[3:])
        for row in comparisons(
            collecting(reference, task, problems=shard, sampling=replace(sampling, batch_size=2)), DRAWN
        )
    ]
    assert parts == whole
    assert len(whole) > 10


def test_an_answer_of_one_token_is_not_cut(reference: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="gpuherd.posttrain.guidance.collecting")
    work = collecting(reference, Letters(), sampling=replace(SAMPLING, max_new_tokens=1))
    assert list(comparisons(work, DRAWN)) == []
    assert "36 of answers too short to be cut" in caplog.text
    at_the_prompt = list(comparisons(work, replace(DRAWN, first_cut=0)))
    assert at_the_prompt
    assert {each.context_ids for each in at_the_prompt} == {()}


def test_answers_are_cut_before_their_first_token_where_that_is_asked_for(reference: Path) -> None:
    work = collecting(reference, Letters())
    found = {len(each.context_ids) for each in comparisons(work, replace(DRAWN, first_cut=0))}
    assert found == {0, 1, 2}
    assert {len(each.context_ids) for each in comparisons(work, DRAWN)} == {1, 2}
