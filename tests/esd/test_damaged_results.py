"""Files of results with some bytes changed or cut off: read as they are, or refused by name, never another error."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.esd.old_spectra import old_arrays

from gpuherd.errors import BadModel
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import MODELS, parquet_bytes
from gpuherd.esd.remake import make_views
from gpuherd.esd.results import Unreadable, fragment_rows, read_tables, stored_spectra
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.spectrum_files import EigsWriter, read_eigs, read_spectra, sketch_of
from gpuherd.esd.views import Origin, about_text, alpha_matrix, hdf5_bytes, read_hdf5, stats_rows

ORIGIN = Origin("org/a", None, "", AnalysisOptions().convention_columns, "0.3.0")
ROWS = [
    LayerRow(longname=f"h.{index}.q", M=8, N=8, params=64, alpha=2.0, D=0.1, xmin=1.0, fit_status="ok")
    for index in range(5)
]
EVALS = [np.sort(np.random.default_rng(index).pareto(2.0, 300)) for index in range(5)]


def spectra() -> bytes:
    sketches = {index: sketch_of(evals, 1e-5) for index, evals in enumerate(EVALS)}
    return parquet_bytes(stats_rows(ORIGIN, ROWS), sketches)


def old_spectra() -> bytes:
    out = io.BytesIO()
    sketches = {row.longname: sketch_of(evals, 1e-5) for row, evals in zip(ROWS, EVALS, strict=True)}
    np.savez_compressed(out, **old_arrays("org/a", sketches))
    return out.getvalue()


def read_stored(path: Path) -> object:
    return stored_spectra(ESDDirectory(path.parent.parent), path.stem)


def matrix() -> bytes:
    return hdf5_bytes(about_text(ORIGIN.lineage), alpha_matrix((row.longname, row.alpha) for row in ROWS))


def stats() -> bytes:
    return parquet_bytes(stats_rows(ORIGIN, ROWS))


def eigs() -> bytes:
    file = io.BytesIO()
    writer = EigsWriter(file, {"model_id": "org/a"})
    for index, evals in enumerate(EVALS):
        writer.add(index, f"h.{index}.q", evals)
    writer.close()
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "read", "times"),
    [
        (spectra, read_stored, 300),
        (old_spectra, read_spectra, 300),
        (matrix, read_hdf5, 40),
        (stats, lambda path: list(fragment_rows(path, {path.stem})), 300),
        (eigs, lambda path: list(read_eigs(path)), 300),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, data: Callable[[], bytes], read: Callable[[Path], object], times: int
) -> None:
    whole, path, chance = data(), tmp_path / "stats" / "damaged.parquet", random.Random(1)
    path.parent.mkdir()
    refused = 0
    for turn in range(times):
        bytes_ = bytearray(whole)
        if turn % 5 == 0:
            del bytes_[chance.randrange(len(bytes_)) :]
        for _ in range(chance.choice((1, 3, 20)) if bytes_ else 0):
            bytes_[chance.randrange(len(bytes_))] = chance.randrange(256)
        path.write_bytes(bytes_)
        try:
            read(path)
        except BadModel as problem:
            assert str(path) in str(problem)
            refused += 1
    assert refused > times / 5


def test_a_text_without_an_end_is_refused(tmp_path: Path) -> None:
    """libhdf5 never comes back from free space of no size, and a time limit can't reach it there."""
    whole = bytearray(matrix())
    at = whole.index(b"GCOL") + 16
    while number := int.from_bytes(whole[at : at + 2], "little"):
        assert number < 100
        at += 16 + -(-int.from_bytes(whole[at + 8 : at + 16], "little") // 8) * 8
    whole[at + 8 : at + 16] = bytes(8)
    path = tmp_path / "damaged.h5"
    path.write_bytes(whole)
    with pytest.raises(BadModel, match=r"damaged\.h5 holds no matrix of alphas: its free space has no size"):
        read_hdf5(path)


Change = Callable[[pa.Table], pa.Table]


def listed(models: str) -> Change:
    return lambda table: table.replace_schema_metadata({**(table.schema.metadata or {}), MODELS: models.encode()})


def column_of(name: str, values: list[Any]) -> Change:
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values))


@pytest.mark.parametrize(
    "change",
    [
        column_of("model_id", [b"org/a"] * 5),
        column_of("M", [[8]] * 5),
        column_of("longname", ["h", None, "i", "j", "k"]),
        column_of("alpha", [{"a": 2.0}] * 5),
        listed('[["../../outside", 5]]'),
        listed('[["damaged", 50]]'),
        listed('[["damaged", "5"]]'),
        listed("5"),
    ],
)
def test_results_of_another_form_are_no_results_and_nothing_is_written_outside(tmp_path: Path, change: Change) -> None:
    directory = ESDDirectory(tmp_path / "run")
    directory.stats.mkdir(parents=True)
    path = directory.stats / "damaged.parquet"
    pq.write_table(change(pq.read_table(pa.BufferReader(stats()))), path)
    path.with_suffix(".csv").touch()
    os.utime(path.with_suffix(".csv"), ns=(path.stat().st_mtime_ns,) * 2)
    (found,) = read_tables(directory, directory.stats_files())
    assert isinstance(found, Unreadable)
    before = {each for each in tmp_path.rglob("*") if directory.root not in each.parents}
    made = make_views(directory)
    assert made["summary"].written == []
    assert before == {each for each in tmp_path.rglob("*") if directory.root not in each.parents}
