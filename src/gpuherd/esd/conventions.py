"""What figures depend on, as text: how two results are told apart that must not stand in one table.

A convention is the value of each analysis option by name (``AnalysisOptions.convention_columns``), as it stands in the
rows of a stats file. Pure, but for what reads the convention that a folder holds.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.esd.config import CONVENTION
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.views import first_row, stored_text

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


def told(convention: Mapping[str, str], names: tuple[str, ...]) -> str:
    """These parts of a convention as words for people.

    >>> told({"fix_fingers": "DKS"}, ("fix_fingers", "ks"))
    'fix_fingers=DKS ks=(not said)'
    """
    return " ".join(_told(convention, name) for name in names)


def _told(convention: Mapping[str, str], name: str) -> str:
    if name == ORIGIN:
        return "imported" if name in convention else "computed by gpuherd"
    return f"{name}={convention[name] or '(none)'}" if name in convention else f"{name}=(not said)"


def recorded(directory: ESDDirectory) -> dict[str, str] | None:
    """The convention of the results that a folder holds or is to hold, None where there are none (a start that was
    refused leaves none): as its run.json says, or where that is gone or of no use, as the first of its stats files."""
    stats = directory.stats_files()
    if not stats and not _has_jobs(directory):
        return None
    try:
        record = json.loads(directory.run_json.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = None
    convention = record.get("convention") if isinstance(record, dict) else None
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


def refuse_another(directory: ESDDirectory, convention: Mapping[str, Any], remedy: str) -> None:
    """Refuses a folder that holds results of another convention. Raises UsageError, which ends with ``remedy``."""
    theirs, ours = recorded(directory), as_text(convention)
    names = () if theirs is None else differing(theirs, ours)
    if theirs is not None and names:
        raise UsageError(
            f"{directory.root} holds results made with {told(theirs, names)}; these have {told(ours, names)}. {remedy}"
        )


def refuse_to_mix(directory: ESDDirectory, convention: Mapping[str, Any], anew: Collection[Path]) -> None:
    """Refuses to make anew, by another convention, some of the results of a folder and leave the others.

    Args:
        anew: the stats files that will be replaced.

    Raises UsageError.
    """
    theirs, ours = recorded(directory), as_text(convention)
    names = () if theirs is None else differing(theirs, ours)
    others = [path.stem for path in directory.stats_files() if path not in anew] if names else []
    if theirs is not None and others:
        raise UsageError(
            f"{directory.root} also holds results that this would not make anew ({len(others)}: "
            f"{', '.join(others[:3])}{', …' if len(others) > 3 else ''}), made with {told(theirs, names)} and not with "
            f"{told(ours, names)}. Choose another --output-dir"
        )
