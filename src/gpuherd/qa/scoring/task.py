"""What the jobs of a statistic are to do, as a file in the folder of their work: written before any of them starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gpuherd.atomic import atomic_write
from gpuherd.errors import CannotWrite
from gpuherd.qa.scoring.statistic import BadStatistic, Spec, spec_of, spec_values
from gpuherd.runs.shards import ShardedDirectory


@dataclass(frozen=True, slots=True)
class Task:
    """A statistic to be measured on the answers with this digest, of the run in this folder."""

    spec: Spec
    run: str
    answers_sha256: str


def task_path(folder: ShardedDirectory) -> Path:
    """Where it is written."""
    return folder.root / "task.json"


def write_task(folder: ShardedDirectory, task: Task) -> None:
    """Writes it. Raises CannotWrite."""
    value = {"run": task.run, "answers_sha256": task.answers_sha256, **spec_values(task.spec)}
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        atomic_write(task_path(folder), json.dumps(value, indent=2).encode() + b"\n")
    except OSError as problem:
        raise CannotWrite(f"can't write {task_path(folder)}: {problem.strerror}") from None


def read_task(folder: ShardedDirectory) -> Task:
    """What was written. Raises BadStatistic."""
    path = task_path(folder)
    try:
        value = json.loads(path.read_bytes())
        return Task(spec_of(value), str(value["run"]), str(value["answers_sha256"]))
    except OSError as problem:
        raise BadStatistic(f"{path} can't be read: {problem.strerror}; gpuherd score writes it") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise BadStatistic(f"{path} is damaged: {problem}; remove {folder.root} and score again") from None
