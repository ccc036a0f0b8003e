"""Every column that there can be goes through every file and into the summary."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import ModelResultFiles
from gpuherd.esd.results import read_model
from gpuherd.esd.schema import NOT_METRICS, LayerRow
from gpuherd.esd.summary import summarise
from gpuherd.esd.tails import tails
from gpuherd.esd.views import Origin, read_table

FURTHER: dict[str, Any] = {tail.name: True for tail in tails()}
EVERYTHING = AnalysisOptions(clip_xmax=True, bootstrap=5, mp_fit=True, randomize=True, farms=True, **FURTHER)


def full_row(name: str) -> LayerRow:
    """A row with a value in each column, of the type that the column declares."""
    values = {"int": 7, "float": 2.5, "str": "ok", "bool": True}
    cells: dict[str, Any] = {f.name: values[str(f.type).split(" | ")[0]] for f in fields(LayerRow)}
    return LayerRow(**cells | {"longname": name})


def test_every_column_of_every_option(tmp_path: Path) -> None:
    rows = [full_row("h.0.q"), full_row("h.1.q")]
    origin = Origin("org/a", None, "", EVERYTHING.convention_columns, "0.3.0")
    with ModelResultFiles(
        ESDDirectory(tmp_path), "org/a", ["h.0.q", "h.1.q"], evals_thresh=0.0, save_eigs=False
    ) as files:
        files.write(origin, rows, "tensor\n")
    text, typed = read_table(files.paths.stats), pq.read_table(files.paths.parquet).to_pylist()
    names = [f.name for f in fields(LayerRow)]
    assert [name for name in text[0] if name in names] == names
    for name in names:
        assert type(typed[0][name]) is type(getattr(rows[0], name)), name
        assert text[0][name] == str(getattr(rows[0], name))
    columns = summarise(read_model(files.paths.stats), files.paths.stats).columns()
    assert {f"{name}_mean" for name in names if name not in NOT_METRICS} <= columns.keys()
    assert all(columns[f"{name}_mean"] in (7, 2.5) for name in names if name not in NOT_METRICS)
