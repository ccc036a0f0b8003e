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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.errors import BadModel
from gpuherd.esd.config import CONVENTION
from gpuherd.esd.folder import IMPORTED, ORIGIN, ESDDirectory, OnProgress, refuse_another
from gpuherd.esd.model_files import ManyModels
from gpuherd.esd.results import numbers_of, parsed_csv
from gpuherd.esd.schema import LayerRow, kind_of_column
from gpuherd.esd.tails import tails
from gpuherd.esd.views import FIT_OK, Origin, is_number
from gpuherd.jobs.lock import DispatcherLock

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


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
    if long := next((at for at, row in enumerate(rows, 1) if None in row), None):
        return ValueError(f"row {long} has more cells than the heading")
    names = list(rows[0]) if rows else []
    return pa.table({name: pa.array([row[name] or "" for row in rows], pa.string()) for name in names})


def _read(paths: Sequence[Path]) -> dict[Path, tuple[Origin, pa.Table] | str]:
    """Of each file whose results it has and its cells as text; where it is of another kind, or of several models, what
    is wrong with it. Looked at as far as it goes without numbers."""
    found: dict[Path, tuple[Origin, pa.Table] | str] = dict.fromkeys(paths, "")
    contents: dict[Path, bytes] = {}
    for path in paths:
        try:
            contents[path] = path.read_bytes()
        except OSError as problem:
            found[path] = f"{path} can't be read: {problem}"
    for path, cells in zip(contents, _text_tables([*contents.values()]), strict=True):
        if isinstance(cells, ValueError):
            found[path] = f"{path} can't be read: {cells}"
            continue
        try:
            found[path] = _origin(path, cells), cells
        except BadModel as problem:
            found[path] = str(problem)
    return found


def _origin(path: Path, cells: pa.Table) -> Origin:
    """Raises BadModel for cells that are not those of one published model."""
    import pyarrow.compute as pc

    missing = [name for name in NEEDED if name not in cells.column_names]
    if missing or not cells.num_rows:
        without = "rows" if not cells.num_rows else f"column {missing[0]}"
        raise BadModel(f"{path} is no published stats file: it has no {without}")
    if ORIGIN in cells.column_names:
        raise BadModel(f"{path} is a stats file of gpuherd, by a convention of its own: name it or its run as it is")
    ids = pc.unique(cells["model_id"]).to_pylist()
    if not all(each.strip() for each in ids):
        raise BadModel(f"{path} should be of one model, and has a row without a model_id")
    if len(ids) > 1:
        raise BadModel(f"{path} should be of one model, not of {len(ids)}: {', '.join(sorted(ids)[:3])}")
    if pc.count_distinct(cells["longname"]).as_py() < cells.num_rows:
        names = Counter(cells["longname"].to_pylist())
        raise BadModel(f"{path} has two rows of {names.most_common(1)[0][0]!r}")

    def first(name: str) -> str:
        return str(cells[name][0].as_py()) if name in cells.column_names else ""

    adapter = first("is_adapter").lower() == "true"
    return Origin(
        model_id=ids[0],
        source_model=first("source_model") or None,
        relation=first("base_model_relation") or ("adapter" if adapter else ""),
        convention=CONVENTION_OF_IMPORTS,
        gpuherd_version=IMPORTED,
    )


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
            raise ValueError(_cell_name(cells, name, wrong[0]))
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

    try:
        numbers = numbers_of(cells[name].combine_chunks())
    except ValueError:
        wrong = next(at for at, cell in enumerate(cells[name].to_pylist()) if cell and not is_number(cell))
        raise ValueError(f"{_cell_name(cells, name, wrong)}, no number") from None
    if whole:
        fraction = (numbers != np.floor(numbers)) | (np.abs(numbers) > LARGEST_COUNT)
        if (odd := np.flatnonzero(fraction & ~np.isnan(numbers))).size:
            raise ValueError(f"{_cell_name(cells, name, odd[0])}, no whole number that could be a count")
    return numbers


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
                    out.write(good)
                yield from done
                if on_progress is not None:
                    on_progress(min(start + _TOGETHER, len(files)), len(files))


def _read_together(
    files: Sequence[Path], seen: dict[str, Path]
) -> tuple[list[Imported], list[tuple[Origin, pa.Table]]]:
    """What becomes of each file, and of those that are good whose they are and their figures.

    Args:
        seen: the files of all models so far, by id.
    """
    found = _read(files)
    figures = _converted({path: each[1] for path, each in found.items() if not isinstance(each, str)})
    done: list[Imported] = []
    good: list[tuple[Origin, pa.Table]] = []
    for path, each in found.items():
        columns = each if isinstance(each, str) else figures[path]
        if isinstance(each, str) or isinstance(columns, str):
            done.append(Imported(path, None, 0, 0, str(columns)))
        elif (model_id := each[0].model_id) in seen:
            done.append(Imported(path, None, 0, 0, f"{path}: {model_id} is in {seen[model_id].name} too"))
        else:
            seen[model_id] = path
            good.append((each[0], columns))
            fits = columns["fit_status"].to_pylist().count(FIT_OK)
            done.append(Imported(path, model_id, columns.num_rows, fits, None))
    return done, good


def _converted(files: Mapping[Path, pa.Table]) -> dict[Path, pa.Table | str]:
    """The figures of each file, or what is wrong with its cells. Files of the same columns are converted at once; where
    one of them is bad, each by itself."""
    import pyarrow as pa

    alike: dict[tuple[str, ...], list[Path]] = {}
    for path, cells in files.items():
        alike.setdefault(tuple(cells.column_names), []).append(path)
    found: dict[Path, pa.Table | str] = {}
    for group in alike.values():
        try:
            table = _figures(pa.concat_tables([files[path] for path in group]))
        except ValueError as problem:
            if len(group) == 1:
                found[group[0]] = f"{group[0]}: {problem}"
            else:
                for path in group:
                    found |= _converted({path: files[path]})
            continue
        start = 0
        for path in group:
            found[path] = table.slice(start, files[path].num_rows)
            start += files[path].num_rows
    return found
