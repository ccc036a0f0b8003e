"""What reservations are worth: the same for everybody, never two on one GPU, and none moves another's GPUs."""

from __future__ import annotations

import doctest
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.gpus import reservations as module
from gpuherd.gpus.reservations import (
    Reservation,
    ReservationLimits,
    ReservationRules,
    Standing,
    State,
    by_gpu,
    calendar,
    free_between,
    lapsed_at,
    reserved_for,
    sentence,
    standings,
)

HOUR, DAY = 3600.0, 86400.0
UUIDS = [f"GPU-{number}" for number in range(4)]
NO_LAPSE = ReservationRules(lapse_after_s=1e9)


def reservation(number: int = 1, **fields: object) -> Reservation:
    plain = Reservation(f"1-{number:04x}", 1, 1, ("GPU-0",), since=10 * HOUR, until=20 * HOUR, made=float(number))
    made = replace(plain, **fields)  # type: ignore[arg-type]
    return replace(made, gpus=len(made.uuids))


@st.composite
def drawn(draw: st.DrawFn, most: int = 8) -> list[Reservation]:
    """Some reservations of a few users, many of which overlap."""
    found = []
    for number in range(draw(st.integers(0, most))):
        since = draw(st.integers(0, 20))
        found.append(
            reservation(
                number,
                uid=draw(st.integers(1, 3)),
                uuids=tuple(draw(st.lists(st.sampled_from(UUIDS), min_size=1, max_size=4, unique=True))),
                since=since * HOUR,
                until=(since + draw(st.integers(1, 12))) * HOUR,
                made=float(draw(st.integers(0, 5))),
                used=draw(st.sampled_from([None, 5 * HOUR, 12 * HOUR])),
            )
        )
    return found


nows = st.integers(0, 30).map(lambda hours: hours * HOUR)
rules_of = st.builds(
    ReservationRules,
    limits=st.builds(ReservationLimits, max_gpus=st.sampled_from([None, 1, 3]), max_s=st.sampled_from([4 * HOUR, DAY])),
    lapse_after_s=st.sampled_from([1800.0, 1e9]),
)


def overlap(one: Standing, two: Standing) -> bool:
    return one.reservation.since < two.until and two.reservation.since < one.until


@given(drawn(), nows, rules_of, st.randoms())
def test_no_gpu_is_reserved_twice_and_the_order_of_the_files_means_nothing(
    made: list[Reservation], now: float, rules: ReservationRules, chance: object
) -> None:
    found = standings(made, now=now, rules=rules)
    assert {each.reservation.id for each in found} == {each.id for each in made}
    for number, one in enumerate(found):
        assert one.uuids <= set(one.reservation.uuids)
        assert (one.problem is None) == (len(one.uuids) == one.reservation.gpus)
        for two in found[number + 1 :]:
            assert not (one.uuids & two.uuids and overlap(one, two))
    shuffled = list(made)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert standings(shuffled, now=now, rules=rules) == found


@given(drawn(), nows, rules_of)
def test_no_user_has_more_than_allowed_at_once(made: list[Reservation], now: float, rules: ReservationRules) -> None:
    found = standings(made, now=now, rules=rules)
    most = rules.limits.max_gpus
    for at in {each.reservation.since for each in found}:
        for uid in (1, 2, 3):
            total = sum(
                len(each.uuids)
                for each in found
                if each.reservation.uid == uid and each.reservation.since <= at < each.until
            )
            assert most is None or total <= most


@given(drawn(), drawn(3), nows, rules_of)
def test_a_later_one_never_changes_what_an_earlier_one_has(
    made: list[Reservation], later: list[Reservation], now: float, rules: ReservationRules
) -> None:
    before = {each.reservation.id: each for each in standings(made, now=now, rules=rules)}
    more = [replace(each, id=f"later-{number}", made=100.0 + number) for number, each in enumerate(later)]
    after = {each.reservation.id: each for each in standings([*made, *more], now=now, rules=rules)}
    assert {identity: after[identity] for identity in before} == before


@given(drawn(), nows, st.integers(0, 20), st.integers(1, 12))
def test_gpus_that_are_offered_are_honoured_when_they_are_taken(
    made: list[Reservation], now: float, begin: int, hours: int
) -> None:
    since = now + begin * HOUR
    found = standings(made, now=now)
    free = free_between(found, UUIDS, since, since + hours * HOUR, now)
    if free:
        new = reservation(99, uid=9, uuids=free, since=since, until=since + hours * HOUR, made=now + 1e6)
        judged = {each.reservation.id: each for each in standings([*made, new], now=now)}
        assert judged[new.id].uuids == set(free)
    for uuid in set(UUIDS) - set(free):
        assert any(
            uuid in each.uuids and each.reservation.since < since + hours * HOUR and each.until > since
            for each in found
            if each.is_open(now)
        )


def test_the_smallest_gap_goes_first_so_that_long_ones_stay_whole() -> None:
    found = standings([reservation(1, uuids=("GPU-2",), since=10 * HOUR, until=12 * HOUR)], now=0.0)
    assert free_between(found, UUIDS, 12 * HOUR, 14 * HOUR, 0.0) == ("GPU-2", "GPU-0", "GPU-1", "GPU-3")
    assert free_between(found, UUIDS, 11 * HOUR, 14 * HOUR, 0.0) == ("GPU-0", "GPU-1", "GPU-3")


def test_one_that_is_altered_loses_to_those_made_meanwhile() -> None:
    first, second = reservation(1, uid=1), reservation(2, uid=2)
    assert [each.reservation.uid for each in standings([first, second], now=0.0) if each.uuids] == [1]
    altered = replace(first, until=21 * HOUR, made=3.0)
    assert [each.reservation.uid for each in standings([altered, second], now=0.0) if each.uuids] == [2]


def test_a_part_that_is_lost_is_said() -> None:
    both = reservation(2, uuids=("GPU-0", "GPU-1"))
    found = {each.reservation.id: each for each in standings([reservation(1), both], now=0.0)}
    assert found[both.id].uuids == {"GPU-1"}
    assert found[both.id].problem == "1 of its 2 GPUs had been reserved before"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (ReservationLimits(max_s=9 * HOUR), "lasts 10 h 0 min; at most 9 h 0 min are allowed"),
        (ReservationLimits(max_ahead_s=9 * HOUR), "begins 9 h 59 min from when it was made; at most 9 h 0 min"),
        (ReservationLimits(max_gpus=1), "is for 2 GPUs; at most 1 are allowed"),
        (ReservationLimits(max_gpus=0), "is for 2 GPUs; at most 0 are allowed"),
    ],
)
def test_beyond_the_limits_nothing_is_honoured(limits: ReservationLimits, words: str) -> None:
    (found,) = standings([reservation(1, uuids=("GPU-0", "GPU-1"))], now=0.0, limits_of=lambda uid: limits)
    assert found.problem is not None
    assert words in found.problem
    assert found.state(0.0) is State.NOT_HONOURED
    assert not found.is_open(0.0)


def test_limits_are_each_users_own() -> None:
    two = [reservation(1, uid=1), reservation(2, uid=2, uuids=("GPU-1",))]
    found = standings(two, now=0.0, limits_of=lambda uid: ReservationLimits(max_gpus=uid - 1))
    assert [(each.reservation.uid, bool(each.uuids)) for each in found] == [(1, False), (2, True)]


def test_many_small_ones_count_together() -> None:
    each_hour = [
        reservation(number, uuids=(f"GPU-{number}",), since=(10 + number) * HOUR, until=14 * HOUR)
        for number in range(4)
    ]
    found = standings(each_hour, now=0.0, limits_of=lambda uid: ReservationLimits(max_gpus=2))
    assert [bool(each.uuids) for each in found] == [True, True, False, False]
    assert "would make 3 GPUs reserved by its owner at once; at most 2" in str(found[2].problem)


def test_turned_off_by_the_policy_nothing_counts() -> None:
    assert reserved_for([reservation()], UUIDS, 0.0, rules=ReservationRules(enabled=False))["GPU-0"] == ()


# --- lapsing --------------------------------------------------------------------------------------------------------


def test_it_lapses_half_an_hour_after_its_beginning_unless_it_is_used() -> None:
    unused = reservation()
    assert lapsed_at(unused, 10.49 * HOUR, 1800.0) is None
    assert lapsed_at(unused, 10.5 * HOUR, 1800.0) == 10.5 * HOUR
    used = replace(unused, used=12 * HOUR)
    assert lapsed_at(used, 12.4 * HOUR, 1800.0) is None
    assert lapsed_at(used, 13 * HOUR, 1800.0) == 12.5 * HOUR
    # It would lapse only when it has ended.
    assert lapsed_at(replace(unused, used=19.6 * HOUR), 25 * HOUR, 1800.0) is None
    # One that was made for now counts from its making.
    assert lapsed_at(replace(unused, made=11 * HOUR), 11.4 * HOUR, 1800.0) is None


def test_a_lease_keeps_it_only_if_it_was_taken_before() -> None:
    one = reservation()
    assert lapsed_at(one, 12 * HOUR, 1800.0, held_since=10.4 * HOUR) is None
    assert lapsed_at(one, 12 * HOUR, 1800.0, held_since=11 * HOUR) == 10.5 * HOUR


def test_a_mark_of_the_future_counts_as_one_of_now() -> None:
    """The clock was set back: the reservation neither lapses at once nor lives for ever."""
    one = replace(reservation(), used=30 * HOUR, made=40 * HOUR)
    assert lapsed_at(one, 11 * HOUR, 1800.0) is None
    assert standings([one], now=21 * HOUR)[0].state(21 * HOUR) is State.ENDED


def test_what_lapsed_is_free_for_another() -> None:
    lapsed, new = reservation(1), reservation(2, uid=2, since=12 * HOUR, until=14 * HOUR)
    found = standings([lapsed, new], now=12 * HOUR)
    assert [(each.state(12 * HOUR), sorted(each.uuids)) for each in found] == [
        (State.LAPSED, ["GPU-0"]),
        (State.IN_FORCE, ["GPU-0"]),
    ]
    assert by_gpu(found, ["GPU-0"], 12 * HOUR) == {"GPU-0": (found[1],)}


@given(drawn(), nows, rules_of)
def test_states_follow_the_time(made: list[Reservation], now: float, rules: ReservationRules) -> None:
    for each in standings(made, now=now, rules=rules):
        one, state = each.reservation, each.state(now)
        assert (state is State.ENDED) == (now >= one.until)
        assert state is not State.IN_FORCE or one.since <= now < one.until
        assert state is not State.TO_COME or now < one.since
        assert state is not State.LAPSED or (each.lapsed_at is not None and one.since < each.lapsed_at <= now)
        assert one.since < each.until <= one.until


@pytest.fixture
def in_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def go(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield go
    monkeypatch.undo()
    time.tzset()


# --- calendar and words ---------------------------------------------------------------------------------------------


@given(drawn(), nows, st.integers(0, 20), st.integers(1, 30))
def test_the_calendar_counts_every_hour(made: list[Reservation], now: float, begin: int, hours: int) -> None:
    found = standings(made, now=now)
    shown = calendar(found, UUIDS, begin * HOUR, (begin + hours) * HOUR)
    assert [hour.at for hour in shown.hours] == [(begin + number) * HOUR for number in range(hours)]
    for hour in shown.hours:
        there: set[str] = set()
        for each in found:
            if each.reservation.since < hour.at + HOUR and each.until > hour.at:
                there |= each.uuids
        assert (hour.reserved, hour.free) == (len(there), len(UUIDS) - len(there))
    ids = {each.reservation.id for each in shown.standings}
    assert ids == {each.id for each in made if each.since < (begin + hours) * HOUR and each.until > begin * HOUR}


@pytest.mark.parametrize("span", [(0.0, 0.0), (5.0, 1.0), (0.0, 1e12)])
def test_a_calendar_of_no_or_endless_time_is_refused(span: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no or too many steps"):
        calendar((), UUIDS, *span)


def test_words(in_zone: Callable[[str], None]) -> None:
    in_zone("UTC")

    def words(found: Sequence[Standing], now: float) -> str:
        return sentence(found[0], "alice", now)

    named = [reservation(1, name="thesis", used=11 * HOUR)]
    assert words(standings(named, now=0.0), 0.0) == "reserved by alice from Thu 10:00 (thesis)"
    assert words(standings(named, now=11 * HOUR), 11 * HOUR) == "reserved by alice until Thu 20:00 (thesis)"
    assert words(standings(named, now=15 * HOUR), 15 * HOUR) == (
        "the reservation of alice until Thu 20:00 (thesis) lapsed Thu 11:30: unused"
    )
    far = standings([reservation(1, since=20 * DAY, until=21 * DAY)], now=0.0)
    assert words(far, 0.0) == "reserved by alice from 1970-01-21 00:00"


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0
