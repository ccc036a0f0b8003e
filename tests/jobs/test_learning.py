"""What jobs were seen to use corrects what the next ones ask for, and never keeps one from running."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs.scheduler import memory
from gpuherd.jobs.scheduler.memory import Ask, FamilyMemory, after_running_out, asks_for, learned

MB = st.integers(1, 100_000)
MAYBE = st.none() | MB
FAMILIES = st.builds(FamilyMemory, peak_mb=MAYBE, measured=st.integers(0, 5), ran_out_mb=MAYBE)


@given(asked=MAYBE, peak=MAYBE, most=MB)
def test_after_running_out_more_than_it_had_is_asked_for_as_far_as_there_is_more(
    asked: int | None, peak: int | None, most: int
) -> None:
    found, had = after_running_out(asked, peak, most), max(asked or 0, peak or 0)
    if had == 0:
        assert found == asked
        return
    assert found is not None
    # Never less than it was seen to need, wherever several GPUs have so much; and never more than there is.
    assert found >= min(int(0.97 * most), -(-5 * had // 4))
    assert (asked or 0) <= found <= max(asked or 0, int(0.97 * most))


@given(asked=MB, most=MB)
def test_a_job_that_runs_out_again_and_again_comes_to_an_end_of_asking(asked: int, most: int) -> None:
    tries = 0
    while (more := after_running_out(asked, None, most)) != asked:
        assert more is not None
        asked, tries = more, tries + 1
        assert tries < 100


@given(declared=MB, family=FAMILIES, most=MAYBE, less=st.booleans())
def test_what_is_asked_for_holds_what_was_seen_and_fits_where_the_declared_would(
    declared: int, family: FamilyMemory, most: int | None, less: bool
) -> None:
    ask = asks_for(declared, family, most, less=less)
    assert ask.memory_mb is not None
    # What was learned never makes a job too large for the machine.
    if most is not None:
        assert ask.memory_mb <= max(declared, most)
    # As much as was seen, wherever several GPUs have so much.
    assert ask.memory_mb >= min(family.peak_mb or 0, declared if most is None else max(declared, int(0.97 * most)))
    if ask.memory_mb < declared:
        assert less and family.measured >= 2
        assert ask.memory_mb >= 1.25 * (family.peak_mb or 0)
        assert family.ran_out_mb is None or most is not None or ask.memory_mb > family.ran_out_mb
    assert (ask.because is None) == (ask.memory_mb == declared)


@given(family=FAMILIES, most=MAYBE)
def test_who_says_nothing_of_memory_asks_for_none(family: FamilyMemory, most: int | None) -> None:
    assert asks_for(None, family, most) == Ask(None)


@given(
    ends=st.lists(st.tuples(MAYBE, st.booleans(), MAYBE), max_size=8),
    seed=st.randoms(use_true_random=False),
)
def test_the_order_of_ends_does_not_matter(ends: list[tuple[int | None, bool, int | None]], seed: object) -> None:
    def after(some: list[tuple[int | None, bool, int | None]]) -> FamilyMemory:
        family = FamilyMemory()
        for peak, well, ran_out in some:
            family = learned(family, peak_mb=peak, well=well, ran_out_mb=ran_out)
        return family

    shuffled = list(ends)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert after(ends) == after(shuffled)


def test_the_first_that_is_seen_to_use_little_is_not_believed_the_second_is() -> None:
    one = learned(None, peak_mb=8_000, well=True)
    assert asks_for(30_000, one).memory_mb == 30_000
    two = learned(one, peak_mb=7_000, well=True)
    assert asks_for(30_000, two) == Ask(10_256, "2 of its family used at most 8000 MB")
    assert asks_for(30_000, two, less=False).memory_mb == 30_000
    # A tenth less is not worth a smaller promise.
    assert asks_for(11_000, two).memory_mb == 11_000


def test_one_that_failed_tells_how_much_it_used_but_not_that_it_is_enough() -> None:
    failed = learned(learned(None, peak_mb=8_000), peak_mb=8_000)
    assert asks_for(30_000, failed).memory_mb == 30_000
    assert asks_for(5_000, failed).memory_mb == 8_000


def test_where_one_ran_out_the_next_asks_for_a_quarter_more() -> None:
    family = learned(None, peak_mb=19_000, ran_out_mb=20_000)
    assert asks_for(20_000, family) == Ask(25_000, "one of its family ran out of memory with 20000 MB")
    assert asks_for(20_000, family, 24_000).memory_mb == 23_280


def test_what_was_learned_is_found_on_all_gpus_of_a_kind_though_one_has_a_little_more_free() -> None:
    asked = asks_for(20_000, FamilyMemory(peak_mb=40_400), 40_510).memory_mb
    assert asked is not None and 30_000 < asked < 40_000


def test_documented_examples() -> None:
    assert doctest.testmod(memory).failed == 0
