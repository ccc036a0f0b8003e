"""When a GPU counts as free: solved for time, against the real rule, look by look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuherd.gpus.idle import Check, IdleRule, Streaks, is_free, observe, released
from gpuherd.simulate.devices import free_at
from gpuherd.simulate.options import TURNAROUND_S

CLEAN, USED = Check(True, ""), Check(False, "used", stranger=True)
TEN_CHECKS = IdleRule(max_checks=10, check_interval_s=1.0)


def look_by_look(rule: IdleRule, clean_since: float, looking_since: float) -> float:
    """The look at which the real rule first says free, with looks as ``GpuWatch`` makes them from ``looking_since`` on:
    cheap ones often, a full one when something has changed, at each check while the GPU is clean, else every 5 s.
    """
    streaks = Streaks()
    now = full_at = looking_since
    was_clean = None
    while True:
        clean = now >= clean_since
        if now >= full_at or clean is not was_clean:
            streaks = observe(streaks, {"GPU-a": CLEAN if clean else USED}, rule, now)
            if is_free(streaks, "GPU-a", rule):
                return now
            full_at = now + (rule.interval_s if clean else max(rule.interval_s, 5.0))
            was_clean = clean
        now = min(now + rule.look_s, full_at)


@given(
    checks=st.integers(1, 12),
    interval=st.sampled_from([0.25, 1.0, 4.0]),
    clean_since=st.floats(0, 60),
    looking_since=st.floats(0, 60),
)
def test_it_is_the_look_that_the_real_rule_waits_for(
    checks: int, interval: float, clean_since: float, looking_since: float
) -> None:
    quiet = IdleRule(max_checks=checks, check_interval_s=interval)
    solved = free_at(quiet, clean_since, False, looking_since)
    # Full looks shift the cheap ones a little, so that who frees a GPU may be noticed up to a look earlier or later.
    assert abs(solved - look_by_look(quiet, clean_since, looking_since)) <= quiet.look_s + 0.001
    assert solved >= max(clean_since, looking_since) + quiet.quiet_s - 1e-6


def test_who_frees_a_gpu_is_noticed_at_once_with_one_check() -> None:
    quiet = IdleRule(max_checks=1, check_interval_s=1.0)
    assert free_at(quiet, 100.05, False, 0.0) - 100.05 <= 0.15


def test_after_our_own_job_one_clean_look_is_enough() -> None:
    rule = TEN_CHECKS
    streaks = observe(released(Streaks(), "GPU-a", rule, 100.0), {"GPU-a": CLEAN}, rule, 100.0 + TURNAROUND_S)
    assert is_free(streaks, "GPU-a", rule)
    assert free_at(TEN_CHECKS, 100.0, True, 0.0) == 100.0 + TURNAROUND_S


def test_that_right_ends_when_it_ends_for_the_real_rule() -> None:
    rule = TEN_CHECKS
    for later, at_once in ((8.5, True), (9.5, False)):
        left = released(Streaks(), "GPU-a", rule, 100.0)
        assert is_free(observe(left, {"GPU-a": CLEAN}, rule, 100.0 + later), "GPU-a", rule) is at_once
        assert free_at(TEN_CHECKS, 100.0, True, 100.0 + later) == 100.0 + later + (0.0 if at_once else 9.0)
