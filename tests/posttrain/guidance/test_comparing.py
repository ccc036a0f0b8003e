"""Comparisons of PITA and Q#-HF, collected from a real model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tests.posttrain.guidance.letters import SAMPLING, Letters, collecting

from gpuherd.errors import UsageError
from gpuherd.posttrain.guidance.comparing import Preferring, comparisons
from gpuherd.posttrain.types import Reward, Split

SURE = Preferring(samples=4, drawn=False, beta=1.0, correct_bonus=5.0)
DRAWN = replace(SURE, drawn=True)


def test_a_right_completion_scores_its_bonus_too() -> None:
    assert SURE.score(Reward(0.5, True)) == 5.5
    assert SURE.score(Reward(0.5, False)) == SURE.score(Reward(0.5, None)) == 0.5


def test_the_higher_score_is_preferred_and_none_of_equal_ones() -> None:
    assert SURE.first(2.0, 1.0, 0.99) is True
    assert SURE.first(1.0, 2.0, 0.0) is False
    assert SURE.first(1.0, 1.0, 0.5) is None


def test_preferences_are_drawn_by_bradley_and_terrys_probability() -> None:
    p = 1 / (1 + math.exp(-2.0 * (1.0 - 0.25)))
    how = replace(DRAWN, beta=2.0)
    assert how.first(1.0, 0.25, p - 1e-9) is True
    assert how.first(1.0, 0.25, p + 1e-9) is False
    assert DRAWN.first(1.0, 1.0, 0.49) is True
    assert DRAWN.first(1.0, 1.0, 0.51) is False
    assert DRAWN.first(-1e9, 1e9, 0.0) is False  # no overflow, and never
    assert DRAWN.first(1e9, -1e9, 0.999999) is True


@pytest.mark.parametrize("words", [{"beta": 0.0}, {"beta": math.inf}, {"correct_bonus": math.nan}, {"first_cut": 2}])
def test_numbers_that_can_not_be_are_refused(words: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"(bradley_terry_)?{next(iter(words))}="):
        Preferring(**{"samples": 4, "drawn": False, "beta": 1.0, "correct_bonus": 5.0, **words})  # type: ignore[arg-type]


def test_comparisons_begin_with_the_greedy_answer_and_prefer_by_score(
    reference: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from gpuherd.posttrain.rollout.sampler import Prefix, Sampler
    from gpuherd.posttrain.types import Policy, Precision

    task = Letters()
    work = collecting(reference, task, sampling=replace(SAMPLING, max_new_tokens=5))
    caplog.set_level("INFO", logger="gpuherd.posttrain.guidance.comparing")
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
    caplog.set_level("INFO", logger="gpuherd.posttrain.guidance.comparing")
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
