"""Records of answers survive their lines of JSON to the bit, whatever stands in them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.lm.backend import Finish, Generation
from gpuherd.qa.record import Answered, BadRecord, Prompted, Question, answered_of, line_of

FLOAT32 = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    pieces = draw(st.lists(TEXT, max_size=6))
    ends = tuple(sum(map(len, pieces[: number + 1])) for number in range(len(pieces)))
    log_probs = tuple(draw(st.one_of(st.none(), FLOAT32)) for _ in pieces)
    ids = tuple(draw(st.integers(0, 200_000)) for _ in pieces)
    finish = draw(st.sampled_from(Finish))
    end = (draw(st.integers(0, 9)), draw(FLOAT32)) if finish is Finish.EOS else (None, None)
    return Generation(ids, log_probs, "".join(pieces), ends, finish, *end)


RECORDS = st.builds(
    Answered,
    number=st.integers(0, 10_000),
    question=st.builds(
        Question, TEXT, TEXT, st.lists(TEXT, min_size=1, max_size=3).map(tuple), st.one_of(st.none(), TEXT)
    ),
    prompt=st.builds(Prompted, st.just("0" * 64), st.integers(0, 100), st.integers(0, 100)),
    greedy=st.one_of(st.none(), generations()),
    samples=st.lists(generations(), max_size=3).map(tuple),
)


@given(RECORDS)
def test_a_record_comes_back_equal_from_one_line(record: Answered) -> None:
    line = line_of(record)
    assert len(line.splitlines()) == 1
    assert answered_of(line) == record


@given(generations())
def test_pieces_are_the_text(generation: Generation) -> None:
    assert "".join(generation.pieces) == generation.text
    assert len(generation.pieces) == len(generation.token_ids)


@given(st.integers(0, 2**31 - 1))
def test_every_float32_is_written_so_that_it_is_read_again(bits: int) -> None:
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if value != value or value == float("inf"):
        return
    generation = Generation((1,), (-value,), "", (0,), Finish.LENGTH)
    record = Answered(0, Question("0", "q", ("a",)), Prompted("", 1), generation)
    greedy = answered_of(line_of(record)).greedy
    assert greedy is not None
    assert struct.pack("<f", greedy.log_probs[0] or 0.0) == struct.pack("<f", -value or 0.0)


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", "null", '{"number": 1', '{"number": true}', "9" * 5000, "[" * 100_000, "\x00", '{"a": NaN}'],
)
def test_what_is_no_record_is_said_to_be_none(line: str) -> None:
    with pytest.raises(BadRecord):
        answered_of(line)


def test_tokens_that_do_not_divide_the_text_are_refused() -> None:
    record = Answered(0, Question("0", "q", ("a",)), Prompted("", 1), Generation((1,), (-1.0,), "ab", (2,), Finish.EOS))
    line = line_of(record)
    for wrong in ('"ends":[1]', '"ends":[3]', '"ends":[-1]', '"ends":[]'):
        with pytest.raises(BadRecord):
            answered_of(line.replace('"ends":[2]', wrong))


def test_a_log_prob_that_no_float32_holds_is_refused() -> None:
    record = Answered(0, Question("0", "q", ("a",)), Prompted("", 1), Generation((1,), (-1.5,), "a", (1,), Finish.EOS))
    with pytest.raises(BadRecord):
        answered_of(line_of(record).replace("-1.5", "-1e308"))
