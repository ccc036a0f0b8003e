"""A spectrum in a hundred points, as a log-log plot of it needs them; and all eigenvalues, in a file of their own.

The points of all matrices of a model are the column ``spectrum`` of its fragment of the data set; folders of
earlier versions have them in ``spectra/<model>.npz``.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gpuherd.errors import BadModel
from gpuherd.esd.config import CONVENTION
from gpuherd.esd.schema import column, lists, spectrum_type
from gpuherd.esd.views import finite_or_none, stored_text

if TYPE_CHECKING:
    import pyarrow as pa

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

# As many points as a plot needs, and the distance, in heights of the plot, that is too small to see.
MOST_POINTS = 100
UNSEEN = 5e-4
HISTOGRAM_BINS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A spectrum as a few points.

    Attributes:
        log10_lambda: float32, log10 of some of the eigenvalues above the threshold, ascending; the first and the last
            of them always. Empty where there are none.
        log10_ccdf: float32, for each of them log10 of the share of eigenvalues (of those above the threshold) that are
            as large or larger: 0 at the first.
        histogram: uint32, how many of ALL eigenvalues above the threshold fall in each of 64 bins of equal width in
            log10 λ between the least and the largest.
        count: eigenvalues above the threshold.
        below: eigenvalues up to the threshold, which are in no point.
    """

    log10_lambda: Float32
    log10_ccdf: Float32
    histogram: npt.NDArray[np.uint32]
    count: int
    below: int


def sketch_of(evals: Float64, evals_thresh: float, most: int = MOST_POINTS) -> Sketch:
    """The sketch of a spectrum.

    Between two points of it, a straight line on the log-log plot is nearer to every eigenvalue left out than to be
    seen, or ``most`` points are used where they help most. The same spectrum gives the same points.

    Args:
        evals: float64, ascending, not negative.
        evals_thresh: eigenvalues up to this are only counted.
        most: points, 2 or more.
    """
    x = evals[evals > max(evals_thresh, 0.0)]
    count = len(x)
    if count == 0:
        return Sketch(np.empty(0, np.float32), np.empty(0, np.float32), np.zeros(64, np.uint32), 0, len(evals))
    logs = np.log10(x)
    # Equal eigenvalues share the ccdf of the first of them.
    first = np.maximum.accumulate(np.where(np.diff(x, prepend=-1.0) > 0, np.arange(count), 0))
    ccdf = np.log10((count - first) / count)
    chosen = _points(logs, ccdf, most)
    return Sketch(
        logs[chosen].astype(np.float32),
        ccdf[chosen].astype(np.float32),
        _histogram(logs),
        count,
        len(evals) - count,
    )


def _histogram(logs: Float64) -> npt.NDArray[np.uint32]:
    low, high = float(logs[0]), float(logs[-1])
    if high > low:
        return np.histogram(logs, bins=HISTOGRAM_BINS, range=(low, high))[0].astype(np.uint32)
    counts = np.zeros(HISTOGRAM_BINS, np.uint32)
    counts[0] = len(logs)
    return counts


def _points(x: Float64, y: Float64, most: int) -> npt.NDArray[np.int64]:
    """Indices of the points to keep: both ends, then round by round in each segment of the line drawn so far the point
    farthest from it, the worst first where not all fit into ``most``.

    This is the split of Douglas and Peucker (1973), all segments at once: a round costs O(n), and there are few.
    """
    # Lengths in widths and heights of the plot.
    x, y = x / (float(x[-1] - x[0]) or 1.0), y / (float(y[0] - y[-1]) or 1.0)
    chosen = np.unique(np.array([0, len(x) - 1], np.int64))
    while len(chosen) < most:
        worst, distances = _farthest(x, y, chosen)
        far = np.flatnonzero(distances > UNSEEN)
        if len(far) == 0:
            break
        # A stable sort: of equal distances the leftmost.
        far = far[np.argsort(-distances[far], kind="stable")][: most - len(chosen)]
        chosen = np.sort(np.concatenate([chosen, worst[far]]))
    return chosen


def _farthest(x: Float64, y: Float64, chosen: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Float64]:
    """For each segment between two chosen points: the point farthest from the line through both, and how far it is."""
    starts, stops = chosen[:-1], chosen[1:]
    lengths = stops - starts
    across, up = x[stops] - x[starts], y[stops] - y[starts]
    size = np.hypot(across, up)
    size[size == 0.0] = np.inf
    # Each point belongs to the segment that starts at it or before it; the last point to none.
    dx, dy = x[:-1] - np.repeat(x[starts], lengths), y[:-1] - np.repeat(y[starts], lengths)
    distances = np.abs(np.repeat(across / size, lengths) * dy - np.repeat(up / size, lengths) * dx)
    largest = np.maximum.reduceat(distances, starts)
    at = np.flatnonzero(distances == np.repeat(largest, lengths))
    return at[np.searchsorted(at, starts)], largest


# ---- the points of a model's spectra: a column of the data set, or ``spectra/<model>.npz``


# What NumPy and zipfile raise for a damaged archive. RuntimeError: its head says that it is encrypted, or of a later
# version of the format.
_DAMAGED = (
    *(OSError, ValueError, KeyError, EOFError, IndexError, TypeError),
    *(zipfile.BadZipFile, zlib.error, RuntimeError),
)


@dataclass(frozen=True, slots=True, eq=False)
class StoredSpectrum:
    """One layer's sketch with its fit; ``xmin``, ``alpha`` and ``D`` are None without one."""

    longname: str
    sketch: Sketch
    xmin: float | None
    alpha: float | None
    D: float | None


@dataclass(frozen=True, slots=True, eq=False)
class StoredSpectra:
    """What is stored of one model: its layers in order, and what their figures depend on."""

    model_id: str
    convention: Mapping[str, Any]
    layers: tuple[StoredSpectrum, ...]


def spectrum_column(sketches: Mapping[int, Sketch], rows: int) -> pa.Array:
    """The sketches of a model's matrices as the column ``spectrum`` of the data set, null for a matrix without one.

    Args:
        sketches: by the row's index.
        rows: how many there are.
    """
    import pyarrow as pa

    kind = spectrum_type()
    none = Sketch(np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.uint32), 0, 0)
    each = [sketches.get(index, none) for index in range(rows)]
    parts = [
        lists([sketch.log10_lambda for sketch in each], kind.field("log10_lambda").type),
        lists([sketch.log10_ccdf for sketch in each], kind.field("log10_ccdf").type),
        lists([sketch.histogram for sketch in each], kind.field("histogram").type),
        column("int", [sketch.count for sketch in each]),
        column("int", [sketch.below for sketch in each]),
    ]
    missing = column("bool", [index not in sketches for index in range(rows)])
    return pa.StructArray.from_arrays(parts, fields=list(kind), mask=missing)


# The columns that ``spectra_of`` needs.
ABOUT_SPECTRA = ("model_id", "longname", "xmin", "alpha", "D", "spectrum")


def spectra_of(table: pa.Table) -> StoredSpectra:
    """The spectra of a model, from its rows of the data set: of these columns, and of the convention's."""
    sketches = table["spectrum"].combine_chunks()
    parts = {each.name: sketches.field(number) for number, each in enumerate(sketches.type)}
    arrays = {name: parts[name].values.to_numpy() for name in ("log10_lambda", "log10_ccdf", "histogram")}
    bounds = {name: parts[name].offsets.to_numpy() for name in arrays}
    count, below = parts["count"].to_pylist(), parts["below"].to_pylist()
    missing = sketches.is_null().to_pylist()

    def part(name: str, index: int) -> npt.NDArray[Any]:
        points: npt.NDArray[Any] = arrays[name][bounds[name][index] : bounds[name][index + 1]]
        return points

    figures = [table[name].to_pylist() for name in ("longname", "xmin", "alpha", "D")]
    layers = []
    for index, (name, xmin, alpha, D) in enumerate(zip(*figures, strict=True)):
        if not missing[index]:
            points = (part("log10_lambda", index), part("log10_ccdf", index), part("histogram", index))
            sketch = Sketch(*points, count[index], below[index])
            layers.append(StoredSpectrum(name, sketch, xmin, alpha, D))
    convention = {name: table[name][0].as_py() for name in CONVENTION if name in table.column_names}
    return StoredSpectra(table["model_id"][0].as_py(), convention, tuple(layers))


def read_spectra(path: Path) -> StoredSpectra:
    """The spectra of a model as earlier versions wrote them: a NumPy archive without pickled objects, with L
    layers and P points in all.

    ``longname`` str (L,); ``offsets`` int64 (L + 1,): layer i has the points ``offsets[i]`` to ``offsets[i + 1]``;
    ``log10_lambda`` and ``log10_ccdf`` float32 (P,); ``histogram`` uint32 (L, 64); ``count`` and ``below`` int64 (L,),
    see ``Sketch``; ``alpha``, ``xmin`` and ``D`` float64 (L,), NaN where there is no fit; ``about`` str (), JSON with
    ``model_id`` and ``convention``.

    Raises FileNotFoundError, and BadModel for another or a damaged file.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return _from_arrays({name: arrays[name] for name in arrays.files})
    except FileNotFoundError:
        raise
    except _DAMAGED as problem:
        raise BadModel(f"{path} is no file of spectra of gpuherd: {problem}") from None


def _from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> StoredSpectra:
    about = json.loads(str(arrays["about"]))
    offsets = arrays["offsets"]
    log10_lambda, log10_ccdf = (np.asarray(arrays[name], np.float32) for name in ("log10_lambda", "log10_ccdf"))
    layers = []
    for index, name in enumerate(arrays["longname"].tolist()):
        points = slice(int(offsets[index]), int(offsets[index + 1]))
        sketch = Sketch(
            log10_lambda[points],
            log10_ccdf[points],
            arrays["histogram"][index],
            int(arrays["count"][index]),
            int(arrays["below"][index]),
        )
        xmin, alpha, D = (finite_or_none(float(arrays[column][index])) for column in ("xmin", "alpha", "D"))
        layers.append(StoredSpectrum(name, sketch, xmin, alpha, D))
    return StoredSpectra(about["model_id"], about["convention"], tuple(layers))


# ``eigs/<model>.parquet``: all eigenvalues of a model, written as they come, so that they are never all in memory.
#
# Sorted doubles share their leading bytes: these are stored byte by byte (BYTE_STREAM_SPLIT) and then packed by
# Zstandard, which loses nothing. Knows the file; where it goes and what a spectrum is, is others' business.

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
