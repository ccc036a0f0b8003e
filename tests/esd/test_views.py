"""Result files: columns, exact values, protection against spreadsheets, and the summary's statistics."""

from __future__ import annotations

import math
import statistics
import unicodedata
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.results import ModelTable, read_model
from gpuherd.esd.schema import CONVENTION_COLUMNS, LINEAGE_COLUMNS, LayerRow, column
from gpuherd.esd.summary import summarise
from gpuherd.esd.views import (
    Origin,
    cell_text,
    csv_rows,
    has_fit,
    no_fit_reason,
    read_table,
    stats_rows,
    stored_text,
    table_text,
    unescape_cell,
)

ORIGIN = Origin("org/a", "org/b", "adapter", AnalysisOptions().convention_columns, "0.1.0")


def layer(name: str = "h.0.attn", status: str = "ok", alpha: float | None = 3.0, norm: float | None = 10.0) -> LayerRow:
    return LayerRow(
        longname=name,
        M=8,
        N=4,
        num_evals=4,
        matrix_rank=4,
        params=32,
        alpha=alpha,
        D=None if alpha is None else 0.1,
        xmin=None if alpha is None else 1.0,
        xmax=None if alpha is None else 5.0,
        spectral_norm=5.0,
        norm=norm,
        log_norm=1.0,
        log_spectral_norm=0.7,
        alpha_weighted=None if alpha is None else 0.7 * alpha,
        log_alpha_norm=None if alpha is None else 2.0,
        stable_rank=2.0,
        entropy=0.9,
        fit_status=status,
    )


def written(tmp_path: Path, *rows: LayerRow, origin: Origin = ORIGIN) -> list[dict[str, str]]:
    path = tmp_path / "stats.csv"
    path.write_text(table_text(stats_rows(origin, rows)), encoding="utf-8")
    return read_table(path)


def model(tmp_path: Path, *rows: LayerRow) -> ModelTable:
    written(tmp_path, *rows)
    return read_model(tmp_path / "stats.csv")


def test_columns_are_lineage_then_figures_then_convention() -> None:
    header = table_text(stats_rows(ORIGIN, [layer()])).splitlines()[0].split(",")
    always = [column.name for column in fields(LayerRow) if "option" not in column.metadata]
    assert header == [*LINEAGE_COLUMNS, *always, *CONVENTION_COLUMNS]


def test_columns_of_an_option_are_there_when_it_is_on() -> None:
    convention = AnalysisOptions(bootstrap=10, clip_xmax=True).convention_columns
    header = table_text(stats_rows(replace(ORIGIN, convention=convention), [layer()])).splitlines()[0].split(",")
    assert {"p_value", "num_fingers", "raw_alpha"} <= set(header)
    assert "tpl_alpha" not in header


def test_a_missing_value_is_an_empty_cell(tmp_path: Path) -> None:
    row = written(tmp_path, layer(status="too few eigenvalues", alpha=None))[0]
    assert row["alpha"] == ""
    assert row["norm"] == "10.0"


@given(st.floats(allow_nan=False))
def test_a_float_reads_back_bit_for_bit(value: float) -> None:
    assert float(cell_text(value)) == value
    assert math.copysign(1, float(cell_text(value))) == math.copysign(1, value)


# Control characters are written as escapes; tab, line feed and carriage return are text.
PLAIN_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], include_characters="\n\t\r"))
PLAIN_CELL = PLAIN_TEXT.filter(lambda text: "\r" not in text)


@given(PLAIN_TEXT)
def test_text_reads_back_and_is_no_formula(text: str) -> None:
    cell = cell_text(text)
    assert unescape_cell(cell) == text.replace("\r\n", "\n").replace("\r", "\n")
    if cell[:1] in ("=", "+", "-", "@", "\t"):
        float(cell)  # the only such text is a number


@given(st.text())
def test_no_cell_drives_a_terminal(text: str) -> None:
    cell = cell_text(text)
    assert not any(unicodedata.category(sign) in ("Cc", "Cs") and sign not in "\n\t" for sign in cell)
    assert cell_text("a\x1b[31m\x9bb") == r"a\x1b[31m\x9bb"


def test_numbers_in_extra_columns_stay_numbers() -> None:
    assert cell_text("-1.5") == "-1.5"
    assert cell_text(-1.5) == "-1.5"
    assert cell_text("=1+1") == "'=1+1"
    assert cell_text("\uff1d1+1") == "'\uff1d1+1"


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcd"), PLAIN_CELL),
        min_size=1,
    )
)
def test_a_table_reads_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    if not any(rows):
        return
    path = tmp_path_factory.mktemp("t") / "t.csv"
    path.write_bytes(table_text(rows).encode("utf-8"))
    names = list(dict.fromkeys(name for row in rows for name in row))
    assert read_table(path) == [{name: row.get(name, "") for name in names} for row in rows]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.none() | st.floats(allow_nan=False) | st.floats(1e-5, 1e-3) | st.floats(1e9, 1e17),
            st.none() | st.text(),
            st.none() | st.integers(-(2**63), 2**63 - 1),
            st.none() | st.booleans(),
        ),
        min_size=1,
    )
)
def test_columns_are_written_as_rows_are(rows: list[tuple[Any, ...]]) -> None:
    names, kinds = ("x", "name", "count", "flag"), ("float", "str", "int", "bool")
    texts = [tuple(stored_text(cell) if isinstance(cell, str) else cell for cell in row) for row in rows]
    columns = {name: column(kind, [row[at] for row in texts]) for at, (name, kind) in enumerate(zip(names, kinds))}  # noqa: B905
    written = "x,name,count,flag\n" + "".join(csv_rows(pa.table(columns)).to_pylist())
    assert written == table_text([dict(zip(names, row, strict=True)) for row in texts])


def test_the_same_rows_give_the_same_bytes() -> None:
    assert table_text(stats_rows(ORIGIN, [layer()])) == table_text(stats_rows(ORIGIN, [layer()]))


def test_summary_takes_layers_with_a_fit_only(tmp_path: Path) -> None:
    of = model(
        tmp_path,
        layer("a", alpha=2.0),
        layer("b", alpha=4.0),
        layer("c", status="all weights are zero", alpha=None, norm=None),
        layer("d", status="too few eigenvalues", alpha=None, norm=1000.0),
        layer("e", status="not analysed: embedding", alpha=None),
    )
    summary = replace(summarise(of, tmp_path), extra={"params": "7", "note": "x"})
    counts = [summary.figures[name] for name in ("layers", "layers_without_fit", "layers_skipped", "params")]
    assert counts == [2, 2, 1, 4 * 32]
    assert summary.figures["alpha_mean"] == 3.0
    assert summary.figures["alpha_std"] == statistics.stdev([2.0, 4.0])
    assert (summary.figures["alpha_min"], summary.figures["alpha_max"]) == (2.0, 4.0)
    assert summary.figures["norm_mean"] == 10.0
    columns = summary.columns()
    assert (columns["model_id"], columns["source_model"], columns["base_model_relation"]) == (
        "org/a",
        "org/b",
        "adapter",
    )
    assert (columns["params"], columns["list_params"], columns["note"]) == (128, "7", "x")
    assert columns["fix_fingers"] == "xmin_mid"
    assert (columns["alpha_median"], columns["layers_alpha_below_2"], columns["layers_alpha_above_6"]) == (3.0, 0, 0)
    assert columns["params_share"] is None


def test_summary_counts_layers_of_too_much_and_too_little_training(tmp_path: Path) -> None:
    of = model(tmp_path, *(layer(str(alpha), alpha=alpha) for alpha in (1.5, 1.9, 2.0, 6.0, 6.1)))
    columns = summarise(of, tmp_path, 0.75).columns()
    assert (columns["layers_alpha_below_2"], columns["layers_alpha_above_6"]) == (2, 1)
    assert (columns["alpha_median"], columns["params_share"]) == (2.0, 0.75)


def test_a_count_below_zero_is_a_count_too(tmp_path: Path) -> None:
    of = model(tmp_path, *(replace(layer(str(gap)), ERG_gap=gap) for gap in (-3, 5)))
    metrics = summarise(of, Path("a.csv")).figures
    assert (repr(metrics["ERG_gap_min"]), repr(metrics["ERG_gap_max"])) == ("-3", "5")


def test_one_layer_has_no_deviation(tmp_path: Path) -> None:
    metrics = summarise(model(tmp_path, layer()), tmp_path).figures
    assert metrics["alpha_std"] is None
    assert metrics["alpha_mean"] == metrics["alpha_min"] == metrics["alpha_max"] == 3.0


@given(st.lists(st.floats(-1e307, 1e307), min_size=2, max_size=20))
@example([5e-324, 5e-324])
def test_statistics_never_overflow(tmp_path_factory: pytest.TempPathFactory, norms: list[float]) -> None:
    of = model(tmp_path_factory.mktemp("s"), *(layer(norm=norm) for norm in norms))
    metrics = summarise(of, Path("a.csv")).figures
    mean, std = metrics["norm_mean"], metrics["norm_std"]
    assert mean is not None
    assert std is not None
    assert min(norms) - 1e-9 * abs(min(norms)) <= mean <= max(norms) + 1e-9 * abs(max(norms))
    assert std >= 0
    assert math.isfinite(std)


def test_a_model_without_any_fit_says_why() -> None:
    rows = [
        layer("a", status="all weights are zero", alpha=None),
        layer("e", status="not analysed: embedding", alpha=None),
    ]
    assert not has_fit(rows)
    assert no_fit_reason(rows) == "none of its 1 matrices has a valid fit; a: all weights are zero"
    assert "no weight matrix" in no_fit_reason(rows[1:])
    assert "no weight matrix" in no_fit_reason([])
