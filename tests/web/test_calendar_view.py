"""The week of reservations: hours and days, daylight saving, blocks in lanes, and forms."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gpus.machines import gpu

from gpuherd.gpus.reservations import Reservation, standings
from gpuherd.web.calendar_view import (
    HOURS,
    MOST_LANES,
    FieldProblem,
    Reservations,
    Week,
    first_day,
    request_of,
    week_of,
)

NOW = datetime(2026, 11, 25, 10, 30).timestamp()  # a Wednesday
MONDAY = date(2026, 11, 23)
GPUS = tuple(gpu(index) for index in range(4))
UUIDS = tuple(each.uuid for each in GPUS)


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(day: int, hour: int, minute: int = 0) -> float:
    return datetime(2026, 11, day, hour, minute).timestamp()


def reserved(number: int, since: float, until: float, uuids: tuple[str, ...] = UUIDS[:1], uid: int = 7) -> Reservation:
    used = since if since < NOW else None
    made, name = at(20, 0) + number, "<b>thesis</b>"
    return Reservation(f"{uid}-{number:04x}", uid, len(uuids), uuids, since, until, name, made, used)


def week(*reservations: Reservation, first: date = MONDAY, now: float = NOW, uid: int = 7) -> Week:
    found = standings(reservations, now=now)
    return week_of(Reservations(GPUS, found), first, uid=uid, now=now)


def test_hours_say_how_many_gpus_are_free() -> None:
    shown = week(
        reserved(1, at(26, 8), at(26, 12, 30), UUIDS[:3]), reserved(2, at(26, 23), at(27, 1), UUIDS[3:], uid=8)
    )
    thursday, friday = shown.days[3], shown.days[4]
    assert [slot.free for slot in thursday.slots] == [4] * 8 + [1] * 5 + [4] * 10 + [3]
    assert [slot.free for slot in friday.slots] == [3] + [4] * 23
    assert thursday.free == (("00–08", 4), ("08–13", 1), ("13–23", 4), ("23–24", 3))
    assert shown.days[0].free == ()  # past
    assert shown.days[2].free == (("10–24", 4),)
    assert thursday.slots[8].local == "2026-11-26T08:00"
    assert [day.is_today for day in shown.days] == [False, False, True, False, False, False, False]


def test_a_reservation_over_midnight_has_a_block_in_each_day() -> None:
    shown = week(reserved(1, at(26, 22, 30), at(28, 2)))
    blocks = [[(block.first, block.end) for lane in day.lanes for block in lane] for day in shown.days]
    assert blocks == [[], [], [], [(22, 24)], [(0, 24)], [(0, 2)], []]
    assert shown.days[3].cell(0, 21) == "empty"
    assert shown.days[3].cell(0, 23) == "covered"
    assert len(shown.entries) == 1


def test_entries_say_whose_they_are_and_who_may_cancel() -> None:
    shown = week(
        reserved(1, at(24, 8), at(24, 9)),
        reserved(2, at(26, 8), at(26, 9)),
        reserved(3, at(26, 8), at(26, 9), UUIDS[1:2], 8),
    )
    assert [(each.owner, each.is_own, each.can_cancel, each.state) for each in shown.entries] == [
        ("7", True, False, "ended"),
        ("7", True, True, "to-come"),
        ("8", False, False, "to-come"),
    ]
    assert shown.entries[1].text == "GPU 0 · Thu 08:00 until Thu 09:00"
    assert all(each.can_cancel for each in week(reserved(2, at(26, 8), at(26, 9)), uid=0).entries)


def test_of_very_many_only_some_have_a_lane_and_all_are_listed() -> None:
    gpus = tuple(gpu(index) for index in range(10))
    found = standings([reserved(n, at(26, 8), at(26, 20), (gpus[n].uuid,)) for n in range(10)], now=NOW)
    shown = week_of(Reservations(gpus, found), MONDAY, uid=7, now=NOW)
    assert len(shown.days[3].lanes) == MOST_LANES
    assert shown.days[3].left_out == 10 - MOST_LANES
    assert len(shown.entries) == 10


def test_a_skipped_hour_has_no_time_and_one_that_comes_twice_has_two(new_york: None) -> None:
    now = datetime(2026, 3, 4, 12).timestamp()
    spring = week(first=date(2026, 3, 2), now=now).days[6]
    assert [hour for hour, slot in enumerate(spring.slots) if slot.free is None] == [2]
    assert ("02–03", 4) not in spring.free
    now = datetime(2026, 10, 28, 12).timestamp()
    autumn = week(first=date(2026, 10, 26), now=now).days[6]
    lengths = [(slot.until - slot.at) / 3600 for slot in autumn.slots]
    assert lengths == [1.0, 2.0, *[1.0] * 22]


@st.composite
def many(draw: st.DrawFn) -> list[Reservation]:
    made = []
    for number in range(draw(st.integers(0, 12))):
        since = at(23, 0) + draw(st.integers(-72, 200)) * 1800.0
        until = since + draw(st.integers(1, 150)) * 1800.0
        uuids = tuple(sorted(draw(st.sets(st.sampled_from(UUIDS), min_size=1))))
        made.append(reserved(number, since, until, uuids, draw(st.integers(7, 9))))
    return made


@settings(max_examples=40)
@given(many())
def test_every_hour_and_every_block_has_one_place(reservations: list[Reservation]) -> None:
    shown = week(*reservations)
    assert len(shown.days) == 7
    for day in shown.days:
        assert len(day.slots) == HOURS
        drawn = sum(len(lane) for lane in day.lanes)
        for lane in range(len(day.lanes)):
            cells = [day.cell(lane, hour) for hour in range(HOURS)]
            blocks = [cell for cell in cells if not isinstance(cell, str)]
            assert blocks == list(day.lanes[lane])
            # The table's columns come out even: a block stands for as many rows as it covers.
            assert sum(block.rows for block in blocks) + cells.count("empty") == HOURS
            assert cells.count("covered") == sum(block.rows - 1 for block in blocks)
        begin, end = day.slots[0].at, day.slots[-1].until
        there = [
            each
            for each in standings(reservations, now=NOW)
            if each.uuids and each.reservation.since < end and each.until > begin
        ]
        assert drawn + day.left_out == len(there)
        for slot in day.slots:
            taken = {
                uuid
                for each in there
                if each.reservation.since < slot.until and each.until > slot.at
                for uuid in each.uuids
            }
            assert slot.free == len(GPUS) - len(taken)


def test_days_that_are_none_are_refused() -> None:
    assert first_day("", NOW) == date(2026, 11, 25)
    assert first_day("2026-11-29", NOW) == date(2026, 11, 29)
    last = date(2026, 11, 25) + timedelta(days=420)
    assert first_day(str(last), NOW) == last
    assert week(first=last).after is None
    assert week(first=last - timedelta(days=7)).after == str(last)
    for word in (
        "0001-01-01",
        "9999-12-31",
        "monday",
        "2026-13-01",
        "x" * 5000,
        "2026-11-23\x00",
        str(last + timedelta(1)),
    ):
        with pytest.raises(ValueError, match=r"no day|days away") as refused:
            first_day(word, NOW)
        assert len(str(refused.value)) < 120


def test_a_form_is_a_request() -> None:
    fields = {"gpus": "2", "from": "2026-11-26T08:00", "until": "2026-11-27T00:00", "name": "thesis"}
    request = request_of(fields, NOW)
    assert (request.gpus, request.since, request.until, request.name) == (2, at(26, 8), at(27, 0), "thesis")
    assert request_of({**fields, "from": "fri 18:00", "until": "sat 18:00"}, NOW).since == at(27, 18)
    assert request_of({**fields, "from": "2026-11-25T10:30"}, NOW + 40).since == NOW + 40


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpus", "0"),
        ("gpus", "-1"),
        ("gpus", "many"),
        ("gpus", ""),
        ("from", ""),
        ("from", "yesterday"),
        ("from", "9" * 60_000),
        ("from", "99999-01-01T00:00"),
        ("until", "2026-11-26T08:00"),
        ("until", "2026-02-30T08:00"),
        ("until", "\x1b[31m"),
    ],
)
def test_what_is_wrong_in_a_form_is_told_at_its_field(field: str, value: str) -> None:
    fields = {"gpus": "2", "from": "2026-11-26T08:00", "until": "2026-11-27T00:00", field: value}
    with pytest.raises(FieldProblem) as refused:
        request_of(fields, NOW)
    assert refused.value.field == field
    assert len(str(refused.value)) < 500


@given(st.dictionaries(st.sampled_from(["gpus", "from", "until", "name"]), st.text(max_size=40)))
def test_no_form_breaks_the_page(fields: dict[str, str]) -> None:
    with suppress(FieldProblem):
        request_of(fields, NOW)
