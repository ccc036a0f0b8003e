"""GPUs that fail jobs are left out, for so long, and come back."""

from __future__ import annotations

import doctest
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs import quarantine
from gpuherd.jobs.failures import FailureClass
from gpuherd.jobs.quarantine import (
    Health,
    after_failure,
    after_fault,
    after_success,
    excluded,
    from_json,
    next_return,
    to_json,
)

MACHINE = ("a", "b", "c")


def crash(
    healths: dict[str, Health], gpu: str, job: str, now: float = 0.0, machine: Sequence[str] = MACHINE
) -> dict[str, Health]:
    return after_failure(healths, [gpu], job, FailureClass.CRASH, "ValueError: x", now=now, machine=machine)


def test_faults_double_up_to_a_day() -> None:
    healths: dict[str, Health] = {}
    now, waits = 0.0, []
    for _ in range(12):
        healths = after_fault(healths, ["a"], "Xid 79", now=now)
        until = next_return(healths, now)
        assert until is not None
        assert "Xid 79" in excluded(healths, now)["a"]
        waits.append((until - now) / 60)
        now = until
        assert excluded(healths, now) == {}
    assert waits[:4] == [10, 20, 40, 80]
    assert waits[-1] == 24 * 60


def test_a_job_that_fails_by_a_gpu_fault_leaves_its_gpus_out_at_once() -> None:
    healths = after_failure({}, ["a", "b"], "j", FailureClass.GPU_FAULT, "ECC", now=0.0, machine=MACHINE)
    assert excluded(healths, 1.0).keys() == {"a", "b"}
    assert excluded(healths, 600.0) == {}


def test_three_different_jobs_in_a_row() -> None:
    healths = crash(crash({}, "a", "one"), "a", "two")
    assert excluded(crash(healths, "a", "two"), 1.0) == {}, "the same job again proves nothing"
    out = crash(healths, "a", "three")
    assert excluded(out, 299.0).keys() == {"a"}
    assert excluded(out, 300.0) == {}
    assert excluded(crash(out, "a", "four", now=400.0), 401.0).keys() == {"a"}, "on probation: one more is enough"


def test_a_success_between_clears() -> None:
    healths = after_success(crash(crash({}, "a", "one"), "a", "two"), ["a"], started_at=1.0)
    assert excluded(crash(healths, "a", "three"), 1.0) == {}


def test_a_success_that_began_before_the_failure_clears_nothing() -> None:
    healths = after_fault({}, ["a"], "Xid 79", now=100.0)
    assert excluded(after_success(healths, ["a"], started_at=50.0), 101.0).keys() == {"a"}
    assert excluded(after_success(healths, ["a"], started_at=100.5), 101.0) == {}
    assert excluded(after_success(healths, ["b"], started_at=100.5), 101.0).keys() == {"a"}


def test_where_all_gpus_fail_jobs_the_jobs_are_at_fault() -> None:
    healths: dict[str, Health] = {}
    for number in range(30):
        healths = crash(healths, MACHINE[number % 3], f"job {number}")
        assert excluded(healths, 1.0) == {}
    alone: dict[str, Health] = {}
    for number in range(9):
        alone = crash(alone, "a", f"job {number}", machine=["a"])
    assert excluded(alone, 1.0) == {}, "the only GPU is not left out for what may be the jobs' fault"


def test_a_gpu_that_eats_the_queue_while_the_others_work_is_left_out() -> None:
    healths: dict[str, Health] = {}
    for number in range(3):
        healths = crash(healths, "b", f"job {number}")
    assert excluded(healths, 1.0).keys() == {"b"}


@pytest.mark.parametrize(
    "failure", [FailureClass.OUT_OF_MEMORY, FailureClass.KILLED, FailureClass.TIMEOUT, FailureClass.BAD_INPUT]
)
def test_what_is_not_the_gpus_doing_is_not_held_against_it(failure: FailureClass) -> None:
    healths: dict[str, Health] = {}
    for number in range(5):
        healths = after_failure(healths, ["a"], f"{number}", failure, "x", now=0.0, machine=MACHINE)
    assert healths == {}


def test_a_clock_set_back_does_not_leave_a_gpu_out_for_years() -> None:
    healths = after_fault({}, ["a"], "Xid 79", now=1e9)
    assert excluded(healths, 0.0) == {}


health_strategy = st.builds(
    Health,
    faults=st.integers(0, 99),
    crashed=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    failed_at=st.none() | st.floats(0, 2e9),
    until=st.none() | st.floats(0, 2e9),
    reason=st.none() | st.text(max_size=30),
)


@given(health_strategy)
def test_json_there_and_back(health: Health) -> None:
    assert from_json(to_json(health)) == health
    assert "\n" not in to_json(health)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"crashed": 3}', '{"crashed": [], "colour": 1}', "3"])
def test_what_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        from_json(text)


@given(st.lists(st.tuples(st.sampled_from(MACHINE), st.sampled_from(["ok", "crash", "fault"]), st.floats(0, 4000))))
def test_no_gpu_is_out_for_more_than_a_day(steps: list[tuple[str, str, float]]) -> None:
    healths: dict[str, Health] = {}
    now = 0.0
    for number, (gpu, what, wait) in enumerate(steps):
        now += wait
        if what == "ok":
            healths = after_success(healths, [gpu], started_at=now)
            assert gpu not in excluded(healths, now)
        elif what == "fault":
            healths = after_fault(healths, [gpu], "Xid", now=now)
            assert gpu in excluded(healths, now)
        else:
            healths = crash(healths, gpu, f"{number}", now)
        until = next_return(healths, now)
        assert until is None or now < until <= now + 86_400
        assert not math.isnan(until or 0.0)


def test_documented_examples() -> None:
    assert doctest.testmod(quarantine).failed == 0
