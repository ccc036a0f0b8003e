"""How many GPUs a user may hold, and when: quiet hours and limits."""

from __future__ import annotations

import doctest
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.jobs import settings as quiet_hours
from gpuherd.jobs.scheduler.limits import WEEK_HALF_LIFE_S, Allowance, allowance, most_ever
from gpuherd.jobs.settings import Hours, Policy, Settings, active, next_change, parse_quiet_hours

MONDAY = datetime(2026, 11, 16)
WORK = parse_quiet_hours("Mon-Fri 09:00-18:00")
NIGHT = parse_quiet_hours("Fri 22:00-06:00")


def test_the_examples_in_the_docstrings_hold() -> None:
    ran = doctest.testmod(quiet_hours)
    assert (ran.attempted > 0, ran.failed) == (True, 0)


def at(day: int, clock: str) -> datetime:
    """Local time on this day of a week: 0 is Monday."""
    hours, minutes = map(int, clock.split(":"))
    return MONDAY + timedelta(days=day, hours=hours, minutes=minutes)


@pytest.mark.parametrize(
    ("day", "clock", "quiet"),
    [(0, "08:59", False), (0, "09:00", True), (4, "17:59", True), (4, "18:00", False), (5, "12:00", False)],
)
def test_working_hours(day: int, clock: str, quiet: bool) -> None:
    assert (active([WORK], at(day, clock)) is not None) is quiet


@pytest.mark.parametrize(
    ("day", "clock", "quiet"),
    [(4, "21:59", False), (4, "22:00", True), (5, "05:59", True), (5, "06:00", False), (5, "23:00", False)],
)
def test_a_night_belongs_to_the_day_on_which_it_begins(day: int, clock: str, quiet: bool) -> None:
    assert (active([NIGHT], at(day, clock)) is not None) is quiet


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("Sat,Sun", {5, 6}),
        ("fri-mon 00:00-24:00", {4, 5, 6, 0}),
        ("22:00-06:00", set(range(7))),
        ("Monday, We-Th 1:00-2:30", {0, 2, 3}),
    ],
)
def test_days_as_people_write_them(text: str, days: set[int]) -> None:
    assert parse_quiet_hours(text).days == days


@pytest.mark.parametrize(
    "text", ["", "Mon-Fry", "9-5", "25:00-26:00", "09:60-10:00", "Mon-Tue-Wed 1:00-2:00", "T 1:00-2:00", "1:00-1:00"]
)
def test_what_is_no_quiet_hours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        parse_quiet_hours(text)


@given(
    st.lists(st.sampled_from(["Mon-Fri 09:00-18:00", "22:00-06:00", "Sat,Sun", "Wed 12:00-12:30"]), max_size=3),
    st.integers(0, 8 * 24 * 60),
)
def test_the_next_change_is_the_first_minute_at_which_anything_changes(texts: list[str], minute: int) -> None:
    hours = [parse_quiet_hours(text) for text in texts]
    now = MONDAY + timedelta(minutes=minute)
    change = next_change(hours, now)
    state = [active([each], now) is not None for each in hours]
    if change is None:
        assert hours == []
        return
    assert now < change <= now + timedelta(days=8)
    between = now
    while (between := between + timedelta(minutes=10)) < change:
        assert [active([each], between) is not None for each in hours] == state


def test_without_settings_nothing_is_limited() -> None:
    assert allowance(Settings(), "alice", at(0, "12:00"), 5) == Allowance()


def test_the_smallest_limit_counts_and_is_named() -> None:
    settings = Settings(max_gpus=5, policy=Policy(max_gpus_per_user=4, max_gpus_of={"alice": 6}))
    assert allowance(settings, "bob", MONDAY) == Allowance(4, (), "at most 4 GPUs for bob by this machine's policy")
    assert allowance(settings, "alice", MONDAY).sentence == "at most 5 GPUs by your own settings"
    assert (most_ever(settings, "bob"), most_ever(settings, "alice"), most_ever(Settings(), "bob")) == (4, 5, None)


def test_ones_other_runs_count_and_may_use_all_of_it_up() -> None:
    settings = Settings(max_gpus=2)
    assert allowance(settings, "alice", MONDAY, 1).max_gpus == 1
    assert allowance(settings, "alice", MONDAY, 1).closed is None
    used_up = allowance(settings, "alice", MONDAY, 3)
    assert used_up.max_gpus == 0
    assert used_up.closed == "at most 2 GPUs by your own settings; 3 are held by your other runs"


def test_quiet_hours_close_and_say_until_when() -> None:
    settings = Settings(hours=Hours((WORK,)), policy=Policy(hours=Hours((NIGHT,), 2)))
    assert allowance(settings, "a", at(0, "08:00")) == Allowance(changes_at=at(0, "09:00").timestamp())
    quiet = allowance(settings, "a", at(0, "10:00"))
    assert quiet.closed == "at most 0 GPUs in your quiet hours (Mon-Fri 09:00-18:00), until Mon 18:00"
    assert quiet.changes_at == at(0, "18:00").timestamp()
    night = allowance(settings, "a", at(5, "01:00"))
    assert (night.max_gpus, night.closed) == (2, None)
    assert night.sentence == "at most 2 GPUs in this machine's quiet hours (Fri 22:00-06:00), until Sat 06:00"


def test_windows_that_meet_are_one() -> None:
    days = [parse_quiet_hours("Fri 22:00-24:00"), parse_quiet_hours("Sat-Sun"), parse_quiet_hours("Mon 00:00-07:30")]
    assert quiet_hours.over_at(days, at(4, "23:00")) == at(7, "07:30")
    assert quiet_hours.over_at(days, at(2, "12:00")) == at(2, "12:00")
    always = Settings(hours=Hours((parse_quiet_hours("Mon-Sun 00:00-24:00"),)))
    assert allowance(always, "a", at(0, "10:00")).closed == "at most 0 GPUs in your quiet hours (Mon-Sun 00:00-24:00)"


@given(
    st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 7 * 24 * 60),
)
def test_nobody_is_allowed_more_than_any_limit_says(
    own: int | None, machine: int | None, quiet: int, elsewhere: int, minute: int
) -> None:
    now = MONDAY + timedelta(minutes=minute)
    policy = Policy(max_gpus_per_user=machine, hours=Hours((WORK,), quiet))
    found = allowance(Settings(max_gpus=own, policy=policy), "alice", now, elsewhere)
    limits = [own, machine, quiet if active([WORK], now) else None]
    known = [limit for limit in limits if limit is not None]
    assert found.max_gpus == (max(0, min(known) - elsewhere) if known else None)
    assert (found.sentence is None) is (found.max_gpus is None)


# --- GPU-hours a week ------------------------------------------------------------------------------------------------

WEEKLY = Settings(policy=Policy(week_hours_per_user=40.0, week_hours_of={"alice": 0.0}))


def test_who_has_used_up_a_week_waits_until_it_has_faded_enough() -> None:
    assert allowance(WEEKLY, "bob", MONDAY, 0, 39.9 * 3600) == Allowance()
    assert allowance(Settings(), "bob", MONDAY, 0, 1e9) == Allowance()
    found = allowance(WEEKLY, "bob", MONDAY, 0, 41 * 3600.0)
    assert found.max_gpus == 0
    # A sum that fades with a time constant of a week: 41 to 40 takes 7 days * ln(41/40), and a minute to be below.
    assert found.sentence == (
        "bob may use 40 GPU-hours a week by this machine's policy, and has used 41.0 of late;"
        " from Mon 04:09 on it is less again"
    )
    assert found.changes_at == pytest.approx((MONDAY + timedelta(hours=4, minutes=9)).timestamp(), abs=60)
    far = allowance(WEEKLY, "bob", MONDAY, 0, 400 * 3600.0)
    assert "from 2026-12-02 02:" in str(far.sentence)
    never = allowance(WEEKLY, "alice", MONDAY)
    assert (never.max_gpus, never.changes_at) == (0, None)
    assert never.sentence == "alice may use 0 GPU-hours a week by this machine's policy, and has used 0.0"


@given(st.floats(0.1, 1e4), st.floats(1.0, 10.0))
def test_at_the_time_that_is_named_the_week_is_below_its_limit(hours: float, times: float) -> None:
    settings = Settings(policy=Policy(week_hours_per_user=hours))
    used_s = hours * 3600 * times
    found = allowance(settings, "bob", MONDAY, 0, used_s)
    assert found.changes_at is not None
    wait_s = found.changes_at - MONDAY.timestamp()
    later = allowance(settings, "bob", MONDAY, 0, used_s * 2 ** (-wait_s / WEEK_HALF_LIFE_S))
    assert later.max_gpus is None
    sooner = allowance(settings, "bob", MONDAY, 0, used_s * 2 ** (-max(0.0, wait_s - 120) / WEEK_HALF_LIFE_S))
    assert sooner.max_gpus == 0
