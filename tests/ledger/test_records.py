"""Uses as lines: what was written comes back, and nothing else passes for a record."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger.uses import use

from gpuherd.ledger.records import LONGEST_LINE, Kind, Recorded, Use, line_of, use_of

figures = st.none() | st.floats(0, 1000).map(lambda value: round(value, 3))


@given(
    held_s=st.floats(0, 1000).map(lambda value: round(value, 3)),
    computing=figures,
    energy=figures,
    job=st.none() | st.text("abc-._ ü漢", min_size=1, max_size=30).map(str.strip).filter(bool),
    kind=st.sampled_from(Kind),
)
def test_what_was_written_comes_back(
    held_s: float, computing: float | None, energy: float | None, job: str | None, kind: Kind
) -> None:
    one = use(held_s=held_s, computing_s=computing and min(computing, held_s), energy_j=energy, job=job, kind=kind)
    one = replace(one, job=None if job is None else " ".join(job.split()))
    one = replace(one, until=round(one.until, 3))
    line = line_of(one)
    assert line.count(b"\n") == 1
    assert len(line) <= LONGEST_LINE
    assert use_of(line) == one


def test_long_and_dangerous_texts_are_cut() -> None:
    line = line_of(use(job="x" * 10_000, command="evil\x1b[31m\nname"))
    assert len(line) < LONGEST_LINE
    back = use_of(line)
    assert back is not None
    assert len(back.job or "") <= 300
    assert (back.command or "").isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {"uid": -1},
        {"uid": "0"},
        {"uid": 2**40},
        {"uid": True},
        {"held_s": 1e9},
        {"held_s": -1},
        {"held_s": float("nan")},
        {"held_s": float("inf")},
        {"since": 5e18},
        {"until": 1.0},
        {"computing_s": 1000.0},
        {"energy_j": 1e30},
        {"memory_mb_s": 1e30},
        {"kind": "king"},
        {"id": ""},
        {"id": "x" * 500},
        {"gpu": 3},
        {"pid": 2**40},
        {"job": ["a"]},
    ],
)
def test_absurd_figures_are_no_record(change: dict[str, object]) -> None:
    values = json.loads(line_of(use()))
    assert use_of(json.dumps(values).encode()) is not None
    assert use_of(json.dumps(values | change).encode()) is None


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 4000, b"[" * 4096, b"x" * 9999, b"1e999"]
)
def test_what_is_no_record_is_none(line: bytes) -> None:
    assert use_of(line) is None


@given(st.binary(max_size=200))
def test_no_bytes_raise(line: bytes) -> None:
    use_of(line)


@given(cuts=st.lists(st.floats(900, 1200), min_size=1, max_size=5))
def test_parts_add_up_to_the_whole(cuts: list[float]) -> None:
    one = use(computing_s=50.0, energy_j=1e4, memory_mb_s=1e6)
    places = [0.0, *sorted(cuts), 1e5]
    parts = [part for first, last in pairwise(places) if (part := one.within(first, last))]
    for figure in ("held_s", "computing_s", "energy_j", "memory_mb_s"):
        assert sum(getattr(part, figure) for part in parts) == pytest.approx(getattr(one, figure))


def test_control_characters_in_names_are_gone() -> None:
    values = json.loads(line_of(use())) | {"job": "a\x1b[2Jb\u202ec", "label": "0\x07"}
    back = use_of(json.dumps(values).encode())
    assert back is not None
    assert (back.job or "").isprintable()
    assert back.label.isprintable()


def test_the_longer_record_counts_whatever_the_clock_did() -> None:
    def recorded(one: Use, *, is_open: bool = False) -> Recorded:
        return Recorded(one, 1001, is_open)

    short, long = use(held_s=10.0), use(since=500.0, held_s=20.0)
    assert recorded(long).outweighs(recorded(short))
    assert not recorded(short).outweighs(recorded(long))
    assert recorded(short).outweighs(recorded(short, is_open=True))
    assert not recorded(short, is_open=True).outweighs(recorded(short))


def test_who_is_believed() -> None:
    own = use()
    assert Recorded(own, 1001).is_believed_by(7)
    assert Recorded(own, 0).is_believed_by(7)
    assert Recorded(own, 7).is_believed_by(7)
    assert not Recorded(own, 8).is_believed_by(7)
