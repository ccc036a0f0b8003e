"""Results that others have published, as tables of ours: the stats files of the Model-Zoo.

Knows the columns of those files and what their figures mean. Where they differ from ours (docs/esd.md, "Published
results"), a figure is left out rather than put under a name that means something else here.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuherd import __version__
from gpuherd.errors import BadModel
from gpuherd.esd.config import CONVENTION
from gpuherd.esd.conventions import IMPORTED, ORIGIN, refuse_another
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.results import ModelPaths, make_folder, read_model, write_tables
from gpuherd.esd.row import LayerRow
from gpuherd.esd.views import FIT_OK, Origin
from gpuherd.jobs.lock import DispatcherLock

# What their published runs say of themselves; what they don't say is left open.
KNOWN: Mapping[str, Any] = {
    "fix_fingers": "DKS",
    "evals_thresh": 1e-5,
    "bins": 100,
    "ks": "one-sided",
    "clip_xmax": False,
    "bootstrap": 0,
    "tpl": False,
    "mp_fit": False,
    "randomize": False,
    "farms": False,
    "precision": "float32",
    "spectra_of": "weights",
}
CONVENTION_OF_IMPORTS: Mapping[str, Any] = {name: KNOWN.get(name) for name in CONVENTION}

NEEDED = ("model_id", "longname", "M", "N", "params", "alpha", "D", "num_evals", "norm")
# Without a valid fit theirs are computed from alpha = -1.
_OF_THE_FIT = ("alpha", "D", "alpha_weighted", "log_alpha_norm")
# From here on not every whole number is a double, as which theirs are read.
LARGEST_COUNT = 2**53
# Their xmin is the smallest eigenvalue that was kept, not where the tail starts.
_NOT_OURS = frozenset({"xmin"})


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of a published file, as we write it."""

    origin: Origin
    rows: tuple[LayerRow, ...]


def read_published(path: Path) -> PublishedModel:
    """The model of one file. A row whose alpha is no valid one (theirs say -1) has no figures of a fit but a reason.

    Raises:
        BadModel: it is no such file.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
    except (OSError, ValueError, csv.Error) as problem:
        raise BadModel(f"{path} can't be read: {problem}") from None
    missing = [name for name in NEEDED if not rows or rows[0].get(name) is None]
    if missing:
        raise BadModel(f"{path} is no published stats file: it has no {'rows' if not rows else 'column ' + missing[0]}")
    if ORIGIN in rows[0]:
        raise BadModel(f"{path} is a stats file of gpuherd, by a convention of its own: name it or its run as it is")
    ids = {row["model_id"] for row in rows}
    if len(ids) > 1 or not next(iter(ids)):
        raise BadModel(f"{path} should be of one model, not of {len(ids)}: {', '.join(sorted(ids)[:3])}")
    twice = next((name for name, times in Counter(row["longname"] for row in rows).items() if times > 1), None)
    if twice is not None:
        raise BadModel(f"{path} has two rows of {twice!r}")
    try:
        layers = tuple(_layer(row) for row in rows)
    except (ValueError, TypeError) as problem:
        raise BadModel(f"{path}: {problem}") from None
    adapter = rows[0].get("is_adapter", "").lower() == "true"
    return PublishedModel(
        Origin(
            model_id=rows[0]["model_id"],
            source_model=rows[0].get("source_model") or None,
            relation=rows[0].get("base_model_relation") or ("adapter" if adapter else ""),
            convention=CONVENTION_OF_IMPORTS,
            gpuherd_version=IMPORTED,
        ),
        layers,
    )


def _layer(row: Mapping[str, str]) -> LayerRow:
    """One row. Raises ValueError for a cell that is no number."""
    values: dict[str, Any] = {"longname": row["longname"]}
    for declared in fields(LayerRow):
        if declared.name in row and declared.name not in _NOT_OURS | values.keys():
            values[declared.name] = _cell(row, declared.name, str(declared.type).startswith("int"))
    for name in ("M", "N", "params"):
        if values[name] is None or values[name] < 1:
            raise ValueError(f"{row['longname']}: {name} is {row[name]!r}")
    alpha = values["alpha"]
    if alpha is not None and alpha > 1:
        return LayerRow(**values, fit_status=FIT_OK)
    values.update(dict.fromkeys(_OF_THE_FIT))
    return LayerRow(**values, fit_status=_reason(row))


def _cell(row: Mapping[str, str], name: str, whole: bool) -> int | float | None:
    """A figure, None where it is empty, NaN or infinite. Raises ValueError for text, and for a count that is none."""
    text = row[name]
    try:
        value = float(text) if text else math.nan
    except ValueError:
        raise ValueError(f"{row['longname']}: {name} is {text!r}, no number") from None
    if not math.isfinite(value):
        return None
    if whole and not (value.is_integer() and abs(value) <= LARGEST_COUNT):
        raise ValueError(f"{row['longname']}: {name} is {text!r}, no whole number that could be a count")
    return int(value) if whole else value


def _reason(row: Mapping[str, str]) -> str:
    """Why there is no alpha, as far as the other figures tell."""
    norm = _cell(row, "norm", whole=False)
    if norm is None:
        return "published without a fit: its norm is not finite, so some of the weights are NaN or infinite"
    if norm == 0:
        return "published without a fit: all weights are zero"
    return f"published without a fit: alpha {row['alpha'] or 'empty'}"


def published_files(folder: Path) -> Sequence[Path]:
    """The files of a folder that could be published stats, by name. Raises BadModel when there are none."""
    files = sorted(path for path in folder.glob("*.csv") if path.is_file() and not path.name.startswith("."))
    if not files:
        raise BadModel(f"there are no stats files (*.csv) in {folder}")
    return files


# Takes published results into a folder of ours, so that report, compare and export work on them.
#
# Knows what a folder may hold together and in which order things are written. What the figures mean is
# ``published``'s business.


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
