"""Dataclasses as JSON values and back: equal, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.runs.records import jsonable, line_of, read


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Place:
    x: float
    y: float | None


@dataclass(frozen=True)
class House:
    name: str
    rooms: int
    heated: bool
    colour: Colour
    at: Place | None
    walls: tuple[Place, ...]
    owners: Mapping[str, float]
    note: Any = None
    numbers: tuple[int, ...] = ()
    figures: tuple[float, ...] = ()
    known: tuple[float | None, ...] = ()


numbers = st.floats(allow_nan=False, allow_infinity=False)
places = st.builds(Place, numbers, st.none() | numbers)
houses = st.builds(
    House,
    st.text(),
    st.integers(-(2**64) + 1, 2**64 - 1),
    st.booleans(),
    st.sampled_from(Colour),
    st.none() | places,
    st.lists(places, max_size=4).map(tuple),
    st.dictionaries(st.text(), numbers, max_size=3),
    st.none() | st.text() | st.lists(st.integers(), max_size=2),
    st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
    st.lists(numbers, max_size=3).map(tuple),
    st.lists(st.none() | numbers, max_size=3).map(tuple),
)


@settings(max_examples=30)
@given(houses, st.booleans())
def test_what_is_written_is_read_again(house: House, short: bool) -> None:
    as_lists = [Place] if short else []
    values = json.loads(json.dumps(jsonable(house, as_lists), allow_nan=False))
    assert read(House, values, as_lists) == house
    assert isinstance(values["walls"], list) and all(isinstance(each, list) is short for each in values["walls"])


HOUSE = House("h", 1, True, Colour.RED, None, (), {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rooms", "1"),
        ("rooms", True),
        ("heated", 1),
        ("colour", "green"),
        ("at", {"x": 1.0}),
        ("at", {"x": math.nan, "y": None}),
        ("walls", {}),
        ("walls", [[1.0, 2.0]]),
        ("owners", {"a": "b"}),
        ("name", None),
        ("numbers", [1, 2.0]),
        ("numbers", [True]),
        ("numbers", [None]),
        ("figures", [1.0, math.inf]),
        ("figures", [1.0, None]),
        ("known", [None, math.nan]),
        ("known", ["1"]),
    ],
)
def test_what_it_is_not_is_refused(field: str, value: Any) -> None:
    good = jsonable(HOUSE)
    assert read(House, good) == HOUSE
    with pytest.raises((TypeError, ValueError, KeyError)):
        read(House, {**good, field: value})


@pytest.mark.parametrize("value", [10**400, -(10**30)])
def test_numbers_that_nothing_can_hold_are_no_surprise_later(value: int) -> None:
    for kind in (int, float, float | None, tuple[int, ...], tuple[float | None, ...]):
        with pytest.raises(ValueError):
            read(kind, [value] if "tuple" in str(kind) else value)


def test_lists_of_fields_have_each_field_once() -> None:
    good = jsonable(replace(HOUSE, at=Place(1.0, None)), [Place])
    assert good["at"] == [1.0, None]
    for wrong in ([1.0], [1.0, None, 2.0]):
        with pytest.raises(ValueError):
            read(House, {**good, "at": wrong}, [Place])


def test_whole_numbers_among_figures_become_figures() -> None:
    found = read(House, {**jsonable(HOUSE), "figures": [1, 2.5], "known": [3, None]})
    assert found.figures == (1.0, 2.5) and isinstance(found.figures[0], float)
    assert found.known == (3.0, None) and isinstance(found.known[0], float)


@dataclass(frozen=True)
class Vote:
    by: Literal["hand", "letter"]
    counts: Mapping[Colour, int]
    kept: Path | None = None


def test_a_line_is_one_line_of_ascii_and_the_same_for_the_same(tmp_path: Path) -> None:
    vote = Vote("hand", {Colour.BLUE: 2, Colour.RED: 0}, tmp_path / "a\u2028b\n")
    line = line_of(vote)
    assert line.isascii() and "\n" not in line and line == line_of(replace(vote))
    assert line.startswith('{"by":"hand","counts":{"blue":2,"red":0},"kept":"')


def test_keys_are_enums_again_and_words_are_those_that_are_allowed() -> None:
    vote = Vote("letter", {Colour.RED: 1})
    again = read(Vote, json.loads(line_of(vote)))
    assert again == vote and type(next(iter(again.counts))) is Colour
    for wrong in ({"by": "mail", "counts": {}}, {"by": "hand", "counts": {"green": 1}}):
        with pytest.raises(ValueError, match=r"mail|green"):
            read(Vote, wrong)


@dataclass(frozen=True)
class Later:
    name: str
    size: int = 3
    tables: Mapping[str, str] = field(default_factory=dict)


def test_a_field_that_has_a_default_may_be_missing_in_an_older_file() -> None:
    assert read(Later, {"name": "a"}) == Later("a")
    with pytest.raises(KeyError):
        read(Later, {"size": 1})
