"""Reads results back: the models of a run from the data set, one model from its stats file; and how people name them.

A fragment of the data set (``stats/*.parquet``) speaks for a model while its stats CSV was last changed at the same
time: both were then written together. What was edited, replaced or copied by hand since, and what an older gpuherd has
written, is read from the CSV.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, MissingModel, UsageError, printable
from gpuherd.esd.conventions import as_text
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import MODELS, ModelPaths
from gpuherd.esd.row import NOT_METRICS, LayerRow
from gpuherd.esd.schema import CONVENTION_COLUMNS, LINEAGE_COLUMNS, kind_of_column
from gpuherd.esd.views import (
    FIT_OK,
    SKIPPED,
    alpha_matrix,
    first_row,
    read_table,
)
from gpuherd.options import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

    from gpuherd.esd.row import LayerRow
    from gpuherd.esd.spectrum_files import StoredSpectra
    from gpuherd.esd.views import StoredMatrix


logger = logging.getLogger(__name__)

# The figures of the fit, which are of no use without a valid one.
CORE = ("alpha", "D")


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows with typed values, None for no value. Raises FileNotFoundError, and BadModel for another file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.ParquetFile(path).read().to_pylist()
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as problem:
        raise BadModel(f"{path} is no Parquet file that can be read: {problem}") from None
    return rows


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One row of a stats file: what most readers want with its type, and all ``cells`` as text."""

    longname: str
    M: int
    N: int
    params: int
    num_evals: int | None
    alpha: float | None
    D: float | None
    fit_status: str
    cells: Mapping[str, str]

    @property
    def analysed(self) -> bool:
        """Whether it was looked at; a matrix can be left out on purpose."""
        return not self.fit_status.startswith(SKIPPED)

    @property
    def fitted(self) -> bool:
        """Whether its alpha is a valid one."""
        return self.fit_status == FIT_OK and self.alpha is not None


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One model's stats file: whose weights, by which convention (``conventions.as_text``), and its layers in order."""

    path: Path
    model_id: str
    source_model: str | None
    relation: str
    convention: Mapping[str, str]
    layers: tuple[StoredLayer, ...]

    def alphas(self) -> dict[str, float | None]:
        """Alpha by name of the matrix, None without a valid fit; matrices that were left out are not in it."""
        return {layer.longname: layer.alpha if layer.fitted else None for layer in self.layers if layer.analysed}


def text_tables(files: Sequence[bytes]) -> list[pa.Table | ValueError]:
    """CSV files as columns of text, an empty cell as "", a row that is too short filled with these; the error of a
    damaged file in its place. Files of one header are parsed at once."""
    alike: dict[bytes, list[int]] = {}
    bodies: list[bytes] = []
    for at, data in enumerate(files):
        header, _, body = data.removeprefix(codecs.BOM_UTF8).partition(b"\n")
        bodies.append(body if body.endswith(b"\n") or not body else body + b"\n")
        alike.setdefault(header, []).append(at)
    found: dict[int, pa.Table | ValueError] = {}
    for header, group in alike.items():
        counts = [bodies[at].count(b"\n") for at in group]
        table = _parsed(b"".join((header, b"\n", *(bodies[at] for at in group))))
        if table is not None and table.num_rows == sum(counts):
            starts = itertools.accumulate(counts, initial=0)
            found |= {at: table.slice(start, count) for at, start, count in zip(group, starts, counts, strict=False)}
        else:
            found |= {at: _parsed_by_python(files[at]) for at in group}
    return [found[at] for at in range(len(files))]


def _parsed(data: bytes) -> pa.Table | None:
    """A CSV file read by Arrow; None where Python might read it otherwise, or Arrow can't."""
    import pyarrow as pa
    import pyarrow.csv

    names = data.partition(b"\n")[0].decode("utf-8", "replace").split(",")
    if any(sign in data for sign in (b'"', b"\r", b"\0")) or len(set(names)) < len(names) or not all(names):
        return None
    options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    once = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(data) + 1)
    try:
        return pyarrow.csv.read_csv(pa.BufferReader(data), read_options=once, convert_options=options).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowKeyError):
        return None


def _parsed_by_python(data: bytes) -> pa.Table | ValueError:
    import pyarrow as pa

    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    except (ValueError, csv.Error) as problem:
        return ValueError(str(problem))
    names = [name for name in rows[0] if isinstance(name, str)] if rows else []
    return pa.table({name: pa.array([row[name] or "" for row in rows], pa.string()) for name in names})


def read_model(path: Path) -> StoredModel:
    """A model's stats file. Raises MissingModel when it is not there, BadModel when it is none."""
    try:
        rows = read_table(path)
    except FileNotFoundError:
        raise MissingModel(f"there is no stats file {path}") from None
    except (OSError, ValueError, csv.Error) as problem:
        raise BadModel(f"{path} can't be read as a stats file: {problem}") from None
    if not rows:
        raise BadModel(f"{path} is no stats file: it has no rows")
    try:
        return StoredModel(
            path=path,
            model_id=rows[0]["model_id"],
            source_model=rows[0]["source_model"] or None,
            relation=rows[0]["base_model_relation"],
            convention=as_text(rows[0]),
            layers=tuple(_layer(row) for row in rows),
        )
    except KeyError as missing:
        raise BadModel(f"{path} is no stats file of gpuherd: it has no column {missing}") from None
    except ValueError as problem:
        raise BadModel(f"{path} is no stats file of gpuherd: {problem}") from None


# ---- many models, as columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ModelTable:
    """The results of one model as columns.

    Attributes:
        model_id: as the model list has it.
        source_model: what it comes from; None where nobody said, or only that it comes from itself.
        relation: ``base``, ``finetune``, ... or "" where nobody said.
        names: the matrices, in the order of the file.
        rows, columns: M and N of each. params: weights of each.
        status: ``fit_status`` of each.
        figures: every column of numbers, a float64 for each matrix; NaN where there is no value.
        present: the names of those columns that hold any finite number, in order.
        convention: how it was analysed.
        stem: of its files in the folders of the run.
        notes: every column of words but ``fit_status``, like ``tpl_status``; a text for each matrix.
        covered: the share of the checkpoint's weights that are in matrices with a valid fit, 0 to 1; None where no
            coverage table tells it.
    """

    model_id: str
    source_model: str | None
    relation: str
    names: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    params: tuple[int, ...]
    status: tuple[str, ...]
    figures: Mapping[str, Floats]
    present: tuple[str, ...]
    convention: Mapping[str, str]
    stem: str
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    covered: float | None = None

    @property
    def alpha(self) -> Floats:
        """Alpha of each matrix, NaN without a valid fit."""
        return self.figures["alpha"]

    @property
    def fitted(self) -> int:
        """How many matrices have a valid fit."""
        return self.status.count(FIT_OK)

    @property
    def skipped(self) -> int:
        """How many were not analysed, on purpose."""
        return sum(self.status.count(status) for status in {*self.status} if status.startswith(SKIPPED))


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A stats file that can't be read, by its stem, and why."""

    stem: str
    problem: str


def read_tables(directory: ESDDirectory, stats: Iterable[Path]) -> Iterator[ModelTable | Unreadable]:
    """The models of these stats files, in any order: those that a fragment of the data set speaks for from there, the
    others from the CSV."""
    left = {path.stem: path for path in stats}
    same: dict[Any, Any] = {}
    written = {stem: path.stat().st_mtime_ns for stem, path in left.items()}
    for fragment in sorted(directory.stats.glob("*.parquet")):
        if fragment.name.startswith("."):
            continue
        for table in _read_fragment(fragment, written, same):
            if left.pop(table.stem, None) is not None:
                yield table
    for path in left.values():
        try:
            yield table_of(read_model(path))
        except (BadModel, MissingModel) as problem:
            yield Unreadable(path.stem, str(problem).replace(str(path), f"stats/{path.name}"))


def table_of(model: StoredModel) -> ModelTable:
    """One model's stats file as columns."""
    import numpy as np

    rows = [layer.cells for layer in model.layers]
    first = rows[0]
    figures = _figures_of_text(rows)
    return ModelTable(
        model_id=model.model_id,
        source_model=None if model.source_model == model.model_id else model.source_model,
        relation=model.relation,
        names=tuple(layer.longname for layer in model.layers),
        rows=tuple(layer.M for layer in model.layers),
        columns=tuple(layer.N for layer in model.layers),
        params=tuple(layer.params for layer in model.layers),
        status=tuple(layer.fit_status for layer in model.layers),
        figures=figures,
        present=tuple(name for name, values in figures.items() if np.isfinite(values).any()),
        convention={name: first[name] for name in CONVENTION_COLUMNS if name in first},
        stem=model.path.stem,
        notes={
            name: tuple(row[name] for row in rows)
            for name in first
            if name.endswith("_status") and name != "fit_status"
        },
    )


def _figures_of_text(rows: Sequence[Mapping[str, str]]) -> dict[str, Floats]:
    """Every column that holds nothing but finite numbers and empty cells. Alpha and D only where the fit is valid."""
    import numpy as np

    valid = np.array([row["fit_status"] == FIT_OK for row in rows])
    outside = NOT_METRICS.union(LINEAGE_COLUMNS, CONVENTION_COLUMNS)
    figures: dict[str, Floats] = {}
    for name in rows[0]:
        if name in outside:
            continue
        try:
            values = np.array([float(row[name] or "nan") for row in rows])
        except ValueError:
            continue  # a column of words
        values[~np.isfinite(values)] = np.nan
        figures[name] = values
    for name in CORE:
        figures[name] = np.where(valid, figures.get(name, np.full(len(rows), np.nan)), np.nan)
    return figures


def _read_fragment(path: Path, written: Mapping[str, int], same: dict[Any, Any]) -> Iterator[ModelTable]:
    """The models of a fragment whose stats files (by stem: when they were last changed) were written with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        changed = path.stat().st_mtime_ns
        with pq.ParquetFile(path) as file:
            listed = (file.metadata.metadata or {}).get(MODELS)
            models = [(path.stem, file.metadata.num_rows)] if listed is None else json.loads(listed)
            if not any(written.get(stem) == changed for stem, _ in models):
                return
            coming = iter(models)
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group)
                inside, count = [], 0
                while count < rows.num_rows:
                    inside.append(next(coming))
                    count += inside[-1][1]
                for table in _tables_of(rows, inside, _Source(path, group), same):
                    if written.get(table.stem) == changed:
                        yield table
    except (OSError, ValueError, KeyError, StopIteration, pa.ArrowException) as problem:
        logger.warning("%s can't be read, its models are read from their CSV files: %s", path, problem)


@dataclass(frozen=True, slots=True)
class _Source:
    """A row group of a fragment: figures are read from there again when somebody looks at them."""

    path: Path
    group: int


@lru_cache(maxsize=1)
def _rows_of(source: _Source) -> pa.Table:
    import pyarrow.parquet as pq

    with pq.ParquetFile(source.path) as file:
        return file.read_row_group(source.group)


class _Figures(Mapping[str, "Floats"]):
    """The figures of a model: alpha and D in memory, the others on the disk."""

    def __init__(self, core: Mapping[str, Floats], names: tuple[str, ...], source: _Source, start: int):
        self._core, self._names, self._source, self._start = core, names, source, start

    def __getitem__(self, name: str) -> Floats:
        if name in self._core:
            return self._core[name]
        if name not in self._names:
            raise KeyError(name)
        return _floats(_rows_of(self._source)[name].slice(self._start, len(self._core["alpha"])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _tables_of(
    rows: pa.Table, models: Sequence[tuple[str, int]], source: _Source, same: dict[Any, Any]
) -> Iterator[ModelTable]:
    """The models of a row group: of each its stem and its number of rows. ``same`` keeps one of equal tuples."""
    import numpy as np

    bounds = np.cumsum([0, *(count for _, count in models)]).tolist()
    names = tuple(each.name for each in fields(LayerRow) if each.name in rows.column_names)
    numbers = tuple(name for name in names if name not in NOT_METRICS and kind_of_column(name) != "str")
    whose = rows.select([*LINEAGE_COLUMNS, *(name for name in CONVENTION_COLUMNS if name in rows.column_names)])
    about = whose.take(bounds[:-1]).to_pylist()
    status = np.array(rows["fit_status"].combine_chunks().to_numpy(zero_copy_only=False) == FIT_OK)
    core = {name: np.where(status, _floats(rows[name]), np.nan) for name in CORE}
    present: list[list[str]] = [[] for _ in models]
    for name in numbers:
        if rows[name].null_count == rows.num_rows:
            continue
        finite = np.isfinite(core[name] if name in core else _floats(rows[name]))
        for number in np.flatnonzero(np.logical_or.reduceat(finite, bounds[:-1])).tolist():
            present[number].append(name)
    texts = {name: _texts(rows[name]) for name in names if kind_of_column(name) == "str"}
    counts = {name: rows[name].to_numpy() for name in ("M", "N", "params")}

    def part(values: Any, at: int) -> Any:
        found = tuple(values[bounds[at] : bounds[at + 1]])
        return same.setdefault(found, found)

    for at, (stem, _) in enumerate(models):
        lineage = [about[at].pop(name) for name in LINEAGE_COLUMNS]
        convention = {name: "" if value is None else str(value) for name, value in about[at].items()}
        own = {name: values[bounds[at] : bounds[at + 1]] for name, values in core.items()}
        yield ModelTable(
            model_id=lineage[0],
            source_model=None if lineage[1] in ("", lineage[0]) else lineage[1],
            relation=lineage[2] or "",
            names=part(texts["longname"], at),
            rows=same.setdefault(key := tuple(counts["M"][bounds[at] : bounds[at + 1]].tolist()), key),
            columns=same.setdefault(key := tuple(counts["N"][bounds[at] : bounds[at + 1]].tolist()), key),
            params=same.setdefault(key := tuple(counts["params"][bounds[at] : bounds[at + 1]].tolist()), key),
            status=part(texts["fit_status"], at),
            figures=_Figures(own, numbers, source, bounds[at]),
            present=same.setdefault(key := tuple(present[at]), key),
            convention=same.setdefault(key := tuple(convention.items()), convention),
            stem=stem,
            notes={name: part(values, at) for name, values in texts.items() if name not in ("longname", "fit_status")},
        )


def _texts(column: pa.ChunkedArray) -> list[str]:
    """A column of text, "" for null; equal texts are one object."""
    import pyarrow.compute as pc

    coded = pc.fill_null(column, "").combine_chunks().dictionary_encode()
    values = coded.dictionary.to_pylist()
    return [values[code] for code in coded.indices.to_pylist()]


def _floats(column: pa.ChunkedArray) -> Floats:
    """A column of numbers as float64, NaN for what is null or not finite."""
    import numpy as np

    values = np.array(column.to_numpy(), np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def find(words: str) -> list[Path]:
    """The stats files that ``words`` name: a file, ``RUN:model``, or ``RUN`` for all models of its folder.

    Raises:
        UsageError: nothing is there.
        MissingModel: the run has no such model, or several.
    """
    path = Path(words)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _some(ESDDirectory(path))
    folder, colon, model = words.rpartition(":")
    while colon and not Path(folder).is_dir():
        folder, colon, rest = folder.rpartition(":")
        model = f"{rest}:{model}"
    if not colon:
        raise UsageError(f"{words!r} is no stats file, no folder of a run and no RUN:model")
    return [model_in(ESDDirectory(folder), model)]


def model_in(directory: ESDDirectory, model: str | None) -> Path:
    """The stats file of one model of a run: of this id; else of this file name; else the only one whose id ends in it
    behind a slash (a folder on this disk); else the only one whose id contains it. Without a name, of the only model.

    Raises:
        UsageError: there are no results here, or several and no name was given.
        MissingModel: no model matches, or several do; with the nearest ids.
    """
    found = _some(directory)
    if model is None and len(found) == 1:
        return found[0]
    if model is None:
        raise UsageError(f"{directory.root} has {len(found)} models: say which by --model, for example {_ids(found)}")
    for stem in (directory.stats_file(model).stem, model):
        exact = directory.stats / f"{stem}.csv"
        if exact in found:
            return exact
    ids = {path: _id_of(path) for path in found}
    ending = [path for path in found if ids[path].rstrip("/").rpartition("/")[2] == model]
    matching = ending or [path for path in found if model in ids[path]]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise MissingModel(f"several models of {directory.root} match {model!r}: {_ids(matching)}")
    hint = did_you_mean(model, ids.values(), f"for example {_ids(found)}", cutoff=0.4, show=printable)
    raise MissingModel(f"there is no model {model!r} in {directory.root}{hint}")


def _some(directory: ESDDirectory) -> list[Path]:
    """The stats files of a folder, of which there must be some."""
    found = directory.stats_files()
    if not found:
        raise UsageError(f"there are no results in {directory.root} (no stats/*.csv); name the folder of an esd run")
    return found


def _id_of(path: Path) -> str:
    """The model's id as it stands in its stats file; made of the file's name where that can't be read."""
    try:
        return first_row(path)["model_id"]
    except (OSError, ValueError, KeyError, csv.Error):
        return path.stem.replace("--", "/")


def _ids(paths: Sequence[Path]) -> str:
    """A few of their models, as words for people."""
    return ", ".join(printable(_id_of(path)) for path in paths[:4]) + (", …" if len(paths) > 4 else "")


def _layer(row: Mapping[str, str]) -> StoredLayer:
    return StoredLayer(
        longname=row["longname"],
        M=int(row["M"]),
        N=int(row["N"]),
        params=int(row["params"]),
        num_evals=int(row["num_evals"]) if row["num_evals"] else None,
        alpha=_figure(row["alpha"]),
        D=_figure(row["D"]),
        fit_status=row["fit_status"],
        cells=row,
    )


def _figure(text: str) -> float | None:
    value = float(text) if text else None
    return value if value is not None and math.isfinite(value) else None


def read_alphas(directory: ESDDirectory, model_id: str) -> StoredMatrix:
    """A model's alphas as a table of layers x modules: from its HDF5 file, else (imported results) made again of its
    rows. Raises FileNotFoundError, BadModel."""
    from gpuherd.esd.views import ABOUT_MATRIX, StoredMatrix, read_hdf5

    paths = ModelPaths(directory, model_id)
    if paths.hdf5.exists() or not paths.stats.exists():
        return read_hdf5(paths.hdf5)
    model = read_model(paths.stats)
    first = model.layers[0].cells
    about = {ABOUT_MATRIX.get(name, name): first[name] for name in (*LINEAGE_COLUMNS, *CONVENTION_COLUMNS)}
    return StoredMatrix(alpha_matrix((layer.longname, layer.alpha) for layer in model.layers), about)


def read_sketches(directory: ESDDirectory, model_id: str) -> StoredSpectra:
    """A model's spectra in a hundred points each. Raises FileNotFoundError, BadModel."""
    from gpuherd.esd.spectrum_files import read_spectra

    return read_spectra(ModelPaths(directory, model_id).spectra)
