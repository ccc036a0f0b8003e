"""Two tokenizers compared: the first token that differs is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.lm.guidance.guide import first_difference, refuse_other_tokens, tokens_digest

TOKENS = st.dictionaries(st.text(max_size=3), st.integers(0, 30), max_size=8)


@settings(max_examples=40, deadline=None)
@given(TOKENS, TOKENS)
def test_two_are_the_same_where_no_id_differs(one: dict[str, int], other: dict[str, int]) -> None:
    assert (first_difference(one, other) is None) == (one == other)
    assert (tokens_digest(one) == tokens_digest(other)) == (one == other)


def test_the_first_difference_is_that_of_the_smallest_id() -> None:
    ours = {"a": 0, "b": 1, "c": 2, "also c": 2}
    theirs = {"a": 0, "x": 1, "c": 2}
    assert first_difference(ours, theirs) == "id 1 is 'b' to the policy and 'x' to the classifier"
    assert first_difference(ours, theirs | {"b": 1} | {}) is not None
    same_but_one = {"a": 0, "b": 1, "c": 2}
    assert first_difference(ours, same_but_one) == "id 2 is 'also c' or 'c' to the policy and 'c' to the classifier"
    assert first_difference({"a": 0}, {}) == "id 0 is 'a' to the policy and no token to the classifier"
    refuse_other_tokens(ours, dict(reversed(ours.items())), "x")
    with pytest.raises(UsageError, match=r"classifier small can't guide this policy.*id 1"):
        refuse_other_tokens(ours, theirs, "small")
