"""Time limits of one attempt, by a clock that the test turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs.attempts.time_limits import LimitKind, Passed, TimeLimits, Timer
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions


def timer(**limits: float) -> Timer:
    return Timer(100.0, TimeLimits(**limits), seen_at=100.0)


def test_what_the_job_says_goes_before_what_the_run_says() -> None:
    options = DispatchOptions(timeout=10, heartbeat=5)
    assert TimeLimits.of(Job(name="a", argv=("x",), timeout_s=3), options) == TimeLimits(3, None, 5)


def test_the_whole_time() -> None:
    one = timer(whole_s=10)
    assert one.passed(109.9) is None
    assert one.passed(110) == Passed(LimitKind.WHOLE, 10)
    assert one.next_at() == 110


def test_a_pause_counts_for_no_limit() -> None:
    one = timer(whole_s=10, heartbeat_s=8)
    one.pause(104)
    assert one.next_at() is None
    assert one.passed(500) is None
    one.resume(504)
    assert one.paused_s(600) == 400
    assert one.passed(507.9) is None
    assert one.passed(508) == Passed(LimitKind.HEARTBEAT, 8)


def test_each_report_is_a_heartbeat_and_a_new_stage_begins_anew() -> None:
    one = timer(heartbeat_s=8, stage_s=12)
    one.look(107, mark=1, stage="loading")
    assert one.passed(114) is None
    one.look(114, mark=2, stage="loading")
    one.look(118, mark=3, stage="loading")
    assert one.passed(119) == Passed(LimitKind.STAGE, 12, "loading")
    one.look(118.5, mark=4, stage="saving")
    assert one.passed(119) is None
    one.look(125, mark=4, stage="saving")  # nothing new
    assert one.passed(126.5) == Passed(LimitKind.HEARTBEAT, 8, "saving")


def test_one_that_is_taken_over_is_followed_from_then_on() -> None:
    one = Timer(100.0, TimeLimits(whole_s=1000, heartbeat_s=10), seen_at=500.0, idle_s=50.0)
    assert one.passed(509) is None
    assert one.passed(510) == Passed(LimitKind.HEARTBEAT, 10)
    assert Timer(100.0, TimeLimits(whole_s=1000), seen_at=500.0, idle_s=50.0).next_at() == 1150


@given(
    st.lists(st.tuples(st.sampled_from(["pause", "resume", "look"]), st.floats(0.001, 50)), max_size=30),
    st.floats(1, 100),
)
def test_the_next_look_is_never_after_a_limit_is_passed(steps: list[tuple[str, float]], limit: float) -> None:
    """Whoever looks at ``next_at`` only, misses nothing; and work is time less pauses."""
    one = timer(whole_s=limit)
    now, worked, paused = 100.0, 0.0, False
    for step, length in steps:
        at = one.next_at()
        assert (at is None) == paused
        if at is not None and now + length > at:
            assert one.passed(at + 1e-6) is not None
            return
        now += length
        worked += 0 if paused else length
        if step == "pause":
            one.pause(now)
            paused = True
        elif step == "resume":
            one.resume(now)
            paused = False
        else:
            one.look(now, mark=now, stage=None)
        assert abs(now - 100.0 - one.paused_s(now) - worked) < 1e-6
