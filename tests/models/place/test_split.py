"""The split against every split there is, and what must hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.models.place.split import Need, best_split, fits


def plain(sizes: Sequence[int], *, peaks: Sequence[int] = (), tied: int = 0, base: int = 0) -> Need:
    """A need as models have it: sizes add up, of peaks only the largest counts, the first and the last block share
    ``tied`` where they lie together, and every GPU that is used pays ``base``."""

    def need(gpu: int, first: int, after_last: int) -> int:
        if after_last == first:
            return 0
        both = first == 0 and after_last == len(sizes)
        return base + sum(sizes[first:after_last]) + max(peaks[first:after_last], default=0) - (tied if both else 0)

    return need


def exhaustive(blocks: int, rooms: Sequence[int], need: Need) -> float:
    """The least fullness of the fullest GPU over all splits."""
    return min(
        max(
            need(gpu, first, after_last) / rooms[gpu] if after_last > first else 0.0
            for gpu, (first, after_last) in enumerate(zip((0, *inner), (*inner, blocks), strict=True))
        )
        for inner in combinations_with_replacement(range(blocks + 1), len(rooms) - 1)
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], Need]:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9))
    peaks = draw(st.lists(st.integers(0, 30), min_size=len(sizes), max_size=len(sizes)))
    rooms = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    tied = draw(st.integers(0, min(sizes[0], sizes[-1]))) if len(sizes) > 1 else 0
    return sizes, rooms, plain(sizes, peaks=peaks, tied=tied, base=draw(st.integers(0, 5)))


@given(cases())
def test_no_split_is_better(case: tuple[list[int], list[int], Need]) -> None:
    sizes, rooms, need = case
    split = best_split(len(sizes), rooms, need)
    assert split.fullness == exhaustive(len(sizes), rooms, need)


@given(cases())
def test_every_block_lies_on_one_gpu_and_the_fullness_is_that_of_the_fullest(
    case: tuple[list[int], list[int], Need],
) -> None:
    sizes, rooms, need = case
    split = best_split(len(sizes), rooms, need)
    assert split.cuts[0] == 0
    assert split.cuts[-1] == len(sizes)
    assert list(split.cuts) == sorted(split.cuts)
    assert len(split.ranges) == len(rooms)
    assert split.fullness == max(need(gpu, *both) / rooms[gpu] for gpu, both in enumerate(split.ranges))


@given(cases(), st.floats(0.05, 4))
def test_fits_says_whether_some_split_stays_below_the_cap(case: tuple[list[int], list[int], Need], cap: float) -> None:
    sizes, rooms, need = case
    assert fits(len(sizes), rooms, need, cap) == (exhaustive(len(sizes), rooms, need) <= cap)


def test_seventy_billion_parameters_over_four_gpus_split_as_in_the_reference() -> None:
    # Embedding and head are as large as 1.23 layers.
    sizes = [123, *[100] * 80, 0, 123]
    split = best_split(len(sizes), [1000] * 4, plain(sizes))
    assert [after_last - first for first, after_last in split.ranges] == [20, 21, 21, 21]  # with embedding, norm, head
    assert split.fullness == 2.1


def test_what_the_fullest_gpu_leaves_open_is_levelled() -> None:
    # The head alone fills a GPU: the others need not be as full, and share evenly.
    sizes = [*[10] * 12, 100]
    split = best_split(len(sizes), [100] * 4, plain(sizes))
    assert split.cuts == (0, 4, 8, 12, 13)


def test_more_gpus_than_blocks_leave_some_empty() -> None:
    split = best_split(2, [10] * 5, plain([4, 6]))
    assert split.fullness == 0.6
    assert sum(after_last > first for first, after_last in split.ranges) == 2


def test_larger_gpus_take_more() -> None:
    split = best_split(12, [80, 40, 40, 80], plain([10] * 12))
    assert split.cuts == (0, 4, 6, 8, 12)
