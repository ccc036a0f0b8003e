"""``eigs/<model>.parquet``: all eigenvalues of a model, written as they come, so that they are never all in memory.

Sorted doubles share their leading bytes: these are stored byte by byte (BYTE_STREAM_SPLIT) and then packed by
Zstandard, which loses nothing. Knows the file; where it goes and what a spectrum is, is others' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpuherd.errors import BadModel
from gpuherd.esd.tables.arrow import column, lists
from gpuherd.esd.tables.stats import stored_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# So much is kept in memory before it is written: a row group.
GROUP_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class StoredEigs:
    """The eigenvalues of one matrix: its index in the model's table, its name, and float64 ascending."""

    index: int
    longname: str
    evals: npt.NDArray[np.float64]


class EigsWriter:
    """Writes the columns ``index`` (int64), ``longname`` and ``evals`` (list of float64) into an open binary file.

    Rows stand in the order in which they come, which is that of the model where nothing runs in parallel.

    Args:
        file: opened for writing; stays open.
        about: goes into the file's key-value metadata.
    """

    def __init__(self, file: BinaryIO, about: Mapping[str, str]):
        import pyarrow as pa
        import pyarrow.parquet as pq

        element = pa.field("element", pa.float64(), nullable=False)
        self._schema = pa.schema(
            [("index", pa.int64()), ("longname", pa.string()), ("evals", pa.list_(element))], metadata=dict(about)
        )
        self._writer = pq.ParquetWriter(
            pa.PythonFile(file, mode="w"),
            self._schema,
            compression="zstd",
            use_dictionary=False,
            column_encoding={"evals.list.element": "BYTE_STREAM_SPLIT"},
            write_statistics=False,
        )
        self._waiting: list[StoredEigs] = []
        self._bytes = 0

    def add(self, index: int, longname: str, evals: npt.NDArray[np.float64]) -> None:
        """Takes one matrix's eigenvalues; they must not be changed afterwards."""
        self._waiting.append(StoredEigs(index, stored_text(longname), evals))
        self._bytes += evals.nbytes
        if self._bytes >= GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        """Writes what waits, and the end of the file, without which it can't be read."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        import pyarrow as pa

        if not self._waiting:
            return
        columns = [
            column("int", [each.index for each in self._waiting]),
            column("str", [each.longname for each in self._waiting]),
            lists([each.evals for each in self._waiting], self._schema.field("evals").type),
        ]
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._waiting, self._bytes = [], 0


def read_eigs(path: Path) -> Iterator[StoredEigs]:
    """The matrices of the file one after the other, one row group in memory at a time.

    Raises FileNotFoundError, and BadModel for another or a damaged file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            table: Any = file.read_row_group(group, columns=["index", "longname", "evals"])
            for index, name, evals in zip(table["index"], table["longname"], table["evals"], strict=True):
                yield StoredEigs(index.as_py(), name.as_py(), evals.values.to_numpy(zero_copy_only=False))
    except FileNotFoundError:
        raise
    except (OSError, KeyError, ValueError, pa.ArrowException) as problem:
        raise BadModel(f"{path} is no file of eigenvalues of gpuherd: {problem}") from None


def read_eigs_of(path: Path, longname: str) -> npt.NDArray[np.float64] | None:
    """The eigenvalues of one matrix, None where the file has no such name. Raises as ``read_eigs``."""
    return next((each.evals for each in read_eigs(path) if each.longname == longname), None)
