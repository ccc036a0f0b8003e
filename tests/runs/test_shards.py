"""Items are divided among jobs: each once, evenly, and always in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import number_of_shards, plan_shards


def longest_first(rows: int) -> object:
    def batches(lengths: Sequence[int]) -> list[list[int]]:
        order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
        return [order[start : start + rows] for start in range(0, len(order), rows)]

    return batches


lengths_of_items = st.lists(st.integers(1, 500), max_size=80)


@given(lengths_of_items, st.integers(1, 7), st.integers(1, 9))
def test_each_item_has_one_place(lengths: list[int], shards: int, rows: int) -> None:
    found = plan_shards(lengths, shards, longest_first(rows))  # type: ignore[arg-type]
    assert len(found) == shards
    assert sorted(item for shard in found for item in shard.items) == list(range(len(lengths)))
    assert found == plan_shards(lengths, shards, longest_first(rows))  # type: ignore[arg-type]


@given(lengths_of_items, st.integers(1, 7))
def test_shards_have_as_much_to_do(lengths: list[int], shards: int) -> None:
    found = plan_shards(lengths, shards, longest_first(1))  # type: ignore[arg-type]
    sizes = [len(shard.items) for shard in found]
    assert max(sizes) - min(sizes) <= 1
    if lengths:
        work = [sum(lengths[item] for item in shard.items) for shard in found]
        assert max(work) - min(work) <= 2 * max(lengths)


def test_items_are_written_batch_by_batch() -> None:
    (shard,) = plan_shards([3, 9, 5, 7], 1, longest_first(2))  # type: ignore[arg-type]
    assert shard == Shard(((1, 3), (2, 0)))
    assert shard.items == (1, 3, 2, 0)


def test_batches_that_lose_an_item_are_refused() -> None:
    with pytest.raises(ValueError, match="each item once"):
        plan_shards([1, 2], 1, lambda lengths: [[0, 0]])


@given(st.integers(0, 2000), st.integers(1, 64), st.none() | st.integers(1, 64))
def test_number_of_shards(items: int, at_once: int, wanted: int | None) -> None:
    found = number_of_shards(items, at_once, wanted)
    assert 1 <= found <= max(1, items)
    if wanted is not None:
        assert found == max(1, min(wanted, items))
    else:
        assert found <= at_once
        assert found == 1 or items / found >= 8


def test_no_jobs_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        number_of_shards(5, 0)
