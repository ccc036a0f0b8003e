"""When a GPU counts as free: solved for time, against the real rule, look by look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.gpus.idle import Check, IdleRule, Streaks, is_free, observe, released
from gpuherd.simulate.quiet import TURNAROUND_S, Quiet

CLEAN, USED = Check(True, ""), Check(False, "used", stranger=True)


def look_by_look(quiet: Quiet, clean_since: float, looking_since: float) -> float:
    """The look at which the real rule first says free, with a look every interval from ``looking_since`` on."""
    rule = IdleRule(max_checks=quiet.max_checks, check_interval_s=quiet.interval_s)
    streaks, looks = Streaks(), 0
    while True:
        at = looking_since + looks * quiet.interval_s
        streaks = observe(streaks, {"GPU-a": CLEAN if at >= clean_since else USED}, rule)
        if is_free(streaks, "GPU-a", rule):
            return at
        looks += 1


@given(
    checks=st.integers(1, 12),
    interval=st.sampled_from([0.25, 1.0, 4.0]),
    clean_since=st.integers(0, 200).map(lambda quarter: quarter / 4),
    looking_since=st.integers(0, 200).map(lambda quarter: quarter / 4),
)
def test_it_is_the_look_that_the_real_rule_waits_for(
    checks: int, interval: float, clean_since: float, looking_since: float
) -> None:
    quiet = Quiet(checks, interval)
    assert quiet.free_at(clean_since, False, looking_since) == look_by_look(quiet, clean_since, looking_since)


def test_after_our_own_job_one_clean_look_is_enough() -> None:
    rule = IdleRule(max_checks=10)
    streaks = observe(released(Streaks(), "GPU-a", rule), {"GPU-a": CLEAN}, rule)
    assert is_free(streaks, "GPU-a", rule)
    assert Quiet(10, 1.0).free_at(100.0, True, 0.0) == 100.0 + TURNAROUND_S


def test_who_begins_to_look_soon_after_our_own_job_finds_it_free_at_once() -> None:
    assert Quiet(10, 1.0).free_at(100.0, True, 104.0) == 104.0


def test_who_begins_to_look_long_after_our_own_job_knows_no_more_than_of_any_other_gpu() -> None:
    assert Quiet(10, 1.0).free_at(100.0, True, 106.0) == 106.0 + 9.0
