"""Random decisions are fixed by what they belong to, and even."""

from __future__ import annotations

from collections import Counter

from gpuherd.posttrain.guidance.draws import uniform, whole_number


def test_numbers_are_even_and_differ_by_each_of_the_four() -> None:
    told = Counter(whole_number(2, 5, 0, "cut", f"p{number}", 0) for number in range(4000))
    assert set(told) == {2, 3, 4, 5}
    assert all(abs(count - 1000) < 120 for count in told.values())  # 4 standard deviations are 110
    assert (
        len({uniform(0, "a", "p", 0), uniform(1, "a", "p", 0), uniform(0, "b", "p", 0), uniform(0, "a", "q", 0)}) == 4
    )


def test_one_number_to_choose_from() -> None:
    assert whole_number(3, 3, 0, "cut", "p", 0) == 3
