"""``stats/<model>.parquet``: the columns of the stats file with their types, for those who read many models at once.

Knows how a column of the CSV becomes one of Parquet. What the columns are is ``stats``'s and ``row``'s business.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd.errors import BadModel
from gpuherd.esd.config import AnalysisOptions
from gpuherd.esd.row import LayerRow
from gpuherd.esd.tables.arrow import column
from gpuherd.esd.tables.stats import stored_text

if TYPE_CHECKING:
    import pyarrow as pa

_NUMBERS = ("bool", "int", "float")
_DECLARED = {declared.name: str(declared.type).split(" | ")[0] for declared in fields(LayerRow)} | {
    declared.name: kind if (kind := type(declared.default).__name__) in _NUMBERS else "str"
    for declared in fields(AnalysisOptions)
}


def parquet_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The table of ``stats.stats_rows`` as a Parquet file: text, int64, float64 and bool columns, null for no value.

    A column's type is the one that ``LayerRow`` or ``AnalysisOptions`` declares, so that it is the same for all models,
    also where one of them has no value in it. The same rows give the same bytes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {stored_text(name): _column(name, [row.get(name) for row in rows]) for name in names}
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd")
    return out.getvalue()


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


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    kind = kind_of_column(name, values)
    if kind == "str":
        values = [None if value is None else stored_text(str(value)) for value in values]
    return column(kind, values)


def kind_of_column(name: str, values: Sequence[Any]) -> str:
    """``int``, ``float``, ``bool`` or ``str``: as LayerRow or AnalysisOptions declare the column, else by its first
    value; text where there is none."""
    if name in _DECLARED:
        return _DECLARED[name]
    first = next((value for value in values if value is not None), "")
    kind = type(first).__name__
    return kind if kind in _NUMBERS else "str"
