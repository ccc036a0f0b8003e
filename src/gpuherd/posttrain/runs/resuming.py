"""Which folder a run goes into: the newest unfinished one of the same experiment, one that is named, or a new one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.posttrain.config.typed import read
from gpuherd.posttrain.runs.folder import RoundsDirectory
from gpuherd.posttrain.runs.record import BadRun, RunRecord, raw_record, read_record
from gpuherd.posttrain.runs.settings import Settings, is_neutral
from gpuherd.runs.records import jsonable

_STAMP = "%Y-%m-%d_%H-%M-%S"


def unfinished(settings: Settings) -> RoundsDirectory | None:
    """The newest run of this experiment, by its name and all that its results depend on, that is not done."""
    folder = Path(settings.output_dir) / settings.experiment.name
    for path in sorted(folder.glob("*/run.json"), reverse=True):
        found = RoundsDirectory(path.parent)
        if found.done.exists():
            continue
        with suppress(BadRun):
            if raw_record(found)["identity"] == settings.identity():
                return found
    return None


def new_folder(settings: Settings, now: datetime) -> RoundsDirectory:
    """A folder that was not there: ``<output_dir>/<experiment>/<stamp>``. Raises CannotWrite."""
    parent = Path(settings.output_dir) / settings.experiment.name
    for number in range(1000):
        path = parent / f"{now:{_STAMP}}{f'_{number}' if number else ''}"
        try:
            path.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            continue
        except OSError as problem:
            raise CannotWrite(f"can't make {path}: {problem.strerror}; set another output_dir") from None
        return RoundsDirectory(path)
    raise CannotWrite(f"{parent} has 1000 runs of this second")


def future_folder(settings: Settings, now: datetime) -> RoundsDirectory:
    """What ``new_folder`` would make now; makes nothing."""
    return RoundsDirectory(Path(settings.output_dir) / settings.experiment.name / f"{now:{_STAMP}}")


def resumed(folder: RoundsDirectory, said: Mapping[str, Any]) -> RunRecord:
    """A run that goes on, with what is said anew for it.

    Args:
        said: values by their full keys.

    Raises UsageError: one that its results depend on is to be another. BadRun.
    """
    record = read_record(folder)
    values = jsonable(record.settings)
    for key, value in said.items():
        if key == "resume_from":
            continue
        place, _, last = key.rpartition(".")
        inner = _at(values, place, key)
        if not is_neutral(key) and inner.get(last) != jsonable(value):
            raise UsageError(
                f"{folder.root} was begun with {key}={inner.get(last)!r}; with another it is another run: leave it "
                "out, or begin one without --resume"
            )
        inner[last] = value
    return replace(record, settings=read(Settings, values))


def _at(values: dict[str, Any], place: str, key: str) -> dict[str, Any]:
    inner: Any = values
    for part in filter(None, place.split(".")):
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict):
        raise UsageError(f"{key}: the run that goes on has no such key; leave it out")
    return inner
