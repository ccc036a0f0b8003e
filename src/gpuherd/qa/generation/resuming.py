"""``--resume``: the options of a run that was begun, read from its run.json, with what may be changed in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import UsageError
from gpuherd.jobs.options import foreign
from gpuherd.qa.generation.config import BACKEND_IN_RECORDS, GUIDING, NEUTRAL, PATHS, GenerateConfig, settled

# Said anew each time. (The record has no webhook: who knows its address may post there.)
OF_THE_MOMENT = frozenset({"dry_run", "enqueue_only", "webhook", "runs_dir", "run_id"})


def resumed(record: Mapping[str, Any], given: Mapping[str, Any], *, run_id: str, runs_dir: str) -> dict[str, Any]:
    """The options of the run that goes on, by name: its own, with what was given this time.

    Args:
        record: what its run.json holds.
        given: options by name, those alone that were said.

    Raises:
        UsageError: an option that its answers depend on is to be another one, or the record is of another version.
    """
    kept = {name: value for name, value in record["config"].items() if name not in OF_THE_MOMENT}
    if "backend" not in kept:  # a run of the time when that was called --engine, and all jobs ran on one machine
        kept["backend"] = kept.pop(BACKEND_IN_RECORDS)
    unknown = sorted(kept.keys() - {each.name for each in fields(GenerateConfig)})
    if unknown:
        raise UsageError(f"run {run_id} has the option {unknown[0]!r}, unknown here: it is of another gpuherd")
    # Words for another engine are of no use to this one.
    engine = given.get("engine", kept.setdefault("engine", LOCAL))
    kept = {name: value for name, value in kept.items() if name not in foreign(engine)}
    # As absolute paths, so that it can be gone on with from any folder.
    kept |= {name: record["identity"][name] for name in PATHS}
    kept |= {name: record["identity"][name] for name in GUIDING if name in record["identity"]}
    for name, value in given.items():
        if name in NEUTRAL or name == "dry_run":
            kept[name] = value
        elif _settled(name, value) != kept.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"run {run_id} was begun with {flag} {kept.get(name)}; with another it is another run")
    listed = {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()}
    return {**listed, "run_id": run_id, "runs_dir": runs_dir}


def _settled(name: str, value: Any) -> Any:
    """A value as run.json has it: paths absolute, several words as a list."""
    if name in (*PATHS, "guide"):
        return settled(name, value)
    return list(value) if isinstance(value, tuple) else value
