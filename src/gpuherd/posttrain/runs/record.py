"""``run.json``: what an experiment was asked for and how it was divided. Written once; workers and later starts read
it, so that nothing of a run is handed on by pickling or by the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuherd.errors import CannotWrite, ExitCode, GpuherdError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.runs.folder import FORMAT, KIND, RoundsDirectory
from gpuherd.posttrain.runs.plan import Combination, Step, plan_steps
from gpuherd.posttrain.runs.settings import Settings
from gpuherd.runs.files import create_file
from gpuherd.runs.records import jsonable


class BadRun(GpuherdError):
    """A folder is no run of ``gpuherd posttrain``, or its run.json is damaged or of a newer gpuherd."""

    exit_code = ExitCode.BAD_INPUT


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What run.json holds.

    Attributes:
        settings: the experiment's, paths absolute.
        combinations: how it was divided when it began; kept, whatever GPUs there are later.
        identity: what its results depend on.
        cwd: where it was begun; jobs run there.
        made: command, time, host, versions.
    """

    settings: Settings
    combinations: tuple[Combination, ...]
    identity: str
    cwd: str
    made: Mapping[str, Any]

    def steps(self) -> tuple[Step, ...]:
        """All its steps."""
        told = self.settings
        return plan_steps(
            self.combinations,
            told.rounds_of_training,
            asynchronous=told.async_rounds,
            references=told.evaluation.base,
        )


def begin(folder: RoundsDirectory, record: RunRecord) -> RunRecord:
    """Writes run.json where there is none yet. Returns what is there then. Raises CannotWrite, BadRun."""
    values = {
        "format": FORMAT,
        "kind": KIND,
        "experiment": record.settings.experiment.name,
        "identity": record.identity,
        "cwd": record.cwd,
        **record.made,
        "settings": jsonable(record.settings),
        "combinations": jsonable(record.combinations),
    }
    try:
        text = json.dumps(values, indent=1, allow_nan=True)
        create_file(folder.run_json, text.encode() + b"\n")
    except OSError as problem:
        raise CannotWrite(f"can't write {folder.run_json}: {problem.strerror}") from None
    return read_record(folder)


def read_record(folder: RoundsDirectory) -> RunRecord:
    """What run.json holds. Raises BadRun."""
    values = raw_record(folder)
    try:
        known = {"format", "kind", "experiment", "identity", "cwd", "settings", "combinations"}
        return RunRecord(
            read(Settings, values["settings"]),
            _combinations(values["combinations"]),
            str(values["identity"]),
            str(values["cwd"]),
            {name: value for name, value in values.items() if name not in known},
        )
    except (KeyError, TypeError, GpuherdError) as problem:
        raise BadRun(f"{folder.run_json} is damaged or of another gpuherd: {problem}") from None


def raw_record(folder: RoundsDirectory) -> dict[str, Any]:
    """run.json as JSON values, where it is one of ours. Raises BadRun."""
    try:
        values = json.loads(folder.run_json.read_bytes())
    except OSError as problem:
        raise BadRun(f"{folder.root} is no run of gpuherd posttrain: run.json: {problem.strerror}") from None
    except (ValueError, RecursionError):
        raise BadRun(f"{folder.run_json} is damaged") from None
    if not isinstance(values, dict) or values.get("kind") != KIND or not isinstance(values.get("format"), int):
        raise BadRun(f"{folder.root} is no run of gpuherd posttrain")
    if values["format"] > FORMAT:
        raise BadRun(f"{folder.run_json} is of a newer gpuherd (format {values['format']}); update gpuherd")
    return values


def _combinations(values: Sequence[Any]) -> tuple[Combination, ...]:
    return tuple(read(Combination, each) for each in values)
