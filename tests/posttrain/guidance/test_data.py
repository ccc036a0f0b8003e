"""From rows to lessons."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain.guidance.rows import comparison, rollout

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Mode
from gpuherd.posttrain.guidance.data import digest, kept_apart, of_comparisons, of_rollouts
from gpuherd.posttrain.guidance.options import Guidance, Loss, ValueOptions
from gpuherd.posttrain.types import Rollout

ALL = ValueOptions(validation_share=0.0, loss_type=None)


def graded(reward: float, problem: str = "p") -> Rollout:
    return rollout(problem, reward=reward, correct=None)


MIXED = [rollout("p", correct=True), rollout("p", correct=False)]


def test_where_completions_are_right_or_wrong_that_is_the_label() -> None:
    data = of_rollouts([MIXED], ALL)
    assert data.loss is Loss.BCE and data.atoms == ()
    assert [each.target for (each,) in data.lessons] == [1.0, 0.0]
    histogram = of_rollouts([MIXED], replace(ALL, loss_type=Loss.MLE, V_min=-1.0, V_max=1.0, num_atoms=3))
    assert [each.target for (each,) in histogram.lessons] == [1.0, -1.0]
    assert histogram.atoms == (-1.0, 0.0, 1.0)


def test_other_rewards_are_normalised_by_the_tasks_range_or_the_data() -> None:
    rows = [graded(1.0), graded(2.0), graded(3.0)]
    data = of_rollouts([rows[:2], rows[2:]], ALL)
    assert data.loss is Loss.MLE and len(data.atoms) == 11
    assert [each.target for (each,) in data.lessons] == [0.0, 0.5, 1.0]
    assert data.told["scale"]["known_from"] == "data"
    told = of_rollouts([rows], ALL, (1.0, 5.0))
    assert [each.target for (each,) in told.lessons] == [0.0, 0.25, 0.5]
    assert told.told["scale"]["known_from"] == "task"


def test_a_reward_that_says_more_than_right_or_wrong_is_what_is_learnt() -> None:
    """Such as the share of tests that passed: what is wrong has earned something too, and no problem is left out."""
    rows = [rollout(correct=False, reward=0.0), rollout(correct=False, reward=0.5), rollout("q", correct=True)]
    data = of_rollouts([rows], ALL, (0.0, 1.0))
    assert data.loss is Loss.MLE
    assert [each.target for (each,) in data.lessons] == [0.0, 0.5, 1.0]
    assert "problems_all_wrong" not in data.told


def test_ends_that_nothing_reads_are_refused() -> None:
    with pytest.raises(UsageError, match=r"V_max=2.0: the loss is bce here"):
        of_rollouts([MIXED], replace(ALL, V_max=2.0))


def test_groups_are_of_a_round_and_what_teaches_nothing_is_counted() -> None:
    wrong = rollout("p", correct=False)
    easy, hard = [rollout("easy", correct=True)], [rollout("hard", correct=False)]
    data = of_rollouts([[*MIXED, *easy], [wrong, *hard]], ALL)
    assert len(data.lessons) == 2  # the second round's only completion of p is wrong
    assert data.told["problems_all_right"] == 1
    assert data.told["problems_all_wrong"] == 2
    assert data.told["rollouts"] == 5


def test_nothing_to_learn_from_is_said() -> None:
    with pytest.raises(UsageError, match=r"of 2 rollouts all .* \(0 and 1 problems\)"):
        of_rollouts([[rollout(correct=False)] * 2], ALL)
    with pytest.raises(UsageError, match=r"all 2 rewards are 0\.5"):
        of_rollouts([[graded(0.5)] * 2], ALL)
    with pytest.raises(UsageError, match="no comparison was collected"):
        of_comparisons([[]], ALL)
    empty = [rollout(ids=(), correct=True), rollout(ids=(), correct=False)]
    with pytest.raises(UsageError, match="2 of them with no token to label"):
        of_rollouts([empty], ALL)


def test_comparisons_are_one_and_nought_or_their_scores() -> None:
    data = of_comparisons([[comparison()], [comparison("q")]], ALL)
    assert data.loss is Loss.BCE
    assert [[each.target for each in lesson] for lesson in data.lessons] == [[1.0, 0.0]] * 2
    scored = of_comparisons([[comparison()], [comparison("q")]], ALL, [(3.0, -1.0), (1.0, 0.0)])
    assert scored.loss is Loss.MLE
    assert [[each.target for each in lesson] for lesson in scored.lessons] == [[1.0, 0.0], [0.5, 0.25]]
    atoms = of_comparisons([[comparison()]], replace(ALL, loss_type=Loss.MLE, V_max=2.0))
    assert [each.target for each in atoms.lessons[0]] == [2.0, 0.0]


def test_a_completion_without_a_token_is_counted() -> None:
    data = of_comparisons([[comparison(), comparison(rejected=())]], ALL)
    assert (len(data.lessons), data.told["without_a_token"]) == (1, 1)


def test_rows_of_another_algorithm_are_refused() -> None:
    with pytest.raises(UsageError, match="rows of a comparison among those of a rollout"):
        of_rollouts([[*MIXED, comparison()]], ALL)
    with pytest.raises(UsageError, match="rows of a rollout among those of a comparison"):
        of_comparisons([[rollout()]], ALL)


def test_losses_and_modes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UsageError, match="learns from comparisons"):
        of_rollouts([MIXED], replace(ALL, loss_type=Loss.BRADLEY_TERRY))
    with pytest.raises(UsageError, match="distributional is for loss_type=mle"):
        of_rollouts([MIXED], replace(ALL, guidance=Guidance(mode=Mode.DISTRIBUTIONAL)))
    with pytest.raises(UsageError, match="bernoulli is for a loss of one logit"):
        of_rollouts([[graded(0.0), graded(1.0)]], replace(ALL, guidance=Guidance(mode=Mode.BERNOULLI)))


@settings(max_examples=30)
@given(st.text("ab\n\ud800", max_size=8))
def test_shares_grow_around_each_other(problem: str) -> None:
    assert not kept_apart(problem, 0.0)
    if kept_apart(problem, 0.2):
        assert kept_apart(problem, 0.5)


def test_about_the_share_is_kept_apart_and_never_learnt_from() -> None:
    rows = [rollout(f"p{number}", correct=right) for number in range(400) for right in (True, False)]
    data = of_rollouts([rows[:400], rows[400:]], replace(ALL, validation_share=0.25))
    learnt, held_out = ({each.problem for (each,) in some} for some in (data.lessons, data.held_out))
    assert not learnt & held_out
    assert 70 <= len(held_out) <= 130
    assert data.told["held_out"] == len(data.held_out) == 2 * len(held_out)


def test_digests_tell_data_apart() -> None:
    one = of_rollouts([MIXED], ALL).lessons
    others = [
        of_rollouts([list(reversed(MIXED))], ALL).lessons,
        of_rollouts([[MIXED[0], replace(MIXED[1], ids=(1, 2, 4))]], ALL).lessons,
        of_rollouts([[MIXED[0], replace(MIXED[1], rolled_in=1)]], ALL).lessons,
    ]
    assert digest(one) == digest(of_rollouts([MIXED], ALL).lessons)
    assert len({digest(one), *map(digest, others)}) == 4
