"""Labelled data from the rows of all rounds, and the scale of rewards."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.posttrain.guidance.rows import comparison, rollout

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import Mode
from gpuherd.posttrain.guidance.data import (
    LabelledSequence,
    Scale,
    atoms,
    digest,
    informative,
    is_held_out,
    of_comparison,
    of_comparisons,
    of_rollout,
    of_rollouts,
    scale_of,
    uniform,
    verifiable,
    whole_number,
)
from gpuherd.posttrain.guidance.options import Guidance, Loss, ValueOptions
from gpuherd.posttrain.types import Rollout


def test_every_token_behind_the_switch_gets_the_reward_and_none_before_it() -> None:
    assert of_rollout(rollout(rolled_in=2), 0.75) == (
        LabelledSequence("p", (9, 8, 1, 2, 3), (False, False, False, False, True), 0.75),
    )
    assert of_rollout(rollout(), 0.0)[0].labelled == (False, False, True, True, True)


def test_an_environments_words_are_not_labelled() -> None:
    (sequence,) = of_rollout(rollout(by_policy=(True, False, True)), 1.0)
    assert sequence.labelled == (False, False, True, False, True)
    assert sequence.tokens == 2


def test_nothing_to_label_is_no_example() -> None:
    assert of_rollout(rollout(ids=()), 1.0) == ()
    assert of_rollout(rollout(rolled_in=3), 1.0) == ()
    assert of_rollout(rollout(by_policy=(True, False, False), rolled_in=1), 1.0) == ()


def test_of_a_comparison_the_preferred_completion_is_one_and_the_other_nought() -> None:
    assert of_comparison(comparison()) == (
        LabelledSequence("p", (9, 8, 1, 2, 3), (False, False, False, True, True), 1.0),
        LabelledSequence("p", (9, 8, 1, 4), (False, False, False, True), 0.0),
    )
    assert [each.target for each in of_comparison(comparison(), 0.3, 0.7)] == [0.3, 0.7]


def test_a_comparison_with_an_empty_side_is_no_example() -> None:
    assert of_comparison(comparison(rejected=())) == ()
    assert of_comparison(comparison(chosen=())) == ()


def test_problems_all_right_or_all_wrong_are_left_out_and_counted() -> None:
    mixed = [rollout("mixed", correct=True), rollout("mixed", correct=False)]
    right = [rollout("right", correct=True)] * 2
    wrong = [rollout("wrong", correct=False)]
    told = informative([mixed[0], *right, *wrong, mixed[1]])
    assert told.rollouts == (mixed[0], mixed[1])
    assert (told.all_right, told.all_wrong) == (1, 1)
    assert informative([]).rollouts == ()


def test_rewards_are_verdicts_only_where_each_completion_has_one_and_the_reward_says_no_more() -> None:
    assert verifiable([rollout(correct=True), rollout(correct=False)])
    assert not verifiable([rollout(correct=True), rollout(correct=None)])
    assert not verifiable([rollout(correct=True), rollout(correct=False, reward=0.5)])  # half of the tests passed


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


ALL = ValueOptions(validation_share=0.0, loss_type=None)


def graded(reward: float, problem: str = "p") -> Rollout:
    return rollout(problem, reward=reward, correct=None)


MIXED = [rollout("p", correct=True), rollout("p", correct=False)]


def test_where_completions_are_right_or_wrong_that_is_the_label() -> None:
    data = of_rollouts([MIXED], ALL)
    assert data.loss is Loss.BCE and data.atoms == ()
    assert [each.target for (each,) in data.examples] == [1.0, 0.0]
    histogram = of_rollouts([MIXED], replace(ALL, loss_type=Loss.MLE, V_min=-1.0, V_max=1.0, num_atoms=3))
    assert [each.target for (each,) in histogram.examples] == [1.0, -1.0]
    assert histogram.atoms == (-1.0, 0.0, 1.0)


def test_other_rewards_are_normalised_by_the_tasks_range_or_the_data() -> None:
    rows = [graded(1.0), graded(2.0), graded(3.0)]
    data = of_rollouts([rows[:2], rows[2:]], ALL)
    assert data.loss is Loss.MLE and len(data.atoms) == 11
    assert [each.target for (each,) in data.examples] == [0.0, 0.5, 1.0]
    assert data.summary["scale"]["known_from"] == "data"
    told = of_rollouts([rows], ALL, (1.0, 5.0))
    assert [each.target for (each,) in told.examples] == [0.0, 0.25, 0.5]
    assert told.summary["scale"]["known_from"] == "task"


def test_a_reward_that_says_more_than_right_or_wrong_is_what_is_learnt() -> None:
    """Such as the share of tests that passed: what is wrong has earned something too, and no problem is left out."""
    rows = [rollout(correct=False, reward=0.0), rollout(correct=False, reward=0.5), rollout("q", correct=True)]
    data = of_rollouts([rows], ALL, (0.0, 1.0))
    assert data.loss is Loss.MLE
    assert [each.target for (each,) in data.examples] == [0.0, 0.5, 1.0]
    assert "problems_all_wrong" not in data.summary


def test_ends_that_nothing_reads_are_refused() -> None:
    with pytest.raises(UsageError, match=r"V_max=2.0: the loss is bce here"):
        of_rollouts([MIXED], replace(ALL, V_max=2.0))


def test_groups_are_of_a_round_and_what_teaches_nothing_is_counted() -> None:
    wrong = rollout("p", correct=False)
    easy, hard = [rollout("easy", correct=True)], [rollout("hard", correct=False)]
    data = of_rollouts([[*MIXED, *easy], [wrong, *hard]], ALL)
    assert len(data.examples) == 2  # the second round's only completion of p is wrong
    assert data.summary["problems_all_right"] == 1
    assert data.summary["problems_all_wrong"] == 2
    assert data.summary["rollouts"] == 5


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
    assert [[each.target for each in example] for example in data.examples] == [[1.0, 0.0]] * 2
    scored = of_comparisons([[comparison()], [comparison("q")]], ALL, [(3.0, -1.0), (1.0, 0.0)])
    assert scored.loss is Loss.MLE
    assert [[each.target for each in example] for example in scored.examples] == [[1.0, 0.0], [0.5, 0.25]]
    atoms = of_comparisons([[comparison()]], replace(ALL, loss_type=Loss.MLE, V_max=2.0))
    assert [each.target for each in atoms.examples[0]] == [2.0, 0.0]


def test_a_completion_without_a_token_is_counted() -> None:
    data = of_comparisons([[comparison(), comparison(rejected=())]], ALL)
    assert (len(data.examples), data.summary["without_a_token"]) == (1, 1)


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
    assert not is_held_out(problem, 0.0)
    if is_held_out(problem, 0.2):
        assert is_held_out(problem, 0.5)


def test_about_the_share_is_is_held_out_and_never_learnt_from() -> None:
    rows = [rollout(f"p{number}", correct=right) for number in range(400) for right in (True, False)]
    data = of_rollouts([rows[:400], rows[400:]], replace(ALL, validation_share=0.25))
    learnt, held_out = ({each.problem for (each,) in some} for some in (data.examples, data.held_out))
    assert not learnt & held_out
    assert 70 <= len(held_out) <= 130
    assert data.summary["held_out"] == len(data.held_out) == 2 * len(held_out)


def test_digests_tell_data_apart() -> None:
    one = of_rollouts([MIXED], ALL).examples
    others = [
        of_rollouts([list(reversed(MIXED))], ALL).examples,
        of_rollouts([[MIXED[0], replace(MIXED[1], ids=(1, 2, 4))]], ALL).examples,
        of_rollouts([[MIXED[0], replace(MIXED[1], rolled_in=1)]], ALL).examples,
    ]
    assert digest(one) == digest(of_rollouts([MIXED], ALL).examples)
    assert len({digest(one), *map(digest, others)}) == 4


def test_numbers_are_even_and_differ_by_each_of_the_four() -> None:
    told = Counter(whole_number(2, 5, 0, "cut", f"p{number}", 0) for number in range(4000))
    assert set(told) == {2, 3, 4, 5}
    assert all(abs(count - 1000) < 120 for count in told.values())  # 4 standard deviations are 110
    assert (
        len({uniform(0, "a", "p", 0), uniform(1, "a", "p", 0), uniform(0, "b", "p", 0), uniform(0, "a", "q", 0)}) == 4
    )


def test_one_number_to_choose_from() -> None:
    assert whole_number(3, 3, 0, "cut", "p", 0) == 3
