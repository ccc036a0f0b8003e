"""Makes the views of a folder's results again: stats CSV, tables of alphas, summary. ``gpuherd esd views``.

The data set (``stats/*.parquet``) is what results are stored in. A stats file that is missing or damaged is made again
from there; one that was changed by hand holds its model's results, and stays. The tables of alphas and the summary are
made of the results as every reader reads them. A view that is as it should be is not written.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.errors import BadModel, MissingModel, UsageError
from gpuherd.esd.folder import VIEWS, ESDDirectory, OnProgress, View
from gpuherd.esd.model_files import write_view
from gpuherd.esd.results import (
    ModelTable,
    Unreadable,
    fragment_rows,
    fragments,
    matrix_of,
    models_of_fragment,
    read_model,
    read_tables,
    table_of_rows,
)
from gpuherd.esd.summary import ModelSummary, rows_of_all, summaries_of
from gpuherd.esd.views import about_text, csv_rows, hdf5_bytes, header_text, matrix_parquet_bytes, table_text
from gpuherd.jobs.lock import DispatcherLock

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)


_THREADS = 16  # that write and sync files
_WAITING = 256  # files in memory at most


@dataclass(slots=True)
class Remade:
    """What became of one kind of views.

    Attributes:
        written: files that were missing or differed; in a dry run those that would be written.
        unchanged: how many were as they should be.
        kept: stats files that were changed by hand.
        problems: results that can't be read, and why.
    """

    written: list[Path] = field(default_factory=list)
    unchanged: int = 0
    kept: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def make_views(
    directory: ESDDirectory,
    kinds: Collection[View] = VIEWS,
    *,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[View, Remade]:
    """Makes the views of these kinds again where they are not as they should be.

    Args:
        dry_run: only find out which.
        on_progress: called with how many models are done, and how many there are.

    Raises:
        UsageError: the folder holds no results.
        CannotWrite: a view can't be written.
        QueueBusy: gpuherd works in the folder.
    """
    files = fragments(directory)
    if not files and not directory.stats_files():
        raise UsageError(
            f"there are no results in {directory.root} (no stats/*.parquet); name the folder of an esd run"
        )
    with nullcontext() if dry_run else closing(DispatcherLock(directory.lock)):
        done = {kind: Remade() for kind in VIEWS if kind in kinds}
        with _Writer(dry_run=dry_run) as writer:
            lost = _stats(directory, files, done.get("stats"), writer)
            results = _results(directory, lost, on_progress)
            if "metrics" in done:
                results = _with_metrics(directory, results, done["metrics"], writer)
            summaries = _summaries(directory, results, done)
            if "summary" in done and (rows := rows_of_all(directory, summaries)):
                writer.write(done["summary"], directory.summary, table_text(rows).encode("utf-8"))
    return done


class _Writer:
    """Writes files in threads, so that many are synced at a time. Raises CannotWrite when it is left, or before."""

    def __init__(self, *, dry_run: bool) -> None:
        self._dry_run = dry_run
        self._pool = ThreadPoolExecutor(_THREADS)
        self._waiting: list[Future[None]] = []

    def write(self, view: Remade, path: Path, data: bytes, written: int | None = None) -> None:
        """Writes the file unless it holds this already; see ``model_files.write_view``."""
        if written is None and _bytes_of(path) == data:
            view.unchanged += 1
            return
        view.written.append(path)
        if not self._dry_run:
            self._waiting.append(self._pool.submit(write_view, path, data, written))
            if len(self._waiting) >= _WAITING:
                self._finish()

    def _finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.result()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        with self._pool:
            if kind is None:
                self._finish()


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


# ---- stats files


def _stats(directory: ESDDirectory, files: Collection[Path], view: Remade | None, writer: _Writer) -> dict[str, Path]:
    """Makes stats files again, where ``view`` is not None. Returns the models that have none that can be read, by the
    stem of their files, each with its fragment."""
    lost: dict[str, Path] = {}
    seen: set[str] = set()
    for fragment in files:
        changed = fragment.stat().st_mtime_ns
        other: list[str] = []
        for stem in models_of_fragment(fragment):
            path = directory.stats / f"{stem}.csv"
            if stem in seen:
                continue
            seen.add(stem)
            if not path.exists():
                lost[stem] = fragment
            elif path.stat().st_mtime_ns != changed:
                other.append(stem)
                if not _is_readable(path):
                    lost[stem] = fragment
            elif view is not None:
                view.unchanged += 1
        if view is None:
            continue
        mine = {stem for stem, file in lost.items() if file == fragment}
        try:
            for stem, rows in fragment_rows(fragment, mine.union(other)):
                path, text = directory.stats / f"{stem}.csv", _csv(rows)
                if stem in mine or _bytes_of(path) == text:
                    # The same once more, so that its time of change says that the fragment speaks for it.
                    writer.write(view, path, text, changed)
                else:
                    view.kept.append(path)
        except BadModel as problem:
            view.problems.append(str(problem))
    return lost


def _csv(rows: pa.Table) -> bytes:
    return (header_text(rows.column_names) + "".join(csv_rows(rows).to_pylist())).encode("utf-8")


def _is_readable(path: Path) -> bool:
    try:
        read_model(path)
    except (BadModel, MissingModel):
        return False
    return True


# ---- tables of alphas, and the summary


def _results(
    directory: ESDDirectory, lost: Mapping[str, Path], on_progress: OnProgress | None
) -> Iterator[ModelTable | Unreadable]:
    """The results of all models: of those whose stats file was made again, or would be, from the data set."""
    stats = [path for path in directory.stats_files() if path.stem not in lost]
    total, done = len(stats) + len(lost), 0

    def all_of_them() -> Iterator[ModelTable | Unreadable]:
        yield from read_tables(directory, stats)
        for fragment in dict.fromkeys(lost.values()):
            stems = {stem for stem, file in lost.items() if file == fragment}
            try:
                for stem, rows in fragment_rows(fragment, stems):
                    yield table_of_rows(stem, rows)
            except BadModel as problem:
                yield from (Unreadable(directory.stats / f"{stem}.csv", str(problem)) for stem in stems)

    for done, each in enumerate(all_of_them(), 1):
        yield each
        if on_progress is not None:
            on_progress(done, total)


def _with_metrics(
    directory: ESDDirectory, results: Iterator[ModelTable | Unreadable], view: Remade, writer: _Writer
) -> Iterator[ModelTable | Unreadable]:
    """Passes the results on, and makes the table of alphas of each."""
    for model in results:
        if isinstance(model, ModelTable):
            about, matrix = about_text(model.about), matrix_of(model)
            writer.write(view, directory.metrics / f"{model.stem}.h5", hdf5_bytes(about, matrix))
            writer.write(view, directory.metrics / f"{model.stem}.parquet", matrix_parquet_bytes(about, matrix))
        yield model


def _summaries(
    directory: ESDDirectory, results: Iterator[ModelTable | Unreadable], done: Mapping[View, Remade]
) -> list[ModelSummary]:
    """The summary of each model. A problem of a model is reported once, with the last kind of views."""
    problems = list(done.values())[-1].problems
    if "summary" not in done:
        problems += [each.problem for each in results if isinstance(each, Unreadable)]
        return []
    found = summaries_of(directory, results).values()
    problems += [each for each in found if isinstance(each, str)]
    return [each for each in found if isinstance(each, ModelSummary)]
