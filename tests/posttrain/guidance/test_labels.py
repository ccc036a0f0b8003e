"""Labels of tokens, by hand."""

from __future__ import annotations

from tests.posttrain.guidance.rows import comparison, rollout

from gpuherd.posttrain.guidance.labels import Example, informative, of_comparison, of_rollout, verifiable


def test_every_token_behind_the_switch_gets_the_reward_and_none_before_it() -> None:
    assert of_rollout(rollout(rolled_in=2), 0.75) == (
        Example("p", (9, 8, 1, 2, 3), (False, False, False, False, True), 0.75),
    )
    assert of_rollout(rollout(), 0.0)[0].labelled == (False, False, True, True, True)


def test_an_environments_words_are_not_labelled() -> None:
    (example,) = of_rollout(rollout(by_policy=(True, False, True)), 1.0)
    assert example.labelled == (False, False, True, False, True)
    assert example.tokens == 2


def test_nothing_to_label_is_no_lesson() -> None:
    assert of_rollout(rollout(ids=()), 1.0) == ()
    assert of_rollout(rollout(rolled_in=3), 1.0) == ()
    assert of_rollout(rollout(by_policy=(True, False, False), rolled_in=1), 1.0) == ()


def test_of_a_comparison_the_preferred_completion_is_one_and_the_other_nought() -> None:
    assert of_comparison(comparison()) == (
        Example("p", (9, 8, 1, 2, 3), (False, False, False, True, True), 1.0),
        Example("p", (9, 8, 1, 4), (False, False, False, True), 0.0),
    )
    assert [each.target for each in of_comparison(comparison(), 0.3, 0.7)] == [0.3, 0.7]


def test_a_comparison_with_an_empty_side_is_no_lesson() -> None:
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
