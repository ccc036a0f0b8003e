"""Takes published results into a folder of ours, so that report, compare and export work on them.

Knows what a folder may hold together and in which order things are written. What the figures mean is ``published``'s
business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuherd import __version__
from gpuherd.errors import BadModel
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.tables.conventions import IMPORTED, ORIGIN, refuse_another
from gpuherd.esd.tables.model_files import ModelPaths, make_folder, write_tables
from gpuherd.esd.tables.published import CONVENTION_OF_IMPORTS, published_files, read_published
from gpuherd.esd.tables.results import read_model
from gpuherd.esd.tables.stats import FIT_OK
from gpuherd.jobs.lock import DispatcherLock


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of one file: the model with its numbers of matrices and of valid fits, or the reason why not."""

    file: Path
    model_id: str | None
    layers: int
    fits: int
    problem: str | None


def import_published(source: Path, directory: ESDDirectory) -> Iterator[Imported]:
    """Writes a published folder's models into ``directory``, one after the other; a file that is bad harms no other.

    The same import again writes the same bytes.

    Raises:
        BadModel: there are no such files in ``source``.
        UsageError: the folder holds results of another convention.
        CannotWrite: the folder can't be written.
        QueueBusy: gpuherd works in it.
    """
    files = published_files(source)
    convention = dict(CONVENTION_OF_IMPORTS) | {ORIGIN: IMPORTED}
    directory.create()
    with closing(DispatcherLock(directory.lock)):
        refuse_another(directory, convention, "Choose another --output-dir")
        directory.write_run_record(
            {
                "imported_from": str(source.absolute()),
                "convention": convention,
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": {"gpuherd": __version__},
            }
        )
        seen: dict[str, Path] = {}
        for file in files:
            yield _import_one(file, directory, seen)


def _import_one(file: Path, directory: ESDDirectory, seen: dict[str, Path]) -> Imported:
    try:
        model = read_published(file)
        model_id = model.origin.model_id
        if model_id in seen:
            raise BadModel(f"{file}: {model_id} is in {seen[model_id].name} too")
        paths = ModelPaths(directory, model_id)
        for folder in {path.parent for path in (paths.stats, paths.hdf5)}:
            make_folder(folder)
        write_tables(paths, model.origin, model.rows)
        # What can't be read back is told now, not by the report.
        read_model(paths.stats)
    except BadModel as problem:
        return Imported(file, None, 0, 0, str(problem))
    seen[model_id] = file
    return Imported(file, model_id, len(model.rows), sum(row.fit_status == FIT_OK for row in model.rows), None)
