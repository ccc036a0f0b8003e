"""The schema of the data set of results, declared once; and Python values as its columns.

The data set is ``stats/*.parquet``: a row a weight matrix, of one model or (imported results) of many. Its columns are
whose weights these are, the figures of ``row.LayerRow``, the convention (``config.AnalysisOptions``) and the version.

Columns are made from their buffers: ``pyarrow.array`` asks pandas, where that is installed, whether a list is a series
of it, which costs each worker 0.3 s of imports for files that need no pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gpuherd.esd.config import CONVENTION, AnalysisOptions
from gpuherd.esd.row import LayerRow

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

LINEAGE_COLUMNS = ("model_id", "source_model", "base_model_relation")
CONVENTION_COLUMNS = (*CONVENTION, "gpuherd_version")

_NUMBERS = ("bool", "int", "float")
_DECLARED = {declared.name: str(declared.type).split(" | ")[0] for declared in fields(LayerRow)} | {
    declared.name: kind if (kind := type(declared.default).__name__) in _NUMBERS else "str"
    for declared in fields(AnalysisOptions)
}


def schema(convention: Mapping[str, Any] | None = None) -> pa.Schema:
    """The columns of the data set, in order.

    Args:
        convention: of the results; the columns of an option that is off are left out. None: every column.
    """
    import pyarrow as pa

    types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
    figures = [
        declared.name
        for declared in fields(LayerRow)
        if convention is None or "option" not in declared.metadata or convention.get(declared.metadata["option"])
    ]
    return pa.schema(
        [(name, types[kind_of_column(name)]) for name in (*LINEAGE_COLUMNS, *figures, *CONVENTION_COLUMNS)]
    )


def kind_of_column(name: str, values: Sequence[Any] = ()) -> str:
    """``int``, ``float``, ``bool`` or ``str``: as LayerRow or AnalysisOptions declare the column, else by its first
    value; text where there is none."""
    if name in _DECLARED:
        return _DECLARED[name]
    first = next((value for value in values if value is not None), "")
    kind = type(first).__name__
    return kind if kind in _NUMBERS else "str"


def column(kind: str, values: Sequence[Any]) -> pa.Array:
    """The values as a column, None as null.

    Args:
        kind: ``int`` (int64), ``float`` (float64), ``bool`` or ``str``, which all values that are not None must be.

    Raises:
        OverflowError: a whole number of more than 64 bits.
    """
    import numpy as np
    import pyarrow as pa

    known = np.array([value is not None for value in values], np.bool_)
    valid = None if known.all() else pa.py_buffer(_bits(known))
    if kind == "str":
        parts = [b"" if value is None else value.encode("utf-8") for value in values]
        data = [pa.py_buffer(offsets_of([len(part) for part in parts])), pa.py_buffer(b"".join(parts))]
    elif kind == "bool":
        data = [pa.py_buffer(_bits(np.array([bool(value) for value in values], np.bool_)))]
    else:
        numbers = [0 if value is None else value for value in values]
        data = [pa.py_buffer(np.array(numbers, np.int64 if kind == "int" else np.float64))]
    types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
    return pa.Array.from_buffers(types[kind], len(values), [valid, *data])


def lists(rows: Sequence[npt.NDArray[np.float64]], kind: pa.ListType[Any]) -> pa.Array:
    """Arrays of float64 as a column of lists of this type; fewer than 2^31 numbers in all."""
    import numpy as np
    import pyarrow as pa

    numbers = np.concatenate([np.empty(0), *rows])
    values = pa.Array.from_buffers(pa.float64(), len(numbers), [None, pa.py_buffer(numbers)])
    starts = offsets_of([len(row) for row in rows])
    offsets = pa.Array.from_buffers(pa.int32(), len(starts), [None, pa.py_buffer(starts)])
    return pa.ListArray.from_arrays(offsets, values, type=kind)


def offsets_of(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """Where each of so many elements starts, and where the last ends: int32 (len + 1,)."""
    import numpy as np

    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


def _bits(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    import numpy as np

    return np.packbits(flags, bitorder="little")
