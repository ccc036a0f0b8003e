"""Which problems of a split are taken, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.data.dataset import first_problems, without_last_tenth
from gpuherd.posttrain.data.generated import Shuffled
from gpuherd.posttrain.types import Problem


@settings(max_examples=12)
@given(st.integers(0, 80), st.text(max_size=5))
def test_shuffled_holds_each_number_once(size: int, key: str) -> None:
    shuffled = Shuffled(size, key)
    assert sorted(shuffled) == list(range(size))
    assert [shuffled[place] for place in range(size)] == list(shuffled)


def test_shuffled_is_another_order_for_another_key_and_large_numbers_are_no_matter() -> None:
    assert list(Shuffled(1000, "a")) != list(Shuffled(1000, "b"))
    huge = Shuffled(10**36, "a")
    some = {huge[place] for place in range(100)}
    assert len(some) == 100
    assert max(some) > 10**35
    assert huge[-1] == huge[10**36 - 1]
    with pytest.raises(IndexError):
        huge[10**36]


def test_all_digits_of_a_very_large_number_are_mixed() -> None:
    shuffled = Shuffled(10**180, "a")
    for part in range(0, 180, 20):
        assert len({shuffled[place] // 10**part % 10**20 for place in range(20)}) == 20


@settings(max_examples=15)
@given(st.lists(st.text("abc", min_size=1, max_size=4), unique=True, min_size=1), st.integers(0, 3), st.randoms())
def test_the_first_problems_depend_on_seed_and_ids_alone(ids: list[str], seed: int, random: object) -> None:
    problems = [Problem(each, each) for each in ids]
    in_order = first_problems(problems, None, seed, "t")
    random.shuffle(problems)  # type: ignore[attr-defined]
    assert first_problems(problems, None, seed, "t") == in_order
    for count in range(1, len(ids) + 1):
        assert first_problems(problems, count, seed, "t") == in_order[:count]


def test_more_problems_than_there_are_is_an_error_with_both_counts() -> None:
    problems = [Problem(str(each), "") for each in range(3)]
    with pytest.raises(UsageError, match="gsm8k, train: 4 problems were asked for and there are 3"):
        first_problems(problems, 4, 0, "gsm8k, train")
    with pytest.raises(UsageError, match="0 problems"):
        first_problems(problems, 0, 0, "gsm8k, train")


@settings(max_examples=15)
@given(st.integers(0, 500))
def test_the_last_tenth_is_held_out(count: int) -> None:
    problems = [Problem(str(each), "") for each in range(count)]
    train, heldout = without_last_tenth(problems)
    assert [*train, *heldout] == problems
    assert len(heldout) == (0 if count < 2 else -(-count // 10))
