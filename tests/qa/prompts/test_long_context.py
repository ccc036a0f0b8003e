"""How much of a context is kept: pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.qa.prompts.maker import LongContext, cut_context, largest


@given(st.integers(1, 5000), st.data())
def test_the_largest_number_that_fits_is_found_from_any_guess(most: int, data: st.DataObject) -> None:
    answer = data.draw(st.integers(0, most - 1))
    guess = data.draw(st.integers(-10, 2 * most))
    assert largest(lambda number: number <= answer, most, guess) == answer


@given(st.integers(10_000, 10**6), st.floats(0.9, 1.1))
def test_a_good_guess_is_never_left_far_behind(answer: int, error: float) -> None:
    tried = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= answer

    assert largest(fits, 10**8, round(answer * error)) == answer
    assert max(tried) < 2 * answer
    assert len(tried) < 30


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(0, 70))
def test_what_is_found_fits_even_where_fitting_goes_up_and_down(fitting: list[bool], guess: int) -> None:
    found = largest(lambda number: fitting[number - 1], len(fitting) + 1, guess)
    assert found == 0 or fitting[found - 1]


RULES: tuple[LongContext, ...] = ("cut", "cut-start", "cut-middle")


@pytest.mark.parametrize("rule", RULES)
@given(text=st.text(st.sampled_from("ab \n"), max_size=60), kept=st.integers(0, 60))
def test_a_part_is_of_the_text_and_no_longer_than_asked(rule: LongContext, text: str, kept: int) -> None:
    part = cut_context(text, kept, rule)
    pieces = part.split("\n[…]\n") if rule == "cut-middle" and kept < len(text) else [part]
    assert all(piece in text for piece in pieces)
    assert sum(map(len, pieces)) <= max(kept, 0) or kept >= len(text)


def test_words_longer_than_any_word_are_cut() -> None:
    assert len(cut_context("x" * 500, 200, "cut")) == 200
    assert len(cut_context("x" * 500, 200, "cut-start")) == 200
