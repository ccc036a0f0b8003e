"""All files of one model, from the first spectrum to the last rename; and where each of them is read again.

All are on the disk before the first of them takes its place, and the stats CSV does so last: its presence says that the
others are there and belong to it, also where they replace those of an earlier analysis. Knows the order and the folder;
each file's form is its own module's business.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpuherd.atomic import replacing, sync_folder
from gpuherd.errors import CannotWrite, MissingExtra
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.tables.alpha_matrix import alpha_matrix
from gpuherd.esd.tables.stats import Origin, stats_rows, stored_text, table_text

if TYPE_CHECKING:
    from types import TracebackType

    from gpuherd.esd.row import LayerRow
    from gpuherd.esd.spectra.pooled import LayerSpectrum
    from gpuherd.esd.tables.eigs_file import EigsWriter
    from gpuherd.esd.tables.metrics_file import StoredMatrix
    from gpuherd.esd.tables.sketch import Sketch
    from gpuherd.esd.tables.spectra_file import StoredSpectra


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
            from gpuherd.esd.tables.eigs_file import EigsWriter

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
        from gpuherd.esd.tables.sketch import sketch_of

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
        from gpuherd.esd.tables.spectra_file import spectra_bytes

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
    from gpuherd.esd.tables.metrics_file import hdf5_bytes, matrix_parquet_bytes
    from gpuherd.esd.tables.stats_parquet import parquet_bytes

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
    from gpuherd.esd.tables.metrics_file import read_hdf5

    return read_hdf5(ModelPaths(directory, model_id).hdf5)


def read_sketches(directory: ESDDirectory, model_id: str) -> StoredSpectra:
    """A model's spectra in a hundred points each. Raises FileNotFoundError, BadModel."""
    from gpuherd.esd.tables.spectra_file import read_spectra

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
