"""Items are divided among jobs: each once, evenly, and always in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import (
    Damaged,
    ShardedDirectory,
    ShardedWork,
    items_done,
    number_of_shards,
    plan_shards,
    shard_records,
    work_through,
)


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


def test_the_plan_of_the_first_start_is_kept(tmp_path: Path) -> None:
    def halves(lengths: Sequence[int]) -> list[list[int]]:
        return [list(range(len(lengths)))]

    work = ShardedWork(ShardedDirectory(tmp_path / "work"), "same", [3] * 40, halves)
    assert [len(work.shards(2)), len(work.shards(4)), work.begun] == [2, 4, False]
    assert not work.folder.root.exists(), "a plan that nobody has begun is not written"
    begun = work.begin(2)
    assert work.begun and work.begin(4) == work.shards(4) == begun and len(begun) == 2
    with pytest.raises(UsageError, match="other items or settings"):
        replace(work, identity="another").begin(2)
    with pytest.raises(UsageError, match="begun with 2 shards"):
        replace(work, wanted=3).begin(2)


def test_work_is_done_when_each_shard_is_and_says_how_it_was_made(tmp_path: Path) -> None:
    folder = ShardedDirectory(tmp_path / "work")
    work = ShardedWork(folder, "same", [1] * 16, lambda lengths: [[each] for each in range(len(lengths))])
    assert not work.is_done()
    shards = work.begin(2)
    for number in range(2):
        assert (work.is_done(), items_done(folder, shards)) == (False, 8 * number)
        work_through(folder, number, lambda items: ["{}"] * len(items), stage="test", record=lambda: {"dtype": "fp32"})
    assert work.is_done() and items_done(folder, shards) == 16
    records = shard_records(folder, shards)
    assert [(each["shard"], each["dtype"], each["items_last_start"]) for each in records] == [
        (0, "fp32", 8),
        (1, "fp32", 8),
    ]
    folder.shard_done(1).write_text("{")
    with pytest.raises(Damaged, match=r"00001\.json can't be read"):
        shard_records(folder, shards)
