"""The progress that a running job reports: work done, work in all, and its stage.

A job calls ``report``, its dispatcher ``read``. Between them is one small JSON file, named by the environment variable
GPUHERD_PROGRESS, which is replaced as a whole so that a reader never sees half of it. Outside gpuherd the variable is
not set and ``report`` does nothing: a worker runs by hand unchanged. The file is no record: nothing depends on it, and
it is lost with the attempt. Standard library only.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuherd.atomic import without_waiting

VARIABLE = "GPUHERD_PROGRESS"

# A job is a foreign program: its file is read up to this size.
_MOST_BYTES = 4096
_MOST_STAGE = 80


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. ``total`` and ``stage`` are None where the job has not reported them."""

    done: int
    total: int | None = None
    stage: str | None = None


def report(done: int, total: int | None = None, stage: str | None = None) -> None:
    """Reports the progress of this job; does nothing outside gpuherd. Never raises: a report must not stop the work."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    path = Path(name)
    text = json.dumps({"done": done, "total": total, "stage": stage})
    # No fsync: after a power cut the job is gone too, and then its progress means nothing.
    with suppress(OSError):
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def read(path: Path) -> Progress | None:
    """The job's last report; None without one, or for a file of another form."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            values = json.loads(file.read(_MOST_BYTES) or b"")
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    done, total, stage = _count(values.get("done")), values.get("total"), values.get("stage")
    if done is None or (total is not None and _count(total) is None) or not (stage is None or isinstance(stage, str)):
        return None
    return Progress(done, _count(total), None if stage is None else stage[:_MOST_STAGE])


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
