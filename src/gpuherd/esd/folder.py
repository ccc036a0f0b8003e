"""The folder of an ESD experiment: where its files are, by which convention its results were made, and ``--resume``.

A convention is the value of each analysis option by name (``AnalysisOptions.convention_columns``), as it stands in
the rows of a stats file: figures depend on it, and results of two conventions must not stand in one table.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError, printable
from gpuherd.esd.config import CONVENTION, ExperimentConfig
from gpuherd.esd.views import first_row, stored_text
from gpuherd.jobs.options import foreign
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.models.names import safe_filename
from gpuherd.options import option_fields, spellings

logger = logging.getLogger(__name__)

# Called with how many are done, and how many there are.
OnProgress = Callable[[int, int], None]

# What is made of the data set of results, and can be made again from it (``remake``).
View = Literal["stats", "metrics", "summary"]
VIEWS: tuple[View, ...] = get_args(View)


class ESDDirectory(RunDirectory):
    """Paths of one experiment. Each model has a file of the same stem in each folder.

    Attributes:
        summary: a row a model.
        stats: a row a matrix, ``<model>.csv``; a model is done when this file is there. The others are written before.
        imported: the fragment of the data set that ``gpuherd esd import`` writes, of many models.
        coverage: a row a tensor of the checkpoint: analysed, or why not.
        metrics: the matrix of alphas, layers x modules.
        spectra: a few points of each spectrum, for plots.
        eigs: all eigenvalues, with --save-eigs.
    """

    def __init__(self, root: str | Path, log_dir: str | Path | None = None):
        super().__init__(root, log_dir)
        self.summary = self.root / "esd_results_summary.csv"
        self.stats = self.root / "stats"
        self.imported = self.stats / "imported.parquet"
        self.coverage = self.root / "coverage"
        self.metrics = self.root / "metrics"
        self.spectra = self.root / "spectra"
        self.eigs = self.root / "eigs"

    def stats_file(self, model_id: str) -> Path:
        """A model's stats file. ``/`` in an id is ``--``; the exact id stands in the file."""
        return self.stats / f"{safe_filename(model_id)}.csv"

    def stats_files(self) -> list[Path]:
        """The stats files that are there, by name."""
        return sorted(path for path in self.stats.glob("*.csv") if not path.name.startswith("."))

    @property
    def folders_of_results(self) -> tuple[Path, ...]:
        """The folders in which workers write."""
        return (self.coverage, self.eigs, self.spectra, self.metrics, self.stats)


# ---- what figures depend on, as text

# In place of our version, in rows that others computed: by our definitions only where docs/esd.md says so.
IMPORTED = "imported"
ORIGIN = "gpuherd_version"


def as_text(columns: Mapping[str, Any]) -> dict[str, str]:
    """A convention as its cells read back from a stats file. Of the version only whether others computed it is kept:
    two versions of gpuherd mean the same."""
    cells = {name: columns[name] for name in CONVENTION if name in columns}
    text = {name: "" if value is None else stored_text(str(value)) for name, value in cells.items()}
    return text | ({ORIGIN: IMPORTED} if str(columns.get(ORIGIN)) == IMPORTED else {})


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, ...]:
    """The names of what two conventions (``as_text``) don't share, in the order of the options."""
    names = dict.fromkeys((*CONVENTION, ORIGIN))
    return tuple(name for name in names if one.get(name) != other.get(name))


def format_convention(convention: Mapping[str, str], names: tuple[str, ...]) -> str:
    """These parts of a convention as text for messages.

    >>> format_convention({"fix_fingers": "DKS"}, ("fix_fingers", "ks"))
    'fix_fingers=DKS ks=(not said)'
    """
    return " ".join(_format_option(convention, name) for name in names)


def _format_option(convention: Mapping[str, str], name: str) -> str:
    if name == ORIGIN:
        return "imported" if name in convention else "computed by gpuherd"
    return f"{name}={convention[name] or '(none)'}" if name in convention else f"{name}=(not said)"


def run_record(directory: ESDDirectory) -> dict[str, Any]:
    """What run.json holds; nothing where that is no record. Raises OSError, ValueError."""
    record = json.loads(directory.run_json.read_text(encoding="utf-8"))
    return record if isinstance(record, dict) else {}


def failure_records(directory: ESDDirectory, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of failures.jsonl that are JSON objects, so many at most; one that a kill cut short is passed over."""
    try:
        with directory.failures.open(encoding="utf-8", errors="replace") as file:
            for line in itertools.islice(file, most):
                with suppress(ValueError):
                    if isinstance(record := json.loads(line), dict):
                        yield record
    except FileNotFoundError:
        return
    except OSError as problem:
        logger.warning("%s can't be read: %s", directory.failures, problem)


def recorded(directory: ESDDirectory) -> dict[str, str] | None:
    """The convention of the results that a folder holds or is to hold, None where there are none (a start that was
    refused leaves none): as its run.json says, or where that is gone or of no use, as the first of its stats files."""
    stats = directory.stats_files()
    if not stats and not _has_jobs(directory):
        return None
    convention = None
    with suppress(OSError, ValueError):
        convention = run_record(directory).get("convention")
    if isinstance(convention, str):  # as gpuherd 0.1 wrote it
        convention = dict(word.split("=", 1) for word in convention.split() if "=" in word)
    if isinstance(convention, dict):
        return as_text(convention)
    return next((found for found in map(_of_file, stats) if found is not None), None)


def _has_jobs(directory: ESDDirectory) -> bool:
    if not directory.queue.exists():
        return False
    from gpuherd.jobs.queue.store import Queue  # sqlite: not for those who read a table

    with Queue(directory.queue) as queue:
        return bool(queue.states())


def _of_file(path: Path) -> dict[str, str] | None:
    """The convention of a stats file, None where it can't be read or has none."""
    try:
        return as_text(first_row(path)) or None
    except (OSError, ValueError, csv.Error):
        return None


def _two_conventions(directory: ESDDirectory, convention: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the results of a folder were made with, and ``convention``, where they differ; None where they don't."""
    theirs, ours = recorded(directory), as_text(convention)
    names = () if theirs is None else differing(theirs, ours)
    return (format_convention(theirs, names), format_convention(ours, names)) if theirs is not None and names else None


def refuse_another(directory: ESDDirectory, convention: Mapping[str, Any], remedy: str) -> None:
    """Refuses a folder that holds results of another convention. Raises UsageError, which ends with ``remedy``."""
    if both := _two_conventions(directory, convention):
        raise UsageError(f"{directory.root} holds results made with {both[0]}; these have {both[1]}. {remedy}")


def refuse_to_mix(directory: ESDDirectory, convention: Mapping[str, Any], anew: Collection[Path]) -> None:
    """Refuses to make anew, by another convention, some of the results of a folder and leave the others.

    Args:
        anew: the stats files that will be replaced.

    Raises UsageError.
    """
    both = _two_conventions(directory, convention)
    if both and (others := [path.stem for path in directory.stats_files() if path not in anew]):
        raise UsageError(
            f"{directory.root} also holds results that this would not make anew ({len(others)}: "
            f"{', '.join(others[:3])}{', …' if len(others) > 3 else ''}), made with {both[0]} and not with {both[1]}. "
            "Choose another --output-dir"
        )


# ---- ``--resume``: list and options of an earlier run, from its run.json, and what may be changed in them

# What a run is about: the same again, or it is another run.
OF_THE_LIST = ("model_list", "single_model", "base_model", "limit", "mode")
# Neither kept nor changed: said anew each time. The record keeps of a webhook only its host.
OF_THE_MOMENT = ("overwrite", "dry_run", "enqueue_only", "webhook", "output_dir")


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """What a folder's run.json says: its options by name, and the folder in which the command was started."""

    root: Path
    options: Mapping[str, Any]
    cwd: Path


def earlier_run(directory: ESDDirectory) -> EarlierRun:
    """The run that a folder holds.

    Raises:
        UsageError: there is none, or its record can't be used.
    """
    where = directory.root
    try:
        record = run_record(directory)
    except FileNotFoundError:
        raise UsageError(f"there is no run to go on with in {where}: it has no run.json") from None
    except (OSError, ValueError) as problem:
        raise UsageError(f"{directory.run_json} can't be read: {problem}; give the options again instead") from None
    if "imported_from" in record:
        raise UsageError(f"{where} holds imported results: there is no run to go on with")
    options, cwd = record.get("config"), record.get("cwd")
    if not isinstance(options, dict) or not isinstance(cwd, str):
        raise UsageError(f"{directory.run_json} is no record of gpuherd esd; give the options again instead")
    unknown = sorted(options.keys() - {declared.name for declared in fields(ExperimentConfig)})
    if unknown:
        raise UsageError(
            f"{directory.run_json} is of another version of gpuherd: it has the option {unknown[0]!r}, unknown here; "
            "give the options again instead"
        )
    try:
        ExperimentConfig.from_dict({name: value for name, value in options.items() if name not in OF_THE_MOMENT})
    except (UsageError, TypeError, ValueError) as problem:
        raise UsageError(f"{directory.run_json} has no usable options: {problem}; give them again instead") from None
    return EarlierRun(where, options, Path(cwd))


def resumed(earlier: EarlierRun, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the run that goes on, by name: those of the earlier one, with what was given this time.

    Args:
        given: options by name, those alone that were said; ``model_list`` as an absolute path.

    Raises:
        UsageError: another list, other analysis options, or ``overwrite``: that would be another run.
    """
    if given.get("overwrite"):
        raise UsageError("--resume goes on with what is there and --overwrite does it anew; leave one of them out")
    for name in (*OF_THE_LIST, *CONVENTION):
        was = earlier.options.get(name, getattr(ExperimentConfig, name))  # else what an older gpuherd did
        if name in given and _comparable(name, given[name], earlier) != _comparable(name, was, earlier):
            kind = "another list" if name in OF_THE_LIST else "another convention, whose results don't mix"
            raise UsageError(
                f"the run in {earlier.root} has {_flag(name)} {_format_value(was)}, not "
                f"{_format_value(given[name])}: that would be {kind}; leave {_flag(name)} out, or take another "
                "--output-dir"
            )
    kept = {name: value for name, value in earlier.options.items() if name not in OF_THE_MOMENT}
    # A run of before there were engines was one of this machine. Words for another engine are of no use to this one.
    engine = given.get("engine", kept.setdefault("engine", LOCAL))
    kept = {name: value for name, value in kept.items() if name not in foreign(engine)}
    changed = {name: value for name, value in given.items() if name not in OF_THE_LIST}
    return kept | changed | {"output_dir": str(earlier.root)}


def _comparable(name: str, value: Any, earlier: EarlierRun) -> Any:
    """A value so that JSON's list and our tuple, and two ways to name one list, are the same."""
    if name == "model_list" and value is not None:
        return os.path.normpath(earlier.cwd / value)
    return list(value) if isinstance(value, tuple) else value


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = " ".join(value) if isinstance(value, list | tuple) else "" if value is None else str(value)
    return printable(text or "(none)")


def _flag(name: str) -> str:
    declared = {field.name: spec for field, spec in option_fields(ExperimentConfig)}
    return spellings(name, declared[name])[0][0]
