"""Reads results back: models of a run, each from the data set or from its stats file; and how people name them.

A fragment of the data set (``stats/*.parquet``) speaks for a model while its stats CSV was last changed at the same
time: both were then written together. What was edited, replaced or copied by hand since, and what an older gpuherd has
written, is read from the CSV.
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel, MissingModel, UsageError, printable
from gpuherd.esd.config import CONVENTION
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.model_files import MODELS, ModelPaths
from gpuherd.esd.schema import (
    CONVENTION_COLUMNS,
    LINEAGE_COLUMNS,
    NOT_METRICS,
    SPECTRUM,
    column,
    is_declared,
    kind_of_column,
)
from gpuherd.esd.views import (
    FIT_OK,
    SKIPPED,
    StoredMatrix,
    about_text,
    alpha_matrix,
    finite_or_none,
    first_row,
    read_hdf5,
    read_table,
    unescape_cell,
)
from gpuherd.options import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

    from gpuherd.esd.spectrum_files import StoredSpectra
    from gpuherd.esd.views import AlphaMatrix

    Floats = NDArray[np.float64]


logger = logging.getLogger(__name__)

# The figures of the fit, which are of no use without a valid one.
CORE = ("alpha", "D")


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One matrix of a model. ``alpha`` is None without a valid fit."""

    longname: str
    params: int
    num_evals: int | None
    alpha: float | None
    fit_status: str

    @property
    def analysed(self) -> bool:
        """Whether it was analysed; a matrix can be left out on purpose."""
        return not self.fit_status.startswith(SKIPPED)

    @property
    def fitted(self) -> bool:
        """Whether its alpha is a valid one."""
        return self.fit_status == FIT_OK and self.alpha is not None


def parsed_csv(data: bytes) -> pa.Table | None:
    """The cells of a CSV file as text, read by Arrow; None where Python might read it otherwise, or Arrow can't."""
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


def numbers_of(cells: pa.Array) -> Floats:
    """Cells of text as float64, NaN where one is empty, NaN or infinite. Raises ValueError for another word."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        known = pc.cast(pc.if_else(pc.equal(cells, ""), pa.scalar(None, pa.string()), cells), pa.float64())
        numbers = np.array(known.to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid:  # Python takes more for a number: " 1", "1_000"
        numbers = np.array([float(cell) if cell else math.nan for cell in cells.to_pylist()])
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class ModelTable:
    """The results of one model as columns.

    Attributes:
        model_id: as the model list has it.
        source_text: what it comes from, as it stands in the stats file; "" where it was not given.
        relation: ``base``, ``finetune``, ... or "" where it was not given.
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
    source_text: str
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
    has_spectrum: bool = False

    @property
    def source_model(self) -> str | None:
        """What it comes from; None where it was not given, or names the model itself."""
        return None if self.source_text in ("", self.model_id) else self.source_text

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

    @property
    def layers(self) -> tuple[StoredLayer, ...]:
        """A record for each matrix, in order."""
        counts = self.figures.get("num_evals")
        evals = [math.nan] * len(self.names) if counts is None else counts.tolist()
        each = zip(self.named_alphas(), self.params, evals, self.status, strict=True)
        return tuple(
            StoredLayer(name, params, None if math.isnan(count) else int(count), alpha, status)
            for (name, alpha), params, count, status in each
        )

    def named_alphas(self) -> list[tuple[str, float | None]]:
        """The name of each matrix with its alpha, None without a valid fit."""
        return list(zip(self.names, map(finite_or_none, self.alpha.tolist()), strict=True))

    def alphas(self) -> dict[str, float | None]:
        """Alpha by name of the matrix, None without a valid fit; matrices that were left out are not in it."""
        return {layer.longname: layer.alpha for layer in self.layers if layer.analysed}

    @property
    def about(self) -> dict[str, str]:
        """Lineage and convention as text, by the names of their columns."""
        lineage = zip(LINEAGE_COLUMNS, (self.model_id, self.source_text, self.relation), strict=True)
        return dict(lineage) | dict(self.convention)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A stats file that can't be read, and why."""

    path: Path
    problem: str


def read_tables(directory: ESDDirectory, stats: Iterable[Path]) -> Iterator[ModelTable | Unreadable]:
    """The models of these stats files, in any order: those that a fragment of the data set speaks for from there, the
    others from the CSV."""
    left = {path.stem: path for path in stats}
    same: dict[Any, Any] = {}
    written: dict[str, int] = {}
    for stem, path in left.items():
        with suppress(OSError):  # gone meanwhile: the CSV's reader says so
            written[stem] = path.stat().st_mtime_ns
    for fragment in _fragments(left.values(), directory.imported):
        for table in _read_fragment(fragment, written, same):
            if left.pop(table.stem, None) is not None:
                yield table
    for path in left.values():
        try:
            yield _table_of_file(path)
        except (BadModel, MissingModel) as problem:
            yield Unreadable(path, str(problem))


def read_model(path: Path) -> ModelTable:
    """The model of a stats file. Raises MissingModel when it is not there, BadModel when it is none."""
    (model,) = read_models([path])
    return model


def read_models(paths: Sequence[Path]) -> list[ModelTable]:
    """The models of stats files of one folder, in order. Raises as ``read_model``."""
    found: dict[Path, ModelTable] = {}
    for path in paths[:1]:
        for table in read_tables(ESDDirectory(path.parent.parent), paths):
            if isinstance(table, Unreadable):
                raise (BadModel if table.path.exists() else MissingModel)(table.problem)
            found[path.with_name(f"{table.stem}{path.suffix}")] = table
    return [found[path] for path in paths]


def fragments(directory: ESDDirectory) -> list[Path]:
    """The files of the data set, by name."""
    return sorted(path for path in directory.stats.glob("*.parquet") if not path.name.startswith("."))


def _fragments(stats: Iterable[Path], imported: Path) -> list[Path]:
    """The files of the data set in which the models of these stats files can be."""
    own = (path.with_suffix(".parquet") for path in stats)
    return [path for path in dict.fromkeys((*own, imported)) if path.is_file()]


# What a stats file has at least.
_NEEDED = (*LINEAGE_COLUMNS, "longname", "M", "N", "params", "num_evals", *CORE, "fit_status")


def _table_of_file(path: Path) -> ModelTable:
    """The model of a stats file, from its text. Raises MissingModel, BadModel."""
    try:
        cells = _cells_of(path)
    except FileNotFoundError:
        raise MissingModel(f"there is no stats file {path}") from None
    except (OSError, ValueError, csv.Error) as problem:
        raise BadModel(f"{path} can't be read as a stats file: {problem}") from None
    if not cells.num_rows:
        raise BadModel(f"{path} is no stats file: it has no rows")
    missing = next((name for name in _NEEDED if name not in cells.column_names), None)
    if missing is not None:
        raise BadModel(f"{path} is no stats file of gpuherd: it has no column {missing!r}")
    try:
        return table_of_rows(path.stem, _typed(cells))
    except ValueError as problem:
        raise BadModel(f"{path} is no stats file of gpuherd: {problem}") from None


def _cells_of(path: Path) -> pa.Table:
    """The columns of a stats file as text, protection taken off. Raises OSError, ValueError, csv.Error."""
    import pyarrow as pa
    import pyarrow.compute as pc

    data = path.read_bytes()
    table = parsed_csv(data)
    if table is None or table.num_rows != data.count(b"\n", 0, -1):
        rows = read_table(path)
        names = list(rows[0]) if rows else []
        return pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in names})
    columns = [
        pc.if_else(pc.starts_with(cells, "'"), pc.utf8_slice_codeunits(cells, 1), cells).combine_chunks()
        for cells in table.columns
    ]
    return pa.table(columns, names=[unescape_cell(name) for name in table.column_names])


def _typed(cells: pa.Table) -> pa.Table:
    """The columns of a stats file with figures as numbers, NaN where there is none; other columns of words are left
    out. Raises ValueError for words in a column that is one of numbers by the schema."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns: dict[str, Any] = {}
    texts = {*LINEAGE_COLUMNS, *CONVENTION_COLUMNS}
    for name in cells.column_names:
        if name in ("M", "N", "params"):
            columns[name] = pc.cast(cells[name], pa.int64())
        elif name in texts or name.endswith("_status") or (is_declared(name) and kind_of_column(name) == "str"):
            columns[name] = cells[name]
        else:
            try:
                numbers = numbers_of(cells[name].combine_chunks())
                columns[name] = pa.Array.from_buffers(pa.float64(), len(numbers), [None, pa.py_buffer(numbers)])
            except ValueError:
                if is_declared(name):
                    raise
    return pa.table(columns)


def _parts(file: pq.ParquetFile, path: Path) -> Iterator[tuple[_Source, list[tuple[str, int]]]]:
    """The row groups of a fragment, each with the models in it: of each its stem and its number of rows. Raises
    ValueError for a file of other columns, or one whose list of models is not that of its rows."""
    _check_columns(file.schema_arrow)
    coming = iter(_models_in(file, path))
    version = path.stat().st_mtime_ns
    for group in range(file.num_row_groups):
        inside, count, rows = [], 0, file.metadata.row_group(group).num_rows
        while count < rows:
            inside.append(next(coming))
            count += inside[-1][1]
        if count != rows:
            raise ValueError("its list of models is damaged")
        yield _Source(path, group, version), inside


def _check_columns(schema: pa.Schema) -> None:
    """Raises ValueError where a column that is needed is not there, or one is not of its type."""
    import pyarrow as pa

    missing = next((name for name in _NEEDED if name not in schema.names), None)
    if missing is not None:
        raise ValueError(f"it has no column {missing!r}")
    of_kind = {
        "str": pa.types.is_string,
        "int": pa.types.is_integer,
        "float": lambda kind: pa.types.is_floating(kind) or pa.types.is_integer(kind),
    }
    for each in schema:
        kind = kind_of_column(each.name) if is_declared(each.name) else "str"
        known = each.name in LINEAGE_COLUMNS or (is_declared(each.name) and each.name not in CONVENTION_COLUMNS)
        if known and not of_kind[kind](each.type):
            raise ValueError(f"its column {each.name!r} holds {each.type}")


def _models_in(file: pq.ParquetFile, path: Path) -> list[tuple[str, int]]:
    """The models of a fragment: of each the stem of its files and its number of rows. Raises ValueError."""
    listed = (file.metadata.metadata or {}).get(MODELS)
    if listed is None:
        return [(path.stem, file.metadata.num_rows)]
    models = json.loads(listed)
    # Stems come from a file that somebody may have sent: views are written under them.
    if not isinstance(models, list) or not all(map(_is_model, models)):
        raise ValueError("its list of models is damaged")
    return [(stem, count) for stem, count in models]


def _is_model(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str) or type(entry[1]) is not int:
        return False
    return bool(entry[0]) and Path(entry[0]).name == entry[0] and "\0" not in entry[0] and entry[1] > 0


def _read_fragment(path: Path, written: Mapping[str, int], same: dict[Any, Any]) -> Iterator[ModelTable]:
    """The models of a fragment whose stats files (by stem: when they were last changed) were written with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        changed = path.stat().st_mtime_ns
        with pq.ParquetFile(path) as file:
            if not any(written.get(stem) == changed for stem, _ in _models_in(file, path)):
                return
            spectra = SPECTRUM in file.schema_arrow.names
            for source, inside in _parts(file, path):
                for table in _tables_of(_rows_of(source, file), inside, source, same, spectra):
                    if written.get(table.stem) == changed:
                        yield table
    except (OSError, ValueError, KeyError, StopIteration, RuntimeError, pa.ArrowException) as problem:
        logger.warning("%s can't be read, its models are read from their CSV files: %s", path, problem)


def fragment_rows(path: Path, stems: Collection[str]) -> Iterator[tuple[str, pa.Table]]:
    """The rows of these models in a fragment, with all columns but that of spectra. Raises BadModel."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for source, inside in _parts(file, path):
                start = 0
                for stem, count in inside:
                    if stem in stems:
                        yield stem, _rows_of(source, file).slice(start, count)
                    start += count
    except (OSError, ValueError, KeyError, StopIteration, RuntimeError, pa.ArrowException) as problem:
        raise BadModel(f"{path} can't be read: {problem}") from None


def table_of_rows(stem: str, rows: pa.Table) -> ModelTable:
    """A model of its rows in a fragment."""
    (model,) = _tables_of(rows, [(stem, rows.num_rows)], None, {})
    return model


def models_of_fragment(path: Path) -> list[str]:
    """The stems of the models in a fragment; none where it can't be read, with a warning in the log."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return [stem for stem, _ in _models_in(file, path)]
    except (OSError, ValueError, pa.ArrowException) as problem:
        logger.warning("%s can't be read: %s", path, problem)
        return []


@dataclass(frozen=True, slots=True)
class _Source:
    """A row group of a fragment, as it was last written: figures are read from there again when they are needed."""

    path: Path
    group: int
    version: int


_latest: dict[_Source, pa.Table] = {}  # the row group that was read last: a model's figures are mostly used at once


def _rows_of(source: _Source, file: pq.ParquetFile | None = None) -> pa.Table:
    """The rows of a row group, without spectra. ``file``: the fragment, where it is open already."""
    import pyarrow.parquet as pq

    rows = _latest.get(source)
    if rows is None:
        with nullcontext(file) if file is not None else pq.ParquetFile(source.path) as opened:
            names = [name for name in opened.schema_arrow.names if name != SPECTRUM]
            rows = opened.read_row_group(source.group, columns=names, use_threads=False)
        _latest.clear()
        _latest[source] = rows
    return rows


class _Figures(Mapping[str, "Floats"]):
    """The figures of a model: alpha and D in memory, the others on the disk, or in ``rows`` where that is a table."""

    def __init__(self, core: Mapping[str, Floats], names: tuple[str, ...], rows: _Source | pa.Table, start: int):
        self._core, self._names, self._rows, self._start = core, names, rows, start

    def __getitem__(self, name: str) -> Floats:
        if name in self._core:
            return self._core[name]
        if name not in self._names:
            raise KeyError(name)
        rows = _rows_of(self._rows) if isinstance(self._rows, _Source) else self._rows
        return _floats(rows[name].slice(self._start, len(self._core["alpha"])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _tables_of(
    rows: pa.Table,
    models: Sequence[tuple[str, int]],
    source: _Source | None,
    same: dict[Any, Any],
    has_spectrum: bool = False,
) -> Iterator[ModelTable]:
    """The models of a row group: of each its stem and its number of rows.

    Args:
        source: from where figures can be read again; None to keep ``rows`` in memory.
        same: keeps one of equal tuples.
        has_spectrum: whether the fragment has a column of spectra.
    """
    import numpy as np
    import pyarrow as pa

    bounds = np.cumsum([0, *(count for _, count in models)]).tolist()
    whose = [name for name in rows.column_names if name in (*LINEAGE_COLUMNS, *CONVENTION_COLUMNS)]
    about = rows.select(whose).take(column("int", bounds[:-1])).to_pylist()
    for name in ("model_id", "longname", "M", "N", "params"):
        if rows[name].null_count:
            raise ValueError(f"a row has no {name}")
    figures = {
        each.name: pa.types.is_string(each.type)
        for each in rows.schema
        if each.name not in whose and any(is_kind(each.type) for is_kind in _kinds())
    }
    numbers = tuple(name for name, is_text in figures.items() if not is_text and name not in NOT_METRICS)
    status = np.array(rows["fit_status"].combine_chunks().to_numpy(zero_copy_only=False) == FIT_OK)
    core = {name: np.where(status, _floats(rows[name]), np.nan) for name in CORE}
    present: list[list[str]] = [[] for _ in models]
    for name in numbers:
        if rows[name].null_count == rows.num_rows:
            continue
        finite = np.isfinite(core[name] if name in core else _floats(rows[name]))
        for number in np.flatnonzero(np.logical_or.reduceat(finite, bounds[:-1])).tolist():
            present[number].append(name)
    texts = {name: _texts(rows[name]) for name, is_text in figures.items() if is_text}
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
            source_text=lineage[1] or "",
            relation=lineage[2] or "",
            names=part(texts["longname"], at),
            rows=same.setdefault(key := tuple(counts["M"][bounds[at] : bounds[at + 1]].tolist()), key),
            columns=same.setdefault(key := tuple(counts["N"][bounds[at] : bounds[at + 1]].tolist()), key),
            params=same.setdefault(key := tuple(counts["params"][bounds[at] : bounds[at + 1]].tolist()), key),
            status=part(texts["fit_status"], at),
            figures=_Figures(own, numbers, rows if source is None else source, bounds[at]),
            present=same.setdefault(key := tuple(present[at]), key),
            convention=same.setdefault(key := tuple(convention.items()), convention),
            stem=stem,
            notes={name: part(values, at) for name, values in texts.items() if name not in ("longname", "fit_status")},
            has_spectrum=has_spectrum,
        )


def _kinds() -> tuple[Callable[[pa.DataType], bool], ...]:
    """Whether a column holds text, or numbers; columns of anything else are no figures."""
    import pyarrow as pa

    return pa.types.is_string, pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean


def _texts(cells: pa.ChunkedArray) -> list[str]:
    """A column of text, "" for null; equal texts are one object."""
    import pyarrow.compute as pc

    coded = pc.fill_null(cells, "").combine_chunks().dictionary_encode()
    values = coded.dictionary.to_pylist()
    return [values[code] for code in coded.indices.to_pylist()]


def _floats(numbers: pa.ChunkedArray) -> Floats:
    """A column of numbers as float64, NaN for what is null or not finite."""
    import numpy as np

    values = np.array(numbers.to_numpy(), np.float64)
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


def read_alphas(directory: ESDDirectory, model_id: str) -> StoredMatrix:
    """A model's alphas as a table of layers x modules: from its HDF5 file, else (imported results) made again of its
    rows. Raises FileNotFoundError, BadModel."""
    paths = ModelPaths(directory, model_id)
    if paths.hdf5.exists() or not paths.stats.exists():
        return read_hdf5(paths.hdf5)
    model = read_model(paths.stats)
    return StoredMatrix(matrix_of(model), about_text(model.about))


def matrix_of(model: ModelTable) -> AlphaMatrix:
    """A model's alphas as a table of layers x modules."""
    return alpha_matrix(model.named_alphas())


def read_sketches(directory: ESDDirectory, model_id: str) -> StoredSpectra:
    """A model's spectra in a hundred points each. Raises FileNotFoundError, BadModel."""
    return stored_spectra(directory, ModelPaths(directory, model_id).stats.stem)


def has_spectra(directory: ESDDirectory, stem: str) -> bool:
    """Whether spectra are stored of the model whose files have this stem."""
    return _has_column_of_spectra(directory, stem) or (directory.spectra / f"{stem}.npz").exists()


def stored_spectra(directory: ESDDirectory, stem: str) -> StoredSpectra:
    """The spectra of the model whose files have this stem: from its fragment of the data set, else from the file of an
    earlier version. Raises FileNotFoundError, BadModel."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gpuherd.esd.spectrum_files import ABOUT_SPECTRA, read_spectra, spectra_of

    old, path = directory.spectra / f"{stem}.npz", directory.stats / f"{stem}.parquet"
    if old.exists() and not _has_column_of_spectra(directory, stem):
        return read_spectra(old)
    try:
        with pq.ParquetFile(path) as file:
            if SPECTRUM not in file.schema_arrow.names:
                raise FileNotFoundError(f"{path} has no spectra")
            names = [name for name in (*ABOUT_SPECTRA, *CONVENTION) if name in file.schema_arrow.names]
            return spectra_of(file.read(names, use_threads=False))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, IndexError, RuntimeError, pa.ArrowException) as problem:
        raise BadModel(f"{path} has no spectra that can be read: {problem}") from None


def _has_column_of_spectra(directory: ESDDirectory, stem: str) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = directory.stats / f"{stem}.parquet"
    if path == directory.imported or not path.exists():
        return False
    try:
        return SPECTRUM in pq.read_schema(path).names
    except (OSError, ValueError, pa.ArrowException):
        return False
