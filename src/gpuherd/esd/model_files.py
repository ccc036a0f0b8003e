"""Writes results: all files of one model, from the first spectrum to the last rename; or those of many models at once.

All are on the disk before the first of them takes its place, and the stats CSV does so last: its presence says that the
others are there and belong to it, also where they replace those of an earlier analysis. The fragment of the data set
and the stats file that is its view have one time of their last change. Each file's form is its own module's business.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpuherd.atomic import replacing, sync_file, sync_folder
from gpuherd.errors import CannotWrite, MissingExtra
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.schema import SPECTRUM, column, kind_of_column, schema
from gpuherd.esd.views import (
    Origin,
    alpha_matrix,
    csv_rows,
    header_text,
    map_distinct,
    stats_rows,
    stored_text,
    table_text,
)
from gpuherd.runs.files import raising_cannot_write

if TYPE_CHECKING:
    from types import TracebackType

    import pyarrow as pa

    from gpuherd.esd.schema import LayerRow
    from gpuherd.esd.spectra.pooled import LayerSpectrum
    from gpuherd.esd.spectrum_files import EigsWriter, Sketch


_SYNCED_TOGETHER = 1024
_SYNCING_THREADS = 16
# The key in a fragment of many models: of each its file name without suffix, and its number of rows, in order.
MODELS = b"gpuherd.models"


def parquet_bytes(rows: Sequence[Mapping[str, Any]], sketches: Mapping[int, Sketch] | None = None) -> bytes:
    """The table of ``views.stats_rows`` as a Parquet file: text, int64, float64 and bool columns, null for no value.
    With ``sketches``, by the row's index, also the column of downsampled spectra.

    A column's type is the one that ``LayerRow`` or ``AnalysisOptions`` declares, so that it is the same for all models,
    also where one of them has no value in it. The same rows give the same bytes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {stored_text(name): _column(name, [row.get(name) for row in rows]) for name in names}
    if sketches is not None:
        from gpuherd.esd.spectrum_files import spectrum_column

        columns[SPECTRUM] = spectrum_column(sketches, len(rows))
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd")
    return out.getvalue()


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    kind = kind_of_column(name, values)
    if kind == "str":
        values = [None if value is None else stored_text(str(value)) for value in values]
    return column(kind, values)


class ModelPaths:
    """Where the files of one model are, there or not.

    Attributes:
        stats: a row a matrix; the model is done when this is there.
        parquet: the same with types, and a hundred points of each spectrum.
        hdf5: the alphas, layers x modules.
        matrix: the same as Parquet.
        spectra: the points of each spectrum, where an earlier version of gpuherd wrote them.
        eigs: all eigenvalues, with --save-eigs.
        coverage: every tensor of the checkpoint; also there where nothing could be fitted.
    """

    def __init__(self, directory: ESDDirectory, model_id: str):
        self.stats = directory.stats_file(model_id)
        stem = self.stats.stem
        self.parquet = directory.stats / f"{stem}.parquet"
        self.hdf5 = directory.metrics / f"{stem}.h5"
        self.matrix = directory.metrics / f"{stem}.parquet"
        self.spectra = directory.spectra / f"{stem}.npz"
        self.eigs = directory.eigs / f"{stem}.parquet"
        self.coverage = directory.coverage / f"{stem}.csv"

    @property
    def results(self) -> tuple[Path, ...]:
        """All that ``ModelResultFiles`` writes; the stats file, by which the others count, is the first to go."""
        return (self.stats, self.parquet, self.hdf5, self.matrix, self.eigs)

    @property
    def removed(self) -> tuple[Path, ...]:
        """All that goes with an analysis: ``results``, and what only earlier versions wrote."""
        return (*self.results, self.spectra)


class ModelResultFiles:
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
            if importlib.util.find_spec(library) is None:
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

    def __enter__(self) -> ModelResultFiles:
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
        # On a full disk closing fails as well: the first error is the one that is raised.
        with suppress(_NotWritten, OSError):
            self._open.__exit__(_NotWritten, _NotWritten(), None)

    def keep_spectrum(self, index: int, spectrum: LayerSpectrum) -> None:
        """Takes the spectrum of matrix ``index``: for ``analyse_matrices(…, on_spectrum=)``."""
        from gpuherd.esd.spectrum_files import sketch_of

        if spectrum.problem is not None:
            return
        self._sketches[index] = sketch_of(spectrum.evals, self._evals_thresh)
        if self._eigs is not None:
            with raising_cannot_write(self.paths.eigs):
                self._eigs.add(index, self._longnames[index], spectrum.evals)

    def write(self, origin: Origin, rows: Sequence[LayerRow], coverage: str) -> None:
        """Writes all files, the stats CSV last.

        Args:
            origin: whose weights these are.
            rows: by index; at least one.
            coverage: the table of all tensors, as CSV text.
        """
        contents = _tables(self.paths, origin, rows, self._sketches) | {self.paths.coverage: coverage.encode("utf-8")}
        if self._eigs is None:
            _replace(self.paths, contents, None)
            return
        with raising_cannot_write(self.paths.eigs):
            self._eigs.close()
        self._eigs = None
        _replace(self.paths, contents, self._open)

    def remove(self) -> None:
        """Removes the results of an earlier analysis, which would now look like this one's."""
        for path in self.paths.removed:
            with raising_cannot_write(path):
                path.unlink(missing_ok=True)


def _tables(
    paths: ModelPaths, origin: Origin, rows: Sequence[LayerRow], sketches: Mapping[int, Sketch]
) -> dict[Path, bytes]:
    from gpuherd.esd.views import about_text, hdf5_bytes, matrix_parquet_bytes

    about = about_text(origin.lineage | origin.last_columns)
    cells = stats_rows(origin, rows)
    matrix = alpha_matrix((row.longname, row.alpha) for row in rows)
    return {
        paths.stats: table_text(cells).encode("utf-8"),
        paths.parquet: parquet_bytes(cells, sketches),
        paths.hdf5: hdf5_bytes(about, matrix),
        paths.matrix: matrix_parquet_bytes(about, matrix),
    }


def _replace(paths: ModelPaths, contents: Mapping[Path, bytes], eigs: ExitStack | None) -> None:
    """Puts the files in place, the first of ``contents``, the stats, last, and removes other files of an earlier
    analysis.

    Where one can't be written, those of the earlier analysis stay. While they are replaced there is no stats file.

    ``eigs``: holds the file of eigenvalues, written already, and is emptied when that is to take its place; None where
    there is none.
    """
    kept = {*contents, paths.eigs} if eigs is not None else {*contents}
    with ExitStack() as files:
        written = time.time_ns()
        for path, data in contents.items():
            file = _enter_replacing(files, path)
            with raising_cannot_write(path):
                file.write(data)
                file.flush()
                _stamp(file, written)
        if eigs is not None:
            files.enter_context(eigs.pop_all())
        for path in (paths.stats, *(path for path in paths.removed if path not in kept)):
            with raising_cannot_write(path):
                path.unlink(missing_ok=True)
        # Gone also after a power cut, before the first of the others is there.
        with raising_cannot_write(paths.stats):
            sync_folder(paths.stats.parent)


def _stamp(file: BinaryIO, written: int) -> None:
    """Gives a fragment of the data set and the stats files that belong to it one time of their last change, by which a
    reader sees that neither was written again without the other."""
    os.utime(file.fileno(), ns=(written, written))


def write_view(path: Path, data: bytes, written: int | None = None) -> None:
    """Writes a view of the data set again, whole or not at all.

    Args:
        written: for a stats file: when its fragment was last changed, which then speaks for it. None for others.

    Raises CannotWrite.
    """
    make_folder(path.parent)
    with raising_cannot_write(path), replacing(path) as file:
        file.write(data)
        file.flush()
        if written is not None:
            _stamp(file, written)


class ManyModels:
    """Writes the results of many models: the stats file of each, and at the end one fragment with all of them.

    A context manager. Where it ends early, the stats files that took their places are results all the same. Files are
    synced by the hundred, many at a time: a file system then writes its journal once for several of them.

    Args:
        directory: the run's folder.
        convention: of all the models.

    Raises:
        CannotWrite: a folder or file can't be written; also from the methods.
    """

    def __init__(self, directory: ESDDirectory, convention: Mapping[str, Any]):
        make_folder(directory.stats)
        self._directory = directory
        self._schema = schema(convention)
        self._header = header_text(self._schema.names)
        self._models: list[tuple[str, int]] = []
        self._waiting: list[tuple[Path, ModelPaths]] = []
        self._written = time.time_ns()
        self._open = ExitStack()

    def __enter__(self) -> ManyModels:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._file = _enter_replacing(self._open, self._directory.imported)
        self._fragment = pq.ParquetWriter(pa.PythonFile(self._file, mode="w"), self._schema, compression="zstd")
        return self

    def __exit__(self, *problem: Any) -> None:
        if problem[0] is not None:
            for temporary, _ in self._waiting:
                temporary.unlink(missing_ok=True)
            with suppress(OSError):
                self._fragment.close()
            self._open.__exit__(*problem)
            return
        with self._open, raising_cannot_write(self._directory.imported):
            self._put_in_place()
            self._fragment.add_key_value_metadata({MODELS: json.dumps(self._models)})
            self._fragment.close()
            self._file.flush()
            _stamp(self._file, self._written)

    def write(self, models: Sequence[tuple[Origin, pa.Table]]) -> None:
        """Writes some models, each by whose it is and by its columns of figures; others than those of the schema are
        left out."""
        table = self._table(models)
        lines = csv_rows(table)
        start = 0
        for origin, figures in models:
            body = lines.slice(start, figures.num_rows)
            start += figures.num_rows
            paths = ModelPaths(self._directory, origin.model_id)
            self._models.append((paths.stats.stem, figures.num_rows))
            temporary = paths.stats.with_name(f".{paths.stats.name[:100]}.{os.urandom(8).hex()}.tmp")
            self._waiting.append((temporary, paths))
            with raising_cannot_write(paths.stats), temporary.open("xb") as file:
                file.write("".join((self._header, *body.to_pylist())).encode("utf-8"))
                file.flush()
                _stamp(file, self._written)
        with raising_cannot_write(self._directory.imported):
            self._fragment.write_table(table, row_group_size=table.num_rows)
        if len(self._waiting) >= _SYNCED_TOGETHER:
            self._put_in_place()

    def _put_in_place(self) -> None:
        """Lets the stats files that were written replace those of an earlier analysis, and removes its other files."""
        with ThreadPoolExecutor(_SYNCING_THREADS) as pool:
            synced = [(paths.stats, pool.submit(sync_file, temporary)) for temporary, paths in self._waiting]
        for path, done in synced:
            with raising_cannot_write(path):
                done.result()
        while self._waiting:
            temporary, paths = self._waiting.pop()
            with raising_cannot_write(paths.stats):
                for path in paths.removed[1:]:
                    if path != self._directory.imported:
                        path.unlink(missing_ok=True)
                temporary.replace(paths.stats)
        with raising_cannot_write(self._directory.stats):
            sync_folder(self._directory.stats)

    def _table(self, models: Sequence[tuple[Origin, pa.Table]]) -> pa.Table:
        """The rows of the models with all columns."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        figures = pa.concat_tables([columns for _, columns in models], promote_options="default")
        whose = np.repeat(np.arange(len(models)), [columns.num_rows for _, columns in models])
        about = [origin.lineage | origin.last_columns for origin, _ in models]
        columns = []
        for field in self._schema:
            if field.name in about[0]:
                found = pc.take(_column(field.name, [each[field.name] for each in about]), pa.array(whose))
            elif field.name in figures.column_names:
                found = figures[field.name].combine_chunks()
                found = map_distinct(found, stored_text) if pa.types.is_string(field.type) else found
            else:
                found = pa.nulls(len(whose), field.type)
            columns.append(found)
        return pa.table(columns, schema=self._schema)


def _enter_replacing(files: ExitStack, path: Path) -> BinaryIO:
    """A file that takes the place of ``path`` when ``files`` ends; from now on its errors are raised."""
    files.enter_context(raising_cannot_write(path))
    return files.enter_context(replacing(path))


class _NotWritten(Exception):
    """Ends the block of a file that is not to be kept."""


def make_folder(folder: Path) -> None:
    """Makes the folder before hours of work, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise CannotWrite(f"can't make {folder}: {problem.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotWrite(f"can't write in {folder}")
