"""Python values as columns of Arrow, made from their buffers.

``pyarrow.array`` asks pandas, where that is installed, whether a list is a series of it: 0.3 s of imports in each
worker, for files that need no pandas. Knows Arrow's layout of a column; knows no table.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpuherd.atomic import replacing, sync_folder
from gpuherd.errors import BadModel, CannotWrite, MissingExtra, MissingModel, UsageError, printable
from gpuherd.esd.conventions import as_text
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.schema import column, kind_of_column
from gpuherd.esd.views import (
    FIT_OK,
    SKIPPED,
    Origin,
    alpha_matrix,
    first_row,
    read_table,
    stats_rows,
    stored_text,
    table_text,
)
from gpuherd.options import did_you_mean

if TYPE_CHECKING:
    from types import TracebackType

    import pyarrow as pa

    from gpuherd.esd.row import LayerRow
    from gpuherd.esd.spectra.pooled import LayerSpectrum
    from gpuherd.esd.spectrum_files import EigsWriter, Sketch, StoredSpectra
    from gpuherd.esd.views import StoredMatrix


def parquet_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The table of ``views.stats_rows`` as a Parquet file: text, int64, float64 and bool columns, null for no value.

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


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    kind = kind_of_column(name, values)
    if kind == "str":
        values = [None if value is None else stored_text(str(value)) for value in values]
    return column(kind, values)


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


# What was found out about a model, read back from its stats file; and how people name such a file.
#
# Light: the CSV alone is read, no numpy is imported. Knows columns and folders, no queue.


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


# All files of one model, from the first spectrum to the last rename; and where each of them is read again.
#
# All are on the disk before the first of them takes its place, and the stats CSV does so last: its presence says that
# the others are there and belong to it, also where they replace those of an earlier analysis. Knows the order and the
# folder; each file's form is its own module's business.


class ModelPaths:
    """Where the files of one model are, there or not.

    Attributes:
        stats: a row a matrix; the model is done when this is there.
        parquet: the same with types.
        hdf5: the alphas, layers x modules.
        matrix: the same as Parquet.
        spectra: a hundred points of each spectrum.
        eigs: all eigenvalues, with --save-eigs.
        coverage: every tensor of the checkpoint; also there where nothing could be fitted.
    """

    def __init__(self, directory: ESDDirectory, model_id: str):
        self.stats = directory.stats_file(model_id)
        self.parquet = directory.model_file(directory.stats, model_id, ".parquet")
        self.hdf5 = directory.model_file(directory.metrics, model_id, ".h5")
        self.matrix = directory.model_file(directory.metrics, model_id, ".parquet")
        self.spectra = directory.model_file(directory.spectra, model_id, ".npz")
        self.eigs = directory.model_file(directory.eigs, model_id, ".parquet")
        self.coverage = directory.coverage_file(model_id)

    @property
    def results(self) -> tuple[Path, ...]:
        """All that ``ModelFiles`` writes; the stats file, by which the others count, is the first to go."""
        return (self.stats, self.parquet, self.hdf5, self.matrix, self.spectra, self.eigs)


class ModelFiles:
    """Takes the spectra of a model as they come and writes its files at the end.

    A context manager: what is not written when it ends leaves no trace.

        with ModelFiles(directory, model_id, names, evals_thresh=1e-5, save_eigs=False) as files:
            rows = analyse_matrices(found, …, on_spectrum=files.keep_spectrum)
            files.write(origin, rows, coverage_text(covered))

    Args:
        directory: the run's folder; the folders of results in it are made.
        model_id: of the model.
        longnames: of its matrices, by index.
        evals_thresh: of the analysis: sketches show the eigenvalues above it.
        save_eigs: keep all eigenvalues.

    Raises:
        CannotWrite: a folder or file can't be written; also from the methods.
        MissingExtra: pyarrow or h5py is not installed; said at the beginning, not after hours of work.
    """

    def __init__(
        self,
        directory: ESDDirectory,
        model_id: str,
        longnames: Sequence[str],
        *,
        evals_thresh: float,
        save_eigs: bool,
    ):
        for library in ("pyarrow", "h5py"):
            if not _installed(library):
                raise MissingExtra(f"{library} is not installed; pip install 'gpuherd[esd]' brings what esd needs")
        self.paths = ModelPaths(directory, model_id)
        self._model_id = model_id
        self._longnames = longnames
        self._evals_thresh = evals_thresh
        self._sketches: dict[int, Sketch] = {}
        self._open = ExitStack()
        self._eigs: EigsWriter | None = None
        self._save_eigs = save_eigs
        kept = self.paths.results if save_eigs else self.paths.results[:-1]
        for path in (*kept, self.paths.coverage):
            make_folder(path.parent)

    def __enter__(self) -> ModelFiles:
        if self._save_eigs:
            from gpuherd.esd.spectrum_files import EigsWriter

            file = _enter_replacing(self._open, self.paths.eigs)
            self._eigs = EigsWriter(file, {"model_id": stored_text(self._model_id)})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, at: TracebackType | None
    ) -> None:
        # Not written to the end, whatever the reason: the temporary file goes.
        if self._eigs is not None:
            with suppress(OSError):
                self._eigs.close()
            self._eigs = None
        # On a full disk closing fails as well: what went wrong first is what is told.
        with suppress(_NotWritten, OSError):
            self._open.__exit__(_NotWritten, _NotWritten(), None)

    def keep_spectrum(self, index: int, spectrum: LayerSpectrum) -> None:
        """Takes the spectrum of matrix ``index``: for ``analyse_matrices(…, on_spectrum=)``."""
        from gpuherd.esd.spectrum_files import sketch_of

        if spectrum.problem is not None:
            return
        self._sketches[index] = sketch_of(spectrum.evals, self._evals_thresh)
        if self._eigs is not None:
            with _told(self.paths.eigs):
                self._eigs.add(index, self._longnames[index], spectrum.evals)

    def write(self, origin: Origin, rows: Sequence[LayerRow], coverage: str) -> None:
        """Writes all files, the stats CSV last.

        Args:
            origin: whose weights these are.
            rows: by index; at least one.
            coverage: the table of all tensors, as CSV text.
        """
        from gpuherd.esd.spectrum_files import spectra_bytes

        spectra = spectra_bytes(origin.model_id, origin.convention, rows, self._sketches)
        contents = _tables(self.paths, origin, rows) | {self.paths.spectra: spectra}
        contents[self.paths.coverage] = coverage.encode("utf-8")
        if self._eigs is None:
            _replace(self.paths, contents, None)
            return
        with _told(self.paths.eigs):
            self._eigs.close()
        self._eigs = None
        _replace(self.paths, contents, self._open)

    def remove(self) -> None:
        """Removes the results of an earlier analysis, which would now look like this one's."""
        for path in self.paths.results:
            with _told(path):
                path.unlink(missing_ok=True)


def write_tables(paths: ModelPaths, origin: Origin, rows: Sequence[LayerRow]) -> None:
    """Writes what needs rows only, into folders that are there: the matrix of alphas and the stats, the CSV last.

    Raises CannotWrite.
    """
    _replace(paths, _tables(paths, origin, rows), None)


def _tables(paths: ModelPaths, origin: Origin, rows: Sequence[LayerRow]) -> dict[Path, bytes]:
    from gpuherd.esd.views import hdf5_bytes, matrix_parquet_bytes

    cells = stats_rows(origin, rows)
    matrix = alpha_matrix((row.longname, row.alpha) for row in rows)
    return {
        paths.stats: table_text(cells).encode("utf-8"),
        paths.parquet: parquet_bytes(cells),
        paths.hdf5: hdf5_bytes(origin, matrix),
        paths.matrix: matrix_parquet_bytes(origin, matrix),
    }


def _replace(paths: ModelPaths, contents: Mapping[Path, bytes], eigs: ExitStack | None) -> None:
    """Puts the files in place, the first of ``contents``, the stats, last; what an earlier analysis had besides, goes.

    Where one can't be written, those of the earlier analysis stay. While they are replaced there is no stats file.

    ``eigs``: holds the file of eigenvalues, written already, and is emptied when that is to take its place; None where
    there is none.
    """
    written = {*contents, paths.eigs} if eigs is not None else {*contents}
    with ExitStack() as files:
        for path, data in contents.items():
            file = _enter_replacing(files, path)
            with _told(path):
                file.write(data)
                file.flush()
        if eigs is not None:
            files.enter_context(eigs.pop_all())
        for path in (paths.stats, *(path for path in paths.results if path not in written)):
            with _told(path):
                path.unlink(missing_ok=True)
        # Gone also after a power cut, before the first of the others is there.
        with _told(paths.stats):
            sync_folder(paths.stats.parent)


def _enter_replacing(files: ExitStack, path: Path) -> BinaryIO:
    """A file that takes the place of ``path`` when ``files`` ends; from now on its errors are told."""
    files.enter_context(_told(path))
    return files.enter_context(replacing(path))


def read_alphas(directory: ESDDirectory, model_id: str) -> StoredMatrix:
    """A model's alphas as a table of layers x modules. Raises FileNotFoundError, BadModel."""
    from gpuherd.esd.views import read_hdf5

    return read_hdf5(ModelPaths(directory, model_id).hdf5)


def read_sketches(directory: ESDDirectory, model_id: str) -> StoredSpectra:
    """A model's spectra in a hundred points each. Raises FileNotFoundError, BadModel."""
    from gpuherd.esd.spectrum_files import read_spectra

    return read_spectra(ModelPaths(directory, model_id).spectra)


def _installed(library: str) -> bool:
    """Whether it could be imported; does not import it."""
    try:
        return importlib.util.find_spec(library) is not None
    except (ImportError, ValueError):
        return False


class _NotWritten(Exception):
    """Ends the block of a file that is not to be kept."""


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror or problem}") from None


def make_folder(folder: Path) -> None:
    """Makes the folder before hours of work, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise CannotWrite(f"can't make {folder}: {problem.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotWrite(f"can't write in {folder}")
