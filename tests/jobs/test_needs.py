"""Needs and rounds: what is refused, and what may run when, against a reading of the rule that is slow and plain."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.jobs import job as needs
from gpuherd.jobs.job import BadNeeds, Job, Readiness, check_needs


def job(name: str, *needed: str, round_: int = 0) -> Job:
    return Job(name=name, argv=("x",), needs=needed, round=round_)


def test_documented_examples() -> None:
    assert doctest.testmod(needs).failed == 0


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
    readiness = Readiness(jobs)
    for n in range(4_999):
        assert readiness.ended(str(n), succeeded=True) == ((str(n + 1),), ())
    assert len(Readiness(jobs).ended("0", succeeded=False)[1]) == 4_999


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    made: list[Job] = []
    for n in range(draw(st.integers(1, 9))):
        round_ = draw(st.integers(0, 2))
        able = [each.name for each in made if each.round <= round_]
        needed = draw(st.lists(st.sampled_from(able), max_size=3)) if able else []
        made.append(job(f"j{n}", *needed, round_=round_))
    return made


@given(job_lists(), st.data())
def test_what_may_run_is_what_the_rule_says(jobs: list[Job], data: st.DataObject) -> None:
    readiness = Readiness(jobs)
    state = {each.name: "waiting" for each in jobs}
    ready = set(readiness.ready)
    told: list[str] = []
    while True:
        for each in jobs:
            if state[each.name] == "waiting" and any(state[need] in ("failed", "cancelled") for need in each.needs):
                state[each.name] = "cancelled"
        may = {
            each.name
            for each in jobs
            if state[each.name] == "waiting"
            and all(state[need] == "done" for need in each.needs)
            and all(state[other.name] != "waiting" for other in jobs if other.round < each.round)
        }
        assert ready == may
        if not may:
            break
        name = data.draw(st.sampled_from(sorted(may)))
        succeeded = data.draw(st.booleans())
        state[name] = "done" if succeeded else "failed"
        before = dict(state)
        new, doomed = readiness.ended(name, succeeded=succeeded)
        assert not set(new) & ready
        ready = (ready - {name}) | set(new)
        assert all(before[other] == "waiting" for other in doomed)
        told += doomed
    assert sorted(told) == sorted(other for other, value in state.items() if value == "cancelled")
    assert "waiting" not in state.values()
