"""``--resume``: the list and the options of an earlier run, read from its run.json, with what may be changed in them.

Knows which options a run keeps and which may be other ones this time. Starts nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError, printable
from gpuherd.esd.config import CONVENTION, ExperimentConfig
from gpuherd.esd.folder import ESDDirectory
from gpuherd.jobs.options import foreign
from gpuherd.options import option_fields, spellings

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
        record = json.loads(directory.run_json.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no run to go on with in {where}: it has no run.json") from None
    except (OSError, ValueError) as problem:
        raise UsageError(f"{directory.run_json} can't be read: {problem}; give the options again instead") from None
    if isinstance(record, dict) and "imported_from" in record:
        raise UsageError(f"{where} holds imported results: there is no run to go on with")
    options = record.get("config") if isinstance(record, dict) else None
    cwd = record.get("cwd") if isinstance(record, dict) else None
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
        was = earlier.options.get(name, _default(name))
        if name in given and _plain(name, given[name], earlier) != _plain(name, was, earlier):
            kind = "another list" if name in OF_THE_LIST else "another convention, whose results don't mix"
            raise UsageError(
                f"the run in {earlier.root} has {_flag(name)} {_shown(was)}, not {_shown(given[name])}: that would be "
                f"{kind}; leave {_flag(name)} out, or take another --output-dir"
            )
    kept = {name: value for name, value in earlier.options.items() if name not in OF_THE_MOMENT}
    # A run of before there were engines was one of this machine. Words for another engine are of no use to this one.
    engine = given.get("engine", kept.setdefault("engine", LOCAL))
    kept = {name: value for name, value in kept.items() if name not in foreign(engine)}
    changed = {name: value for name, value in given.items() if name not in OF_THE_LIST}
    return kept | changed | {"output_dir": str(earlier.root)}


def _plain(name: str, value: Any, earlier: EarlierRun) -> Any:
    """A value so that JSON's list and our tuple, and two ways to name one list, are the same."""
    if name == "model_list" and value is not None:
        return os.path.normpath(earlier.cwd / value)
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = " ".join(value) if isinstance(value, list | tuple) else "" if value is None else str(value)
    return printable(text or "(none)")


def _default(name: str) -> Any:
    """What an older gpuherd, which did not know this option, did without saying."""
    return next(declared.default for declared in fields(ExperimentConfig) if declared.name == name)


def _flag(name: str) -> str:
    declared = {field.name: spec for field, spec in option_fields(ExperimentConfig)}
    return spellings(name, declared[name])[0][0]
