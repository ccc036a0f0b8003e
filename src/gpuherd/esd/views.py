"""The forms in which results are written: CSV text, and a model's alphas as a table of layers x modules in HDF5.

Knows columns and how a value is written: floats so that they read back bit for bit, no value as an empty cell, so that
a second run of the same analysis gives the same bytes. Does not know jobs or the queue.

A spreadsheet runs a cell that starts with ``=``, ``+``, ``-`` or ``@`` as a formula. Text from a model list or a
checkpoint that does so, and is not a number, is written with an apostrophe in front; ``unescape_cell`` takes it off.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuherd.errors import BadModel, printable
from gpuherd.esd.schema import LINEAGE_COLUMNS, LayerRow, column

if TYPE_CHECKING:
    import pyarrow as pa

FIT_OK = "ok"
SKIPPED = "not analysed: "
# The last four are wide forms of the first, which some spreadsheets take for them.
FORMULA_STARTS = tuple("=+-@\t'\uff1d\uff0b\uff0d\uff20")
# C0 and C1 controls but tab and line feed; and surrogates, which no UTF-8 file can hold.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Origin:
    """What every row of a stats file repeats: whose weights these are, and how they were analysed.

    ``convention`` is ``AnalysisOptions.convention_columns``.
    """

    model_id: str
    source_model: str | None
    relation: str
    convention: Mapping[str, Any]
    gpuherd_version: str

    @property
    def lineage(self) -> dict[str, Any]:
        """The first columns."""
        return dict(zip(LINEAGE_COLUMNS, (self.model_id, self.source_model, self.relation), strict=True))

    @property
    def last_columns(self) -> dict[str, Any]:
        """CONVENTION_COLUMNS."""
        return {**self.convention, "gpuherd_version": self.gpuherd_version}


def stats_rows(origin: Origin, rows: Iterable[LayerRow]) -> list[dict[str, Any]]:
    """The cells of a model's stats file by column, a row a matrix; without the columns of options that are off."""
    return [origin.lineage | row.cells(origin.convention) | origin.last_columns for row in rows]


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV text. The columns are those of all rows, in the order in which they first occur."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([cell_text(name) for name in names])
    writer.writerows([cell_text(row.get(name)) for name in names] for row in rows)
    return out.getvalue()


def header_text(names: Iterable[str]) -> str:
    """The first line of CSV text with these columns."""
    return table_text([dict.fromkeys(names)]).partition("\n")[0] + "\n"


def csv_rows(table: pa.Table) -> pa.Array:
    """The rows of a table as lines of CSV text, each with its line feed: the same as ``table_text`` writes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    cells = [_csv_cells(column) for column in table.combine_chunks().columns]
    lines = pc.binary_join_element_wise(*cells, ",", null_handling="replace", null_replacement="")
    return pc.binary_join_element_wise(lines, "\n", pa.scalar("")).combine_chunks()


def _csv_cells(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as cells of CSV text, null where a cell is empty."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column), pa.string())])
    if pa.types.is_floating(column.type):
        return _float_cells(column)
    if pa.types.is_integer(column.type):
        return pc.cast(column, pa.string())
    return pa.chunked_array([map_distinct(column.combine_chunks(), _csv_cell)])


def map_distinct(values: pa.Array, write: Callable[[Any], str]) -> pa.Array:
    """The words of values, null for null. Few of many values are different ones: each is written once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    coded = values.dictionary_encode()
    words = [None if value is None else write(value) for value in coded.dictionary.to_pylist()]
    return pc.take(pa.array(words, pa.string()), coded.indices)


def _csv_cell(value: Any) -> str:
    """A cell with the quotes that it needs."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([cell_text(value), ""])
    return out.getvalue().removesuffix(",\n")


def _float_cells(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Floats by repr. Arrow writes the same shortest digits, but 1 for 1.0, and powers of ten elsewhere."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = column.combine_chunks()
    text = pc.cast(numbers, pa.string())
    values = numbers.to_numpy(zero_copy_only=False)
    size = np.abs(values)
    alike = (size >= 1e-4) & (size < 1e10) & (values != np.floor(values))
    other = ~alike & numbers.is_valid().to_numpy(zero_copy_only=False)
    if other.any():
        # By their bits: 0.0 and -0.0 are two.
        different, which = np.unique(values[other].view(np.int64), return_inverse=True)
        reprs = [repr(value) for value in different.view(np.float64).tolist()]
        texts = pc.take(pa.array(reprs, pa.string()), pa.array(which))
        text = pc.replace_with_mask(text, pa.array(other), texts)
    return pa.chunked_array([text])


def cell_text(value: Any) -> str:
    """A value as a cell: floats by repr (exact), None as nothing, text so that no spreadsheet runs it.

    A carriage return becomes a line feed: Python's csv would write it without quotes and read it as the end of the row.
    Other control characters are written as escapes: a tensor's name must not drive the terminal that shows the file.
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value)
    text = _CONTROL.sub(lambda found: printable(found[0]), str(value).replace("\r\n", "\n").replace("\r", "\n"))
    return f"'{text}" if text.startswith(FORMULA_STARTS) and not is_number(text) else text


def unescape_cell(text: str) -> str:
    """The text of a cell as it was before ``cell_text`` protected it."""
    return text[1:] if text.startswith("'") else text


def stored_text(text: str) -> str:
    """Text as it comes back from a stats file: what stands in our other files too, so that names of all agree."""
    return unescape_cell(cell_text(text))


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of one of our CSV files, protection taken off."""
    return list(_rows_of(path))


def first_row(path: Path) -> dict[str, str]:
    """The first of them, for what all rows repeat; empty where there is none."""
    with closing(_rows_of(path)) as rows:
        return next(rows, {})


def _rows_of(path: Path) -> Generator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True)
        names = [unescape_cell(name) for name in next(reader, [])]
        for cells in reader:
            yield dict(zip(names, map(unescape_cell, cells), strict=True))


def has_fit(rows: Iterable[LayerRow]) -> bool:
    """Whether any matrix has a valid fit. A model without one has failed: its file would only look like a result."""
    return any(row.fit_status == FIT_OK for row in rows)


def no_fit_reason(rows: Sequence[LayerRow]) -> str:
    """One sentence that says why no matrix of a model has a fit: the commonest reason, with the first that has it."""
    analysed = [row for row in rows if not row.fit_status.startswith(SKIPPED)]
    if not rows:
        return "the model has no weight matrix that can be analysed"
    reason = statistics.mode(row.fit_status for row in analysed or rows)
    first = next(row for row in rows if row.fit_status == reason)
    if not analysed:
        return f"the model has no weight matrix that can be analysed; {first.longname} is {reason}"
    return f"none of its {len(analysed)} matrices has a valid fit; {first.longname}: {reason}"


def is_number(text: str) -> bool:
    """Whether Python reads it as a float."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def finite_or_none(value: float) -> float | None:
    """A number for JSON, which has no NaN."""
    return value if math.isfinite(value) else None


# Where a matrix stands in its model, read off its name: the layer that it is in and the module that it is there.
#
# So the figures of a model become a table of layers x modules. Pure; knows names only, no files and no numpy.

# The module of a matrix that is a layer of its own, like an output head: no tensor's part is called so behind a number.
WHOLE = "weight"
_LONGEST_NUMBER = 9


class LayerPlace(NamedTuple):
    """A matrix's cell in the table.

    Attributes:
        layer: the name up to and with the layer's number (``model.layers.3``); without a number, the whole name.
        number: the layer's number, None where the name has none.
        module: the rest of the name; ``weight`` where nothing is left.
    """

    layer: str
    number: int | None
    module: str


@dataclass(frozen=True, slots=True)
class AlphaMatrix:
    """One figure of a model's matrices, layers x modules.

    Attributes:
        layers: names of the rows: the numbered layers, stack by stack, each stack in order; then what has no number.
        numbers: the layers' numbers, None for what has none.
        modules: names of the columns, in the order in which the model has them.
        values: a row a layer; None where the layer has no such module, or the module no such figure.
    """

    layers: tuple[str, ...]
    numbers: tuple[int | None, ...]
    modules: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]


def place_of(longname: str) -> LayerPlace:
    """Where the matrix of this name stands. The layer's number is the first in the name; not the very first part where
    a further number follows, which then counts the models of a pipeline.

    >>> place_of("model.layers.3.self_attn.q_proj")
    LayerPlace(layer='model.layers.3', number=3, module='self_attn.q_proj')
    >>> place_of("0.auto_model.encoder.layer.5.output.dense")
    LayerPlace(layer='0.auto_model.encoder.layer.5', number=5, module='output.dense')
    >>> place_of("lm_head")
    LayerPlace(layer='lm_head', number=None, module='weight')
    """
    parts = longname.split(".")
    at = [index for index, part in enumerate(parts) if _is_layer_number(part)]
    if not at:
        return LayerPlace(longname, None, WHOLE)
    index = at[1] if at[0] == 0 and len(at) > 1 else at[0]
    rest = ".".join(parts[index + 1 :])
    return LayerPlace(".".join(parts[: index + 1]), int(parts[index]), rest or WHOLE)


def alpha_matrix(figures: Mapping[str, float | None] | Iterable[tuple[str, float | None]]) -> AlphaMatrix:
    """The table of a figure (``alpha``) by names of matrices; ``figures`` in the order of the model."""
    pairs = figures.items() if isinstance(figures, Mapping) else figures
    cells: dict[tuple[str, str], float | None] = {}
    numbers: dict[str, int | None] = {}
    modules: dict[str, None] = {}
    for longname, value in pairs:
        place = place_of(longname)
        numbers.setdefault(place.layer, place.number)
        modules.setdefault(place.module)
        cells[place.layer, place.module] = value
    layers = _in_order(numbers)
    values = tuple(tuple(cells.get((layer, module)) for module in modules) for layer in layers)
    return AlphaMatrix(layers, tuple(numbers[layer] for layer in layers), tuple(modules), values)


def _in_order(numbers: Mapping[str, int | None]) -> tuple[str, ...]:
    """Stacks (what stands before the number) in the order in which they first occur, their layers by number."""
    stacks: dict[str, int] = {}
    for layer, number in numbers.items():
        if number is not None:
            stacks.setdefault(_stack(layer), len(stacks))

    def key(layer: str) -> tuple[int, int]:
        number = numbers[layer]
        return (len(stacks), 0) if number is None else (stacks[_stack(layer)], number)

    return tuple(sorted(numbers, key=key))


def _stack(layer: str) -> str:
    return layer.rpartition(".")[0]


def _is_layer_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= _LONGEST_NUMBER


# ``metrics/<model>.h5`` and ``.parquet``: a model's alphas as a table of layers x modules.
#
# The HDF5 file has the form of the published Model-Zoo: its dataset ``alpha`` and the attributes of that, with names
# for the rows added. Knows files; where a matrix stands is ``alpha_matrix``'s business.

FORMAT = "1.0"
# Columns that the Model-Zoo calls otherwise there.
ABOUT_MATRIX = {"model_id": "full_name"}
# A global heap collection: its signature, and the bytes before its first object, as before each object's data.
_HEAP, _HEAP_HEADER = b"GCOL", 16


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """What the file holds: the table, and all that is said about it, as text by name (``full_name``, …)."""

    matrix: AlphaMatrix
    about: Mapping[str, str]


def about_text(columns: Mapping[str, Any]) -> dict[str, str]:
    """What both files say about their table: lineage in the Model-Zoo's words, then the convention, all as text.

    Args:
        columns: both of them by name (LINEAGE_COLUMNS and CONVENTION_COLUMNS).
    """
    about = {ABOUT_MATRIX.get(name, name): value for name, value in columns.items()}
    return {name: "" if value is None else stored_text(str(value)) for name, value in about.items()}


def hdf5_bytes(about: Mapping[str, str], matrix: AlphaMatrix) -> bytes:
    """The HDF5 file: dataset ``alpha``, float64, layers x modules, NaN where there is no value. Its attributes:
    ``num_layers``, ``num_modules``, ``missing_value``, and as JSON ``module_names_json``, ``layer_names_json`` and
    ``layer_numbers_json``. Attributes of the file: ``format_version`` and ``about_text``. The same table gives the same
    bytes.
    """
    import h5py
    import numpy as np

    values = [[np.nan if value is None else value for value in row] for row in matrix.values]
    out = io.BytesIO()
    with h5py.File(out, "w") as file:
        table = file.create_dataset("alpha", data=np.array(values, np.float64), track_times=False)
        table.attrs["num_layers"] = len(matrix.layers)
        table.attrs["num_modules"] = len(matrix.modules)
        table.attrs["missing_value"] = "NaN"
        for name, value in (
            ("module_names_json", [stored_text(name) for name in matrix.modules]),
            ("layer_names_json", [stored_text(name) for name in matrix.layers]),
            ("layer_numbers_json", matrix.numbers),
        ):
            table.attrs[name] = json.dumps(value, ensure_ascii=False)
        file.attrs["format_version"] = FORMAT
        for name, text in about.items():
            file.attrs[name] = text
    return out.getvalue()


def read_hdf5(path: Path) -> StoredMatrix:
    """What ``hdf5_bytes`` wrote, or a file of the Model-Zoo: its rows are then called by their numbers.

    Raises FileNotFoundError, and BadModel for another or a damaged file.
    """
    import h5py

    try:
        data = path.read_bytes()
        _refuse_endless_heap(data)
        with h5py.File(io.BytesIO(data), "r") as file:
            table = file["alpha"]
            values = table[...].tolist()
            modules = tuple(json.loads(table.attrs["module_names_json"]))
            numbers = json.loads(table.attrs.get("layer_numbers_json", json.dumps(list(range(len(values))))))
            layers = json.loads(table.attrs.get("layer_names_json", json.dumps([str(number) for number in numbers])))
            about = {str(name): str(value) for name, value in file.attrs.items() if name != "format_version"}
    except FileNotFoundError:
        raise
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as problem:
        raise BadModel(f"{path} holds no matrix of alphas: {problem}") from None
    cells = tuple(tuple(None if value != value else value for value in row) for row in values)
    named = all(isinstance(name, str) for name in (*layers, *modules)) and len(numbers) == len(layers)
    if not named or len(layers) != len(cells) or any(len(row) != len(modules) for row in cells):
        raise BadModel(f"{path}: names and size of its matrix don't agree")
    return StoredMatrix(AlphaMatrix(tuple(layers), tuple(numbers), modules, cells), about)


def _refuse_endless_heap(data: bytes) -> None:
    """Raises ValueError for a file in whose text libhdf5 would never come to an end.

    Texts of attributes lie in global heap collections (HDF5 File Format 3.0, III.E): objects one after the other, of
    which number 0 is the free space and gives its whole size. libhdf5 (1.14) goes on by that size, also where it is 0.
    """
    start = data.find(_HEAP)
    while start >= 0:
        end = min(len(data), start + int.from_bytes(data[start + 8 : start + 16], "little"))
        at = start + _HEAP_HEADER
        while at + _HEAP_HEADER <= end:
            number, size = int.from_bytes(data[at : at + 2], "little"), int.from_bytes(data[at + 8 : at + 16], "little")
            if number == 0 and size == 0:
                raise ValueError("its free space has no size")
            at += size if number == 0 else _HEAP_HEADER + -(-size // 8) * 8
        start = data.find(_HEAP, max(end, start + len(_HEAP)))


def matrix_parquet_bytes(about: Mapping[str, str], matrix: AlphaMatrix) -> bytes:
    """The same table as Parquet: ``layer`` (its name), ``number``, then a float64 column a module, null for no value.

    ``about_text`` is the file's key-value metadata. A module that is called like one of the first two columns has
    ``module:`` before its name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {
        "layer": column("str", [stored_text(name) for name in matrix.layers]),
        "number": column("int", matrix.numbers),
    }
    for index, module in enumerate(matrix.modules):
        name = stored_text(module)
        while name in columns:
            name = f"module:{name}"
        columns[name] = column("float", [row[index] for row in matrix.values])
    table = pa.table(columns).replace_schema_metadata(dict(about))
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()
