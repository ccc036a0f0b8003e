"""Equal answers vote together, however they are written; others never do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.posttrain.eval.answers import answer_of, asks_for_number, numbered
from gpuherd.posttrain.types import Problem


@pytest.mark.parametrize(
    ("one", "other", "number", "same"),
    [
        ("The answer is 1,200.", "… so it costs $1200", True, True),
        ("#### 0.5", "\\boxed{1/2}", True, True),
        ("50 %", "50", True, False),
        ("3,4,5", "3, 4, 5", False, True),
        ("3,4,5", "3,45", False, False),
        ("\\boxed{x + 1}", "We get \\boxed{x+1}", False, True),
        ("Paris", "paris ", False, True),
        ("def f(): return 1", "def g(): return 1", False, False),
        ("I have 3 dogs and 4 cats", "there are 4", True, True),
    ],
)
def test_which_answers_are_one(one: str, other: str, number: bool, same: bool) -> None:
    assert (answer_of(one, number=number) == answer_of(other, number=number)) is same


@settings(max_examples=30)
@given(st.text(max_size=30), st.booleans())
def test_every_text_answers_something_or_nothing(text: str, number: bool) -> None:
    found = answer_of(text, number=number)
    assert found is None or found != ""


def test_what_is_asked_for() -> None:
    assert asks_for_number(Problem("a", "q", ("a long solution #### 3",), {"value": "3"}))
    assert not asks_for_number(Problem("b", "q", ("x^2",))) and not asks_for_number(Problem("c", "q"))


@settings(max_examples=30)
@given(st.lists(st.none() | st.text(max_size=2), max_size=10))
def test_numbers_say_which_are_equal(answers: list[str | None]) -> None:
    found = numbered(answers)
    for one, a in zip(answers, found, strict=True):
        assert (one is None) == (a is None)
        for other, b in zip(answers, found, strict=True):
            assert (one == other) == (a == b)
