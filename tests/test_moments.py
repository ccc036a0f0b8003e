"""Times as people write them: local, the next one that is meant, and right when the clocks are changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.units import moment


@pytest.fixture
def in_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def go(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield go
    monkeypatch.undo()
    time.tzset()


# A Wednesday.
NOW = datetime(2026, 11, 25, 17, 0)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("now", "2026-11-25 17:00"),
        ("in 2h", "2026-11-25 19:00"),
        ("in 1d12h", "2026-11-27 05:00"),
        ("18:00", "2026-11-25 18:00"),
        ("17:00", "2026-11-26 17:00"),
        ("9:30", "2026-11-26 09:30"),
        ("fri 18:00", "2026-11-27 18:00"),
        ("Friday at 18:00", "2026-11-27 18:00"),
        ("  FRI   18:00 ", "2026-11-27 18:00"),
        ("wed 18:00", "2026-11-25 18:00"),
        ("wed 16:00", "2026-12-02 16:00"),
        ("wed", "2026-12-02 00:00"),
        ("thu", "2026-11-26 00:00"),
        ("today 23:59", "2026-11-25 23:59"),
        ("today", "2026-11-25 00:00"),
        ("tomorrow", "2026-11-26 00:00"),
        ("tomorrow 9:00", "2026-11-26 09:00"),
        ("2026-12-01", "2026-12-01 00:00"),
        ("2026-12-01 09:00", "2026-12-01 09:00"),
        ("2026-12-01T09:00:30", "2026-12-01 09:00:30"),
        ("2020-1-2 9:00", "2020-01-02 09:00"),
    ],
)
def test_what_people_write(in_zone: Callable[[str], None], word: str, expected: str) -> None:
    in_zone("Europe/Berlin")
    assert moment(word, NOW.timestamp()) == datetime.fromisoformat(expected).timestamp()


NO_TIMES = """
soon|fr|friday evening|24:00|9|18:60|18:00:61|2026-13-01|2026-02-30|in|in x|fri 18:00 20:00|0000-01-01|99999-01-01
tomorrow tomorrow|in -1h|１８:００|mon\x1b[0m
""".strip().replace("\n", "|")


@pytest.mark.parametrize("word", ["", " ", "x" * 9999, *NO_TIMES.split("|")])
def test_what_is_no_time_is_refused_with_how_to_write_it(word: str) -> None:
    with pytest.raises(ValueError, match="write "):
        moment(word, NOW.timestamp())


@given(st.text(max_size=30), st.floats(0, 4e9))
def test_nothing_else_is_raised(word: str, now: float) -> None:
    try:
        assert isinstance(moment(word, now), float)
    except ValueError as problem:
        assert str(problem)


def test_when_the_clocks_are_changed(in_zone: Callable[[str], None]) -> None:
    in_zone("Europe/Berlin")
    friday = datetime(2026, 3, 27, 12, 0).timestamp()
    with pytest.raises(ValueError, match="is skipped: the clocks are set forward then"):
        moment("sun 2:30", friday)
    with pytest.raises(ValueError, match="is skipped"):
        moment("2026-03-29 02:00", friday)
    # From Friday noon to Sunday noon are 47 hours, and "in 2d" is 48.
    assert moment("sun 12:00", friday) - friday == 47 * 3600
    assert moment("in 2d", friday) - friday == 48 * 3600
    autumn = datetime(2026, 10, 23, 12, 0).timestamp()
    assert moment("sun 12:00", autumn) - autumn == 49 * 3600
    # 02:30 comes twice: the first one is meant.
    assert moment("sun 2:30", autumn) == moment("sun 1:30", autumn) + 3600
    assert moment("sun 3:30", autumn) == moment("sun 2:30", autumn) + 7200
