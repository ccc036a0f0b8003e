"""Batches: every prompt once, longest first, within their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.lm.forward import common_prefix, halved, pieces, plan_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(1, 9), st.none() | st.integers(1, 200))
def test_every_prompt_is_in_one_batch_of_bounded_size(lengths: list[int], rows: int, most_tokens: int | None) -> None:
    batches = plan_batches(lengths, rows=rows, most_tokens=most_tokens)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    in_order = [lengths[place] for batch in batches for place in batch]
    assert in_order == sorted(lengths, reverse=True)
    for batch in batches:
        assert 1 <= len(batch) <= rows
        padded = lengths[batch[0]] * len(batch)
        assert most_tokens is None or padded <= most_tokens or len(batch) == 1


@given(LENGTHS, st.integers(1, 9))
def test_batches_are_full_but_the_last(lengths: list[int], rows: int) -> None:
    assert all(len(batch) == rows for batch in plan_batches(lengths, rows=rows)[:-1])


def test_no_batch_without_a_row() -> None:
    with pytest.raises(UsageError):
        plan_batches([1], rows=0)


@given(st.lists(st.integers(), min_size=2, max_size=20))
def test_halves_are_the_whole(batch: list[int]) -> None:
    first, second = halved(batch)
    assert [*first, *second] == batch
    assert 0 <= len(first) - len(second) <= 1


@given(st.integers(0, 30), st.none() | st.integers(1, 40))
def test_pieces_are_the_whole(count: int, most: int | None) -> None:
    some = list(pieces(count, most))
    assert [place for each in some for place in each] == list(range(count))
    assert all(1 <= len(each) <= (most or count) for each in some)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=5))
def test_the_common_prefix_is_shared_as_long_as_can_be_and_leaves_a_token(rows: list[list[int]]) -> None:
    same = common_prefix(rows)
    assert all(row[:same] == rows[0][:same] and len(row) > same for row in rows)
    longer = same + 1
    assert any(row[:longer] != rows[0][:longer] or len(row) <= longer for row in rows)
