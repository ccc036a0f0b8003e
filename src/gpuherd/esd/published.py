"""Results that others have published, as tables of ours: the stats files of the Model-Zoo.

Knows the columns of those files and what their figures mean. Where they differ from ours (docs/esd.md, "Published
results"), a figure is left out rather than put under a name that means something else here.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.errors import BadModel
from gpuherd.esd.config import CONVENTION
from gpuherd.esd.folder import IMPORTED, ORIGIN, ESDDirectory, refuse_another
from gpuherd.esd.model_files import ManyModels
from gpuherd.esd.results import numbers_of, parsed_csv
from gpuherd.esd.schema import LayerRow, kind_of_column
from gpuherd.esd.tails import tails
from gpuherd.esd.views import FIT_OK, Origin
from gpuherd.jobs.lock import DispatcherLock

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

OnProgress = Callable[[int, int], None]

# What their published runs say of themselves; what they don't say is left open.
KNOWN: Mapping[str, Any] = {
    "fix_fingers": "DKS",
    "evals_thresh": 1e-5,
    "bins": 100,
    "ks": "one-sided",
    "clip_xmax": False,
    "bootstrap": 0,
    "mp_fit": False,
    "randomize": False,
    "farms": False,
    "precision": "float32",
    "spectra_of": "weights",
} | {tail.name: False for tail in tails()}
CONVENTION_OF_IMPORTS: Mapping[str, Any] = {name: KNOWN.get(name) for name in CONVENTION}

NEEDED = ("model_id", "longname", "M", "N", "params", "alpha", "D", "num_evals", "norm")
# Without a valid fit theirs are computed from alpha = -1.
_OF_THE_FIT = ("alpha", "D", "alpha_weighted", "log_alpha_norm")
# From here on not every whole number is a double, as which theirs are read.
LARGEST_COUNT = 2**53
# Their xmin is the smallest eigenvalue that was kept, not where the tail starts.
_NOT_OURS = frozenset({"xmin"})


@dataclass(frozen=True, slots=True, eq=False)
class PublishedModel:
    """A model of a published file, as we write it: whose weights, and a column of each figure that the file has."""

    origin: Origin
    figures: pa.Table

    @property
    def rows(self) -> tuple[LayerRow, ...]:
        """A row a matrix."""
        return tuple(LayerRow(**row) for row in self.figures.to_pylist())


def read_published(path: Path) -> PublishedModel:
    """The model of one file. A row whose alpha is no valid one (theirs say -1) has no figures of a fit but a reason.

    Raises:
        BadModel: it is no such file.
    """
    (file,) = _read([path])
    if isinstance(file, str):
        raise BadModel(file)
    try:
        return PublishedModel(file.origin, _figures(file.cells))
    except ValueError as problem:
        raise BadModel(f"{path}: {problem}") from None


def _text_tables(files: Sequence[bytes]) -> list[pa.Table | ValueError]:
    """CSV files as columns of text, an empty cell as "", a row that is too short filled with these; the error of a
    damaged file in its place. Files of one header are parsed at once."""
    alike: dict[bytes, list[int]] = {}
    bodies: list[bytes] = []
    for at, data in enumerate(files):
        header, _, body = data.removeprefix(codecs.BOM_UTF8).partition(b"\n")
        bodies.append(body if body.endswith(b"\n") or not body else body + b"\n")
        alike.setdefault(header, []).append(at)
    found: dict[int, pa.Table | ValueError] = {}
    for header, group in alike.items():
        counts = [bodies[at].count(b"\n") for at in group]
        table = parsed_csv(b"".join((header, b"\n", *(bodies[at] for at in group))))
        if table is not None and table.num_rows == sum(counts):
            starts = itertools.accumulate(counts, initial=0)
            found |= {at: table.slice(start, count) for at, start, count in zip(group, starts, counts, strict=False)}
        else:
            found |= {at: _parsed_by_python(files[at]) for at in group}
    return [found[at] for at in range(len(files))]


def _parsed_by_python(data: bytes) -> pa.Table | ValueError:
    import pyarrow as pa

    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    except (ValueError, csv.Error) as problem:
        return ValueError(str(problem))
    names = [name for name in rows[0] if isinstance(name, str)] if rows else []
    return pa.table({name: pa.array([row[name] or "" for row in rows], pa.string()) for name in names})


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """A published file with its cells as text, looked at as far as it goes without numbers."""

    path: Path
    cells: pa.Table
    origin: Origin


def _read(paths: Sequence[Path]) -> list[_File | str]:
    """Reads files as text; in place of one of another kind, or of several models, what is wrong with it."""
    contents: list[bytes | OSError] = []
    for path in paths:
        try:
            contents.append(path.read_bytes())
        except OSError as problem:
            contents.append(problem)
    tables = iter(_text_tables([data for data in contents if isinstance(data, bytes)]))
    found: list[_File | str] = []
    for path, data in zip(paths, contents, strict=True):
        cells = data if isinstance(data, OSError) else next(tables)
        if isinstance(cells, Exception):
            found.append(f"{path} can't be read: {cells}")
            continue
        try:
            found.append(_one_model(path, cells))
        except BadModel as problem:
            found.append(str(problem))
    return found


def _one_model(path: Path, cells: pa.Table) -> _File:
    """Raises BadModel for cells that are not those of one published model."""
    import pyarrow.compute as pc

    missing = [name for name in NEEDED if name not in cells.column_names]
    if missing or not cells.num_rows:
        without = "rows" if not cells.num_rows else f"column {missing[0]}"
        raise BadModel(f"{path} is no published stats file: it has no {without}")
    if ORIGIN in cells.column_names:
        raise BadModel(f"{path} is a stats file of gpuherd, by a convention of its own: name it or its run as it is")
    ids = pc.unique(cells["model_id"]).to_pylist()
    if len(ids) > 1 or not ids[0]:
        raise BadModel(f"{path} should be of one model, not of {len(ids)}: {', '.join(sorted(ids)[:3])}")
    if pc.count_distinct(cells["longname"]).as_py() < cells.num_rows:
        names = Counter(cells["longname"].to_pylist())
        raise BadModel(f"{path} has two rows of {names.most_common(1)[0][0]!r}")

    def first(name: str) -> str:
        return str(cells[name][0].as_py()) if name in cells.column_names else ""

    adapter = first("is_adapter").lower() == "true"
    origin = Origin(
        model_id=ids[0],
        source_model=first("source_model") or None,
        relation=first("base_model_relation") or ("adapter" if adapter else ""),
        convention=CONVENTION_OF_IMPORTS,
        gpuherd_version=IMPORTED,
    )
    return _File(path, cells, origin)


def _figures(cells: pa.Table) -> pa.Table:
    """The columns of ``LayerRow`` that the cells have, typed. Raises ValueError, which names a cell, for one that is
    no number, or no count where a count must be."""
    import numpy as np
    import pyarrow as pa

    columns: dict[str, Any] = {"longname": cells["longname"].combine_chunks()}
    for declared in fields(LayerRow):
        kind = str(declared.type).split(" | ")[0]
        if kind != "str" and declared.name in cells.column_names and declared.name not in _NOT_OURS:
            columns[declared.name] = _numbers(cells, declared.name, whole=kind == "int")
    for name in ("M", "N", "params"):
        if (wrong := np.flatnonzero(~(columns[name] >= 1))).size:
            raise ValueError(f"{_cell_name(cells, name, wrong[0])}")
    valid = columns["alpha"] > 1
    for name in _OF_THE_FIT:
        if name in columns:
            columns[name] = np.where(valid, columns[name], np.nan)
    status = [FIT_OK] * cells.num_rows
    for at in np.flatnonzero(~valid):
        status[at] = _reason(columns["norm"][at], cells["alpha"][int(at)].as_py())
    columns["fit_status"] = pa.array(status, pa.string())
    return pa.table({name: _typed(name, values) for name, values in columns.items()})


def _numbers(cells: pa.Table, name: str, *, whole: bool) -> Floats:
    """A column as float64, NaN where a cell is empty, NaN or infinite. Raises ValueError."""
    import numpy as np

    text = cells[name].combine_chunks()
    try:
        numbers = numbers_of(text)
    except ValueError:
        for at, cell in enumerate(text.to_pylist()):
            _number(cells, name, at, cell)  # says which one it is
        raise
    if whole:
        fraction = (numbers != np.floor(numbers)) | (np.abs(numbers) > LARGEST_COUNT)
        if (wrong := np.flatnonzero(fraction & ~np.isnan(numbers))).size:
            raise ValueError(f"{_cell_name(cells, name, wrong[0])}, no whole number that could be a count")
    return numbers


def _number(cells: pa.Table, name: str, at: int, cell: str | None) -> float:
    try:
        return float(cell) if cell else math.nan
    except ValueError:
        raise ValueError(f"{_cell_name(cells, name, at)}, no number") from None


def _cell_name(cells: pa.Table, name: str, at: Any) -> str:
    return f"{cells['longname'][int(at)].as_py()}: {name} is {cells[name][int(at)].as_py()!r}"


def _typed(name: str, values: Any) -> pa.Array:
    """Numbers as the column that the schema declares, NaN as null; text as it is."""
    import numpy as np
    import pyarrow as pa

    if not isinstance(values, np.ndarray):
        return values
    none = np.isnan(values)
    if kind_of_column(name) == "int":
        return pa.array(np.where(none, 0, values).astype(np.int64), mask=none)
    return pa.array(values, mask=none)


def _reason(norm: float, alpha: str) -> str:
    """Why there is no alpha, as far as the other figures tell."""
    if math.isnan(norm):
        return "published without a fit: its norm is not finite, so some of the weights are NaN or infinite"
    if norm == 0:
        return "published without a fit: all weights are zero"
    return f"published without a fit: alpha {alpha or 'empty'}"


def published_files(folder: Path) -> Sequence[Path]:
    """The files of a folder that could be published stats, by name. Raises BadModel when there are none."""
    files = sorted(path for path in folder.glob("*.csv") if path.is_file() and not path.name.startswith("."))
    if not files:
        raise BadModel(f"there are no stats files (*.csv) in {folder}")
    return files


# ---- into a folder of results ----------------------------------------------------------------------------------------

# Files that are read, converted and written together: a row group of the fragment.
_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of one file: the model with its numbers of matrices and of valid fits, or the reason why not."""

    file: Path
    model_id: str | None
    layers: int
    fits: int
    problem: str | None


def import_published(
    source: Path, directory: ESDDirectory, on_progress: OnProgress | None = None
) -> Iterator[Imported]:
    """Writes a published folder's models into ``directory``, in order; a file that is bad harms no other.

    Each model gets its stats file; the data set gets one fragment with all of them at the end. The same import again
    writes the same bytes.

    Args:
        on_progress: called with how many files are done, and how many there are.

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
        with ManyModels(directory, CONVENTION_OF_IMPORTS) as out:
            for start in range(0, len(files), _TOGETHER):
                done, good = _read_together(files[start : start + _TOGETHER], seen)
                if good:
                    out.write([(model.origin, model.figures) for model in good])
                yield from done
                if on_progress is not None:
                    on_progress(min(start + _TOGETHER, len(files)), len(files))


def _read_together(files: Sequence[Path], seen: dict[str, Path]) -> tuple[list[Imported], list[PublishedModel]]:
    """What becomes of each file, and the models of those that are good. ``seen``: the files of all models so far."""
    found = dict(zip(files, _read(files), strict=True))
    figures = _converted([file for file in found.values() if not isinstance(file, str)])
    done: list[Imported] = []
    good: list[PublishedModel] = []
    for path, file in found.items():
        problem = file if isinstance(file, str) else None
        if not isinstance(file, str):
            model_id, columns = file.origin.model_id, figures[path]
            if isinstance(columns, str):
                problem = columns
            elif model_id in seen:
                problem = f"{path}: {model_id} is in {seen[model_id].name} too"
            else:
                seen[model_id] = path
                good.append(PublishedModel(file.origin, columns))
                fits = columns["fit_status"].to_pylist().count(FIT_OK)
                done.append(Imported(path, model_id, columns.num_rows, fits, None))
        if problem is not None:
            done.append(Imported(path, None, 0, 0, problem))
    return done, good


def _converted(files: Sequence[_File]) -> dict[Path, pa.Table | str]:
    """The figures of each file, or what is wrong with it. Files of the same columns are converted at once; where one of
    them is bad, each by itself."""
    import pyarrow as pa

    alike: dict[tuple[str, ...], list[_File]] = {}
    for file in files:
        alike.setdefault(tuple(file.cells.column_names), []).append(file)
    found: dict[Path, pa.Table | str] = {}
    for group in alike.values():
        try:
            table = _figures(pa.concat_tables([file.cells for file in group]))
        except ValueError as problem:
            if len(group) == 1:
                found[group[0].path] = f"{group[0].path}: {problem}"
            else:
                for file in group:
                    found |= _converted([file])
            continue
        start = 0
        for file in group:
            found[file.path] = table.slice(start, file.cells.num_rows)
            start += file.cells.num_rows
    return found
