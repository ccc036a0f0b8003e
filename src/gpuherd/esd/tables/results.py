"""What was found out about a model, read back from its stats file; and how people name such a file.

Light: the CSV alone is read, no numpy is imported. Knows columns and folders, no queue.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import BadModel, MissingModel, UsageError, printable
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.tables.conventions import as_text
from gpuherd.esd.tables.stats import FIT_OK, SKIPPED, first_row, read_table
from gpuherd.options import did_you_mean


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
