"""What was found out about a model, read back from its stats file; and how people name such a file.

Light: the CSV alone is read, no numpy is imported. Knows columns and folders, no queue.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuherd.errors import BadModel, MissingModel, UsageError
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.tables.conventions import as_text
from gpuherd.esd.tables.stats import FIT_OK, SKIPPED, read_table


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
    except (KeyError, ValueError) as problem:
        raise BadModel(f"{path} is no stats file of gpuherd: {problem!r}") from None


def stats_files(directory: ESDDirectory) -> list[Path]:
    """The stats files of a folder, by name."""
    return sorted(path for path in directory.stats.glob("*.csv") if not path.name.startswith("."))


def find(words: str) -> list[Path]:
    """The stats files that ``words`` name: a file, ``RUN:model``, or ``RUN`` for all models of its folder.

    Raises:
        UsageError: nothing is there, with the nearest names of models.
    """
    path = Path(words)
    if path.is_file():
        return [path]
    if path.is_dir():
        directory = ESDDirectory(path)
        found = stats_files(directory)
        if not found:
            raise UsageError(f"there are no results in {path}: no stats/*.csv")
        return found
    folder, colon, model = words.rpartition(":")
    while colon and not Path(folder).is_dir():
        folder, colon, rest = folder.rpartition(":")
        model = f"{rest}:{model}"
    if not colon:
        raise UsageError(f"{words!r} is no stats file, no folder of a run and no RUN:model")
    return [model_in(ESDDirectory(folder), model)]


def model_in(directory: ESDDirectory, model: str) -> Path:
    """The stats file of a model by its id, by the name of its file, or for a model on disk by the name of its folder
    where no other model of the run has that. Raises UsageError with the nearest names."""
    found = {path.stem: path for path in stats_files(directory)}
    ours = directory.stats_file(model)
    if ours.is_file():
        return ours
    if model in found:
        return found[model]
    # A path's file name is its last part, a plus and a digest (models.names.safe_filename).
    on_disk = [path for stem, path in found.items() if stem.rpartition("+")[0] == model]
    if len(on_disk) == 1:
        return on_disk[0]
    import difflib  # slow to import, and seldom needed

    # An id and its file name differ in their slash.
    nearest = difflib.get_close_matches(model.replace("/", "--"), found, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0].replace('--', '/')}?" if nearest else ""
    raise UsageError(f"there is no model {model!r} in {directory.root}{hint}")


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
