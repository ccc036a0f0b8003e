"""GPUs that fail jobs are left out, for so long, and come back."""

from __future__ import annotations

import doctest
import math
from collections.abc import Container, Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.gpu import health as quarantine
from gpuherd.jobs.gpu.health import (
    Health,
    JobEnding,
    after_failure,
    after_fault,
    after_success,
    excluded,
    from_json,
    returns,
    to_json,
)

MACHINE = ("a", "b", "c")


def next_return(healths: Mapping[str, Health], now: float) -> float | None:
    return min(returns(healths, now).values(), default=None)


def crash(
    healths: dict[str, Health],
    gpu: str,
    job: str,
    now: float = 0.0,
    machine: Sequence[str] = MACHINE,
    *,
    family: str | None = None,
    in_use: Container[str] = MACHINE,
    failure: FailureClass = FailureClass.CRASH,
) -> dict[str, Health]:
    changed = after_failure(
        healths,
        [gpu],
        job,
        family,
        failure,
        "ValueError: x",
        now=now,
        machine=machine,
        in_use=lambda uuid: uuid in in_use,
    )
    return healths | changed


def success(
    healths: dict[str, Health], gpu: str, job: str, now: float = 0.0, *, family: str | None = None
) -> dict[str, Health]:
    return healths | after_success(healths, [gpu], job, family, started_at=now, now=now)


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


def test_a_job_that_fails_by_a_gpu_fault_leaves_its_gpu_out_at_once() -> None:
    healths = crash({}, "a", "j", failure=FailureClass.GPU_FAULT)
    assert excluded(healths, 1.0).keys() == {"a"}
    assert excluded(healths, 600.0) == {}


def test_three_different_jobs_in_a_row_while_the_others_work_at_their_first() -> None:
    healths = crash(crash({}, "a", "one"), "a", "two")
    assert excluded(crash(healths, "a", "two"), 1.0) == {}, "the same job again proves nothing"
    assert excluded(crash(healths, "a", "three", in_use=()), 1.0) == {}, "there is no GPU in use to compare it with"
    healths = crash(healths, "a", "three")
    assert excluded(healths, 4.9).keys() == {"a"}
    assert healths["a"].is_on_trial(5.0)
    assert excluded(healths, 5.0) == {}, "a job may probe it"
    waits, now = [], 5.0
    for number in range(8):
        healths = crash(healths, "a", f"probe {number}", now)
        until = next_return(healths, now)
        assert until is not None
        waits.append(until - now)
        now = until
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
    healths = success(healths, "a", "probe", now)
    assert not healths["a"].is_on_trial(now)
    assert excluded(crash(healths, "a", "later", now), now + 1.0) == {}


def test_a_success_between_clears() -> None:
    healths = success(crash(crash({}, "a", "one"), "a", "two"), "a", "good", 1.0)
    assert excluded(crash(healths, "a", "three"), 1.0) == {}


def test_a_success_that_began_before_the_failure_clears_nothing() -> None:
    healths = after_fault({}, ["a"], "Xid 79", now=100.0)
    assert excluded(success(healths, "a", "j", 50.0), 101.0).keys() == {"a"}
    assert excluded(success(healths, "a", "j", 100.5), 101.0) == {}
    assert excluded(success(healths, "b", "j", 100.5), 101.0).keys() == {"a"}


def test_where_all_gpus_fail_jobs_the_jobs_are_at_fault() -> None:
    healths: dict[str, Health] = {}
    for number in range(90):
        healths = crash(healths, MACHINE[number % 3], f"job {number}", float(number))
        assert excluded(healths, number + 1.0) == {}
    alone: dict[str, Health] = {}
    for number in range(9):
        alone = crash(alone, "a", f"job {number}", machine=["a"])
    assert excluded(alone, 1.0) == {}, "the only GPU is not left out for what may be the jobs' fault"


def test_a_batch_with_a_bug_after_many_good_jobs_is_not_held_against_gpus() -> None:
    healths: dict[str, Health] = {}
    for number in range(90):
        healths = success(healths, MACHINE[number % 3], f"good {number}", float(number))
    for number in range(100, 160):
        healths = crash(healths, MACHINE[number % 3], f"bad {number}", float(number))
        assert excluded(healths, number + 0.5) == {}


def test_a_gpu_that_eats_the_queue_while_the_others_work_is_left_out() -> None:
    healths: dict[str, Health] = {}
    for number in range(12):
        healths = success(healths, "ac"[number % 2], f"good {number}", float(number))
    for number in range(3):
        healths = crash(healths, "b", f"job {number}", 20.0)
    assert excluded(healths, 21.0).keys() == {"b"}


def test_two_bad_gpus_of_four_are_both_left_out() -> None:
    machine = ("a", "b", "c", "d")
    healths: dict[str, Health] = {}
    for number in range(7):
        healths = crash(healths, machine[number % 2], f"job {number}", machine=machine, in_use=machine)
    assert excluded(healths, 1.0).keys() == {"a", "b"}


def test_jobs_that_crash_elsewhere_too_are_at_fault() -> None:
    healths: dict[str, Health] = {}
    for number in range(30):
        healths = success(healths, "c", f"good {number}")
    for number in range(3):
        healths = crash(healths, "b", f"job {number}")
        healths = success(healths, "b", f"other {number}")
    for number in range(3):
        healths = crash(healths, "a", f"job {number}", 1.0)
    assert excluded(healths, 2.0) == {}
    for number in range(3):
        healths = crash(healths, "a", f"new {number}", 2.0)
    assert excluded(healths, 3.0).keys() == {"a"}


def test_jobs_are_compared_with_their_family() -> None:
    bad: dict[str, Health] = {}
    for number in range(20):
        bad = success(bad, "b", f"good {number}", family="good")
        if number % 5 == 0:
            bad = success(crash(bad, "c", f"bad {number}", family="bad"), "c", f"fine {number}", family="good")
    for number in range(3):
        bad = crash(bad, "a", f"new {number}", 1.0, family="bad")
    assert excluded(bad, 2.0) == {}, "of this family all crash, wherever they run"
    good = {uuid: health for uuid, health in bad.items() if uuid != "a"}
    for number in range(3):
        good = crash(good, "a", f"new {number}", 1.0, family="good")
    assert excluded(good, 2.0).keys() == {"a"}


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_jobs_with_bugs_seldom_cost_a_sound_gpu_anything(gpus: int) -> None:
    """30 % of the jobs crash, wherever they run."""
    random = Random(1)
    machine = [f"GPU-{number}" for number in range(gpus)]
    seconds_out = 0.0
    jobs = 4000
    healths: dict[str, Health] = {}
    for number in range(jobs):
        now = number * 1.0
        usable = [uuid for uuid in machine if uuid not in excluded(healths, now)]
        gpu = random.choice(usable)
        if random.random() < 0.3:
            healths = crash(healths, gpu, f"job {number}", now, machine, in_use=machine)
        else:
            healths = success(healths, gpu, f"job {number}", now)
        if gpu in excluded(healths, now):
            seconds_out += (next_return({gpu: healths[gpu]}, now) or now) - now
    assert seconds_out / (jobs * gpus) < 0.01


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_a_bad_gpu_among_jobs_with_bugs_is_caught(share: float) -> None:
    random = Random(2)
    machine = ["bad", "b", "c", "d"]
    eaten = 0
    healths: dict[str, Health] = {}
    for number in range(400):
        now = number * 0.25
        usable = [uuid for uuid in machine if uuid not in excluded(healths, now)]
        gpu = random.choice(usable)
        eaten += gpu == "bad"
        if gpu == "bad" or random.random() < share:
            healths = crash(healths, gpu, f"job {number}", now, machine, in_use=machine)
        else:
            healths = success(healths, gpu, f"job {number}", now)
    assert 3 <= eaten <= 16, "of 100 that it would get"


@pytest.mark.parametrize(
    "failure", [FailureClass.OUT_OF_MEMORY, FailureClass.KILLED, FailureClass.TIMEOUT, FailureClass.BAD_INPUT]
)
def test_what_is_not_the_gpus_doing_is_not_held_against_it(failure: FailureClass) -> None:
    healths: dict[str, Health] = {}
    for number in range(5):
        healths = crash(healths, "a", f"{number}", failure=failure)
    assert healths == {}


def test_a_clock_set_back_does_not_leave_a_gpu_out_for_years() -> None:
    healths = after_fault({}, ["a"], "Xid 79", now=1e9)
    assert excluded(healths, 0.0) == {}


outcomes = st.builds(
    JobEnding, st.text(max_size=9), st.none() | st.text(max_size=9), ok=st.booleans(), at=st.floats(0, 9)
)
health_strategy = st.builds(
    Health,
    outcomes=st.lists(outcomes, max_size=3).map(tuple),
    faults=st.integers(0, 99),
    times_out=st.integers(0, 99),
    failed_at=st.none() | st.floats(0, 2e9),
    until=st.none() | st.floats(0, 2e9),
    reason=st.none() | st.text(max_size=30),
)


@given(health_strategy)
def test_json_there_and_back(health: Health) -> None:
    assert from_json(to_json(health)) == health
    assert "\n" not in to_json(health)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"outcomes": 3}', '{"outcomes": [], "colour": 1}', "3"])
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
            healths = success(healths, gpu, f"{number}", now)
            assert gpu not in excluded(healths, now)
        elif what == "fault":
            healths |= after_fault(healths, [gpu], "Xid", now=now)
            assert gpu in excluded(healths, now)
        else:
            healths = crash(healths, gpu, f"{number}", now)
        until = next_return(healths, now)
        assert until is None or now < until <= now + 86_400
        assert not math.isnan(until or 0.0)


def test_documented_examples() -> None:
    ran = doctest.testmod(quarantine)
    assert ran.attempted and not ran.failed
