"""Batches of all epochs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.guidance.batches import planned
from gpuherd.posttrain.guidance.labels import Example, Lesson


def lesson(*lengths: int) -> Lesson:
    return tuple(Example("p", (1,) * length, (True,) * length, 1.0) for length in lengths)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), max_size=60),
    st.integers(1, 9),
    st.integers(1, 200),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_each_lesson_once_an_epoch_within_both_bounds(
    lengths: list[list[int]], rows: int, most: int, epochs: int, seed: int
) -> None:
    lessons = [lesson(*each) for each in lengths]
    batches = planned(lessons, rows=rows, most_tokens=most, epochs=epochs, seed=seed)
    assert batches == planned(lessons, rows=rows, most_tokens=most, epochs=epochs, seed=seed)
    assert len(batches) == epochs
    for epoch in batches:
        assert sorted(place for batch in epoch for place in batch) == list(range(len(lessons)))
    for batch in (batch for epoch in batches for batch in epoch):
        assert 1 <= len(batch) <= rows
        widest = max(max(lengths[place]) for place in batch)
        sequences = sum(len(lengths[place]) for place in batch)
        assert widest * sequences <= most or len(batch) == 1


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    lessons = [lesson(5)] * 32
    batches = planned(lessons, rows=4, most_tokens=100, epochs=2, seed=0)
    assert batches[0] != batches[1]
    assert batches != planned(lessons, rows=4, most_tokens=100, epochs=2, seed=1)


def test_batches_of_like_lengths_are_still_mixed() -> None:
    lessons = [lesson(length) for length in range(1, 65)]
    (batches,) = planned(lessons, rows=4, most_tokens=10_000, epochs=1, seed=0)
    waste = sum(max(batch) - place for batch in batches for place in batch)
    assert waste <= 64 * 2  # a window holds all of them: batches are neighbours
    assert batches != sorted(batches)


def test_bounds_that_hold_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="max_batch_num_tokens=0"):
        planned([], rows=1, most_tokens=0, epochs=1, seed=0)
