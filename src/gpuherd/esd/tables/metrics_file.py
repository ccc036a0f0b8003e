"""``metrics/<model>.h5`` and ``.parquet``: a model's alphas as a table of layers x modules.

The HDF5 file has the form of the published Model-Zoo: its dataset ``alpha`` and the attributes of that, with names for
the rows added. Knows files; where a matrix stands is ``alpha_matrix``'s business.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import BadModel
from gpuherd.esd.tables.alpha_matrix import AlphaMatrix
from gpuherd.esd.tables.arrow import column
from gpuherd.esd.tables.stats import Origin, stored_text

FORMAT = "1.0"


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """What the file holds: the table, and all that is said about it, as text by name (``full_name``, …)."""

    matrix: AlphaMatrix
    about: Mapping[str, str]


def about_text(origin: Origin) -> dict[str, str]:
    """What both files say about their table: lineage in the Model-Zoo's words, then the convention, all as text."""
    lineage = {
        "full_name": origin.model_id,
        "source_model": origin.source_model,
        "base_model_relation": origin.relation,
    }
    about = lineage | origin.last_columns
    return {name: "" if value is None else stored_text(str(value)) for name, value in about.items()}


def hdf5_bytes(origin: Origin, matrix: AlphaMatrix) -> bytes:
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
        for name, text in about_text(origin).items():
            file.attrs[name] = text
    return out.getvalue()


def read_hdf5(path: Path) -> StoredMatrix:
    """What ``hdf5_bytes`` wrote, or a file of the Model-Zoo: its rows are then called by their numbers.

    Raises FileNotFoundError, and BadModel for another or a damaged file.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
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


def matrix_parquet_bytes(origin: Origin, matrix: AlphaMatrix) -> bytes:
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
    table = pa.table(columns).replace_schema_metadata(about_text(origin))
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()
