"""A table with a line a row, in any width."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpuherd.columns import GAP, Column, fitted, shortened

MODEL = Column("model", 0, middle=True)
SIZE = Column("size", 2, right=True)
BASE = Column("base", 1, least=8, middle=True)
LONG = "an-organisation/a-model-with-a-long-name"


def test_where_there_is_no_window_all_is_told_in_full() -> None:
    table = fitted((MODEL, SIZE, BASE), [(LONG, "1 GB", "b" * 500), ("m", "10 GB", "-")], None)
    assert table.lines[1] == f"{LONG}   1 GB  {'b' * 500}"
    assert table.lines[2] == f"{'m':<40}  10 GB  -"
    assert table.left_out == ()


def test_the_least_useful_column_goes_before_an_id_is_cut() -> None:
    rows = [(LONG, "1 GB", "an-org/base")]
    assert fitted((MODEL, SIZE, BASE), rows, 59).lines[1] == f"{LONG}  1 GB  an-org/base"
    assert fitted((MODEL, SIZE, BASE), rows, 56).lines[1] == f"{LONG}  1 GB  an-o…ase"
    narrower = fitted((MODEL, SIZE, BASE), rows, 55)
    assert narrower.lines[1] == f"{LONG}  an-org/base"
    assert narrower.left_out == ("size",)
    alone = fitted((MODEL, SIZE, BASE), rows, 41)
    assert alone.lines[1] == LONG
    assert alone.left_out == ("size", "base")
    assert fitted((MODEL, SIZE, BASE), rows, 21).lines[1] == "an-organis…-long-name"


def test_one_endless_id_does_not_push_the_other_columns_out() -> None:
    rows = [(f"org/model-{number}", "1 GB", "-") for number in range(300)] + [("x" * 90, "1 GB", "-")]
    table = fitted((MODEL, SIZE, BASE), rows, 40)
    assert table.left_out == ()
    assert "…" in table.lines[-1]
    assert not any("…" in line for line in table.lines[:-1])


def test_a_wide_sign_takes_two_cells() -> None:
    assert shortened("模型模型模型", 7, middle=True) == "模…型"
    assert shortened("模型", 4, middle=True) == "模型"
    table = fitted((MODEL, SIZE), [("模型", "1 GB"), ("abcdef", "2 GB")], 40)
    assert [cell_len(line) for line in table.lines[1:]] == [12, 12]


WORDS = st.text(st.characters(categories=("L", "N", "P")), max_size=60)


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), max_size=20), st.integers(5, 120))
def test_no_line_is_wider_than_the_window_and_each_row_has_one(rows: list[tuple[str, str, str]], width: int) -> None:
    table = fitted((MODEL, SIZE, BASE), rows, width)
    assert len(table.lines) == len(rows) + 1
    assert all(cell_len(line) <= width for line in table.lines)
    shown = [heading for heading in ("model", "size", "base") if heading not in table.left_out]
    assert table.lines[0].split() == [shortened(heading, width, middle=False) for heading in shown]
    assert "model" in shown
    assert GAP not in table.lines[0].strip() or len(shown) > 1
