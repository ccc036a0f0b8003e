"""Needs and rounds of jobs that are added together: what is refused, and how it is reported."""

from __future__ import annotations

import pytest

from gpuherd.errors import UsageError
from gpuherd.jobs.job import BadNeeds, Job, check_needs


def job(name: str, *needed: str, round_: int = 0) -> Job:
    return Job(name=name, argv=("x",), needs=needed, round=round_)


def test_a_misspelt_need_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="needs 'prepair', and there is no such job; did you mean 'prepare'"):
        check_needs([job("prepare"), job("train", "prepair")])
    with pytest.raises(UsageError, match="did you mean 'prepare'"):
        check_needs([job("train", "prepair")], known={"prepare": 0})


def test_jobs_that_are_there_may_be_needed() -> None:
    check_needs([job("train", "prepare")], known={"prepare": 0})


def test_a_need_of_a_later_round_can_never_be_met() -> None:
    with pytest.raises(UsageError, match="'a' of round 0 needs 'b' of round 1"):
        check_needs([job("a", "b"), job("b", round_=1)])
    with pytest.raises(UsageError, match="of round 2"):
        check_needs([job("a", "b")], known={"b": 2})
    check_needs([job("a"), job("b", "a", round_=1)])


def test_a_circle_is_named_in_full() -> None:
    with pytest.raises(UsageError, match="'a' needs 'b' needs 'c' needs 'a'"):
        check_needs([job("a", "b"), job("b", "c"), job("c", "a"), job("d", "a")])
    with pytest.raises(UsageError, match="'a' needs 'a'"):
        check_needs([job("a", "a")])


def test_all_circles_are_named() -> None:
    with pytest.raises(BadNeeds) as raised:
        check_needs(
            [job("a", "b"), job("b", "a"), job("c", "c"), job("d", "a", "e"), job("e", "f"), job("f", "d", "e")]
        )
    assert [names for _, names in raised.value.faults] == [("a", "b"), ("c",), ("d", "e", "f"), ("e", "f")]
    for circle in ("'a' needs 'b' needs 'a'", "'c' needs 'c'", "'d' needs 'e' needs 'f' needs 'd'"):
        assert f"in a circle: {circle}" in str(raised.value)


def test_a_long_chain_is_no_circle_and_no_recursion() -> None:
    jobs = [job("0"), *(job(str(n), str(n - 1)) for n in range(1, 5_000))]
    check_needs(list(reversed(jobs)))
