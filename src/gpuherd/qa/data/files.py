"""Rows of CSV, TSV, JSON and Parquet files, read as they come; a bad row is reported with its place, and affects no
other.

Parquet is read by pyarrow, CSV and JSON with the standard library: the readers of pyarrow, pandas and datasets end at
the first bad line, know no line numbers, and want one type for each column (docs/dependencies.md has figures).
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gpuherd.errors import naming_extras
from gpuherd.qa.data.questions import BadQuestions, DataRow

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
# Chooses the columns to read from the names of all; None for all.
ColumnChoice = Callable[[Iterable[str]], list[str] | None]


def rows_of_file(path: Path, columns: ColumnChoice) -> Iterator[DataRow]:
    """The rows of a file that ends in one of ``SUFFIXES``. Of Parquet only the chosen columns are read.

    Raises BadQuestions if the file as a whole can't be used, MissingExtra, OSError.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return rows_of_parquet(path, columns)
    if suffix == ".json":
        return rows_of_document(path)
    return rows_of_table(path, "question") if suffix in (".csv", ".tsv") else rows_of_lines(path)


# ---- CSV and TSV -----------------------------------------------------------------------------------------------------

_DELIMITERS = (",", ";", "\t", "|")
_TEXTS = ("question", "id")  # columns that never hold a list
_BAD_BYTES = re.compile("[\udc80-\udcff]")  # bytes that are no UTF-8, as surrogateescape reads them
_NO_UTF8 = "bytes that are no UTF-8"


def rows_of_table(path: Path, needed: str) -> Iterator[DataRow]:
    """The rows under the header, by column. The delimiter is the one that gives the header a column ``needed``.

    A cell that is a JSON list becomes that list, but for the question and its id; an empty cell is None. Raises
    BadQuestions for a header that can't be used, OSError.
    """
    limit = csv.field_size_limit(sys.maxsize)  # the module's own 131,072 is less than a long context
    try:
        # Bytes that are no UTF-8 become lone surrogates, which are found again in their row.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            header = next((line for line in iter(file.readline, "") if line.strip()), "")
            delimiter = _delimiter(header, path, needed)
            file.seek(0)
            yield from _csv_rows(csv.reader(file, delimiter=delimiter, strict=True), path)
    finally:
        csv.field_size_limit(limit)


def _delimiter(header: str, path: Path, needed: str) -> str:
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    for delimiter in (usual, *_DELIMITERS):
        cells = next(csv.reader([header], delimiter=delimiter), [])
        if needed in {cell.strip() for cell in cells}:
            return delimiter
    return usual


def _csv_rows(reader: Any, path: Path) -> Iterator[DataRow]:
    columns: list[str] | None = None
    while True:
        first = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            yield DataRow(f"line {first}", None, f"no CSV: {problem}")
            continue
        if len(cells) < 2 and not "".join(cells).strip():  # an empty line
            continue
        if columns is None:
            columns = _header(cells, path)
        else:
            yield _csv_row(f"line {first}", columns, cells)


def _header(cells: list[str], path: Path) -> list[str]:
    if any(map(_BAD_BYTES.search, cells)):
        raise BadQuestions(f"{path}: its heading has {_NO_UTF8}; save it as UTF-8")
    columns = [cell.strip() for cell in cells]
    twice = sorted({column for column in columns if columns.count(column) > 1 and column})
    if twice:
        raise BadQuestions(f"{path}: two columns are called {twice[0]!r}")
    return columns


def _csv_row(place: str, columns: list[str], cells: list[str]) -> DataRow:
    if len(cells) != len(columns):
        return DataRow(place, None, f"{len(cells)} cells under a heading of {len(columns)}")
    if any(map(_BAD_BYTES.search, cells)):
        return DataRow(place, None, _NO_UTF8)
    values = {column: _cell_value(column, cell) for column, cell in zip(columns, cells, strict=True)}
    for column, value in values.items():
        if column not in _TEXTS and isinstance(value, str) and _is_python_list(value):
            reason = f"a list as Python writes it in {column!r}; write a JSON list, with double quotes"
            return DataRow(place, None, reason)
    return DataRow(place, values)


def _is_python_list(cell: str) -> bool:
    """Whether it looks like ``['a', 'b']`` or ``['a' 'b']``, which pandas and numpy write: as one text it would be a
    reference that no answer equals."""
    opened, inner, closed = cell.strip()[:1], cell.strip()[1:-1].strip(), cell.strip()[-1:]
    return opened == "[" and closed == "]" and inner[:1] in ("'", '"') and inner[-1:] in ("'", '"')


def _cell_value(column: str, cell: str) -> Any:
    """A JSON list as a list, an empty cell as None, everything else as text."""
    if column not in _TEXTS and cell.lstrip().startswith("["):
        try:
            value = json.loads(cell)
        except (ValueError, RecursionError):
            return cell
        return value if isinstance(value, list) else cell
    return cell if cell.strip() else None


# ---- JSON ------------------------------------------------------------------------------------------------------------


def rows_of_lines(path: Path) -> Iterator[DataRow]:
    """A row for each line that is not blank. Raises OSError."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _json_row(f"line {number}", line)


def rows_of_document(path: Path) -> Iterator[DataRow]:
    """The objects of a list, or of the one list that an object holds; else the file's lines.

    Raises BadQuestions, OSError.
    """
    with path.open("rb") as file:
        data = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        document = json.loads(data)
    except UnicodeDecodeError as problem:
        raise BadQuestions(f"{path}: {_bad_byte(problem)}") from None
    except RecursionError:
        raise BadQuestions(f"{path}: nested too deep") from None
    except ValueError as problem:
        if data.lstrip()[:1] == b"[":
            raise BadQuestions(f"{path}: no JSON: {problem}") from None
        yield from rows_of_lines(path)
        return
    for number, value in enumerate(_list_in(document, path), start=1):
        yield _object_row(f"entry {number}", value)


def _list_in(document: Any, path: Path) -> list[Any]:
    if isinstance(document, list):
        return document
    lists = [value for value in document.values() if _is_table(value)] if isinstance(document, dict) else []
    if len(lists) == 1:
        return list(lists[0])
    if isinstance(document, dict) and not lists:
        return [document]
    raise BadQuestions(f"{path}: neither a list of questions nor an object with one such list")


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _json_row(place: str, line: bytes) -> DataRow:
    try:
        return _object_row(place, json.loads(line.decode()))
    except UnicodeDecodeError as problem:
        return DataRow(place, None, _bad_byte(problem))
    except RecursionError:
        return DataRow(place, None, "nested too deep")
    except json.JSONDecodeError as problem:  # its own place counts lines from this one, and so would mislead
        return DataRow(place, None, f"no JSON: {problem.msg} (character {problem.pos + 1})")
    except ValueError as problem:
        return DataRow(place, None, f"no JSON: {problem}")


def _object_row(place: str, value: Any) -> DataRow:
    if not isinstance(value, dict):
        return DataRow(place, None, f"no object with columns but a {type(value).__name__}")
    return DataRow(place, value)


def _bad_byte(problem: UnicodeDecodeError) -> str:
    return f"{_NO_UTF8} (byte {problem.start + 1}: 0x{problem.object[problem.start]:02x})"


# ---- Parquet ---------------------------------------------------------------------------------------------------------

_ROWS_AT_ONCE = 1024


def rows_of_parquet(path: Path, columns: ColumnChoice) -> Iterator[DataRow]:
    """The rows with the chosen columns. Raises BadQuestions if it is no Parquet or damaged, MissingExtra, OSError."""
    with naming_extras({"pyarrow": "qa", "pyarrow.parquet": "qa"}, "Parquet files of questions are read with"):
        import pyarrow
        import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns(file.schema_arrow.names)):
                for values in _batch_rows(batch):
                    number += 1
                    yield DataRow(f"row {number}", values, None if values is not None else _NO_UTF8)
    except (pyarrow.ArrowException, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno is not None:
            raise  # of the file system; pyarrow reports a damaged file as an OSError without a number
        where = f" behind row {number}" if number else ""
        raise BadQuestions(f"{path}: no Parquet, or damaged{where}: {problem}") from None


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | None]:
    """The rows of a batch; None for one whose texts are no UTF-8."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for place in range(batch.num_rows):
        try:
            yield from batch.slice(place, 1).to_pylist()
        except UnicodeDecodeError:
            yield None
