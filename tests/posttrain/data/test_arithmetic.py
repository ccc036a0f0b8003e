"""Sums."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.arithmetic import value_of
from gpuherd.posttrain.data.options import TaskOptions
from gpuherd.posttrain.data.registry import make_task
from gpuherd.posttrain.types import Split

SPLITS = tuple(Split)


@hypothesis.settings(max_examples=40)
@given(st.lists(st.integers(0, 99), min_size=2, max_size=6), st.data())
def test_a_sum_comes_to_what_python_says(numbers: list[int], data: st.DataObject) -> None:
    signs = [data.draw(st.sampled_from("+-*")) for _ in numbers[1:]]
    text = str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:], strict=True))
    assert value_of(text) == eval(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"digits": 1},
        {"digits": 1, "operations": "+-*", "operands": 3, "train": 300},
        {"train": 100, "heldout": 10, "test": 20},
    ],
)
def test_no_problem_is_in_two_splits_and_all_are_right(settings: dict[str, object]) -> None:
    task = make_task("arithmetic", TaskOptions(settings))
    parts = {split: task.problems(split, None, 0) for split in SPLITS}
    ids = [problem.id for part in parts.values() for problem in part]
    assert len(set(ids)) == len(ids)
    for part in parts.values():
        for problem in part:
            assert problem.prompt == f"{problem.id}="
            assert problem.answers == (str(eval(problem.id)),)
        rewards = task.rewards(part, [each.answers[0] for each in part])
        assert all(each.value == 1.0 and each.correct for each in rewards)
    if "heldout" in settings:
        assert [len(parts[split]) for split in SPLITS] == [100, 10, 20]


def test_rewards_are_exact() -> None:
    task = make_task("arithmetic", TaskOptions({"train": 10}))
    problem = task.problems(Split.TRAIN, 1, 0)[0]
    value = problem.answers[0]
    said = [value, f" {value}\n", f"{value}.", f"{value}{value}", "", "-" + value, "so " + value]
    rewards = task.rewards([problem] * len(said), said)
    assert [each.value for each in rewards] == [1, 1, 0, 0, 0, 0, 0]
    assert [each.correct for each in rewards] == [True, True, False, False, False, False, False]
    assert rewards[4].note == "not a number and nothing else"
    assert task.verifiable


def test_wrong_labels_are_imitated_and_not_paid() -> None:
    clean = make_task("arithmetic", TaskOptions({"train": 1000, "test": 50}))
    noisy = make_task("arithmetic", TaskOptions({"train": 1000, "test": 50, "wrong_labels": 0.5}))
    pairs = list(zip(clean.problems(Split.TRAIN, None, 0), noisy.problems(Split.TRAIN, None, 0), strict=True))
    assert all(one.id == other.id for one, other in pairs)
    wrong = [(one, other) for one, other in pairs if one.answers != other.answers]
    assert 0.45 < len(wrong) / len(pairs) < 0.55
    assert all(abs(int(one.answers[0]) - int(other.answers[0])) <= 99 for one, other in wrong)
    assert len({int(one.answers[0]) - int(other.answers[0]) for one, other in wrong}) > 90
    for reward in noisy.rewards([other for _, other in wrong], [other.answers[0] for _, other in wrong]):
        assert reward.value == 0
    assert clean.problems(Split.TEST, None, 0) == noisy.problems(Split.TEST, None, 0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"digits": 0}, "arithmetic.digits=0"),
        ({"digit": 2}, "arithmetic.digit; did you mean arithmetic.digits"),
        ({"digits": "two"}, "arithmetic.digits=two: it should be a whole number"),
        ({"operations": "+/"}, "operations"),
        ({"operands": 1}, "operands=1"),
        ({"wrong_labels": 1.5}, "wrong_labels=1.5"),
        ({"digits": 1, "train": 95}, "there are 100 such sums"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_task("arithmetic", TaskOptions(settings))
