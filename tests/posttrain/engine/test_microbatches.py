"""How items are cut, and how the size of a micro-batch follows the memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.posttrain.engine.trainee import MicroBatch, cuts, passes, pieces_needed


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_cuts_keep_all_in_order_and_even(items: list[int], pieces: int) -> None:
    cut = cuts(items, pieces)
    assert [each for piece in cut for each in piece] == items
    assert len(cut) == pieces and max(map(len, cut)) - min(map(len, cut)) <= 1


@given(st.lists(st.integers(0, 30), min_size=2, max_size=5).filter(any), st.integers(1, 8))
def test_processes_that_go_together_do_equally_many_passes(counts: list[int], size: int) -> None:
    most = max(pieces_needed(count, size) for count in counts)
    for count in counts:
        done = passes(list(range(count)), size, most, -1, together=True)
        assert len(done) == most and [each.last for each in done] == [False] * (most - 1) + [True]
        assert [item for each in done if each.counts for item in each.items] == list(range(count))
        assert all(0 < len(each.items) <= size for each in done)


@given(st.integers(0, 30), st.integers(1, 8))
def test_a_process_on_its_own_ends_with_a_pass_for_the_others(count: int, size: int) -> None:
    done = passes(list(range(count)), size, 99, -1, together=False)
    assert [each.last for each in done] == [False] * (len(done) - 1) + [True]
    assert not done[-1].counts and [item for each in done[:-1] for item in each.items] == list(range(count))


def test_one_process_does_its_own_passes_alone() -> None:
    assert [list(each.items) for each in passes("abc", 2, 2, None, together=True)] == [["a", "b"], ["c"]]


def test_the_size_is_halved_and_grows_back() -> None:
    smaller = MicroBatch.of(8).halved(items=100)
    assert smaller is not None and (smaller.size, smaller.halvings) == (4, 1)
    for _ in range(19):
        smaller = smaller.after_step()
    assert smaller.size == 4
    assert smaller.after_step().size == 8


def test_a_size_that_never_fits_is_tried_ever_more_seldom() -> None:
    grown = MicroBatch(8, 8, grown=True).halved(8)
    assert grown is not None and grown.patience == 40


def test_one_item_can_not_be_halved() -> None:
    assert MicroBatch.of(8).halved(items=1) is None
    assert MicroBatch(8, 1).halved(items=5) is None
    halved = MicroBatch.of(64).halved(items=6)
    assert halved is not None and halved.size == 3
