"""An attempt that nobody has started, for tests of what is recorded of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuherd.engines.processes import ProcessId
from gpuherd.jobs.records import AttemptRecord, QueuedJob

_MADE_UP = ProcessId(1, 2, "boot")


def attempt_of(queued: QueuedJob, number: int, **more: Any) -> AttemptRecord:
    """The job's next attempt, of this number in the queue, without GPUs, begun in second 1; ``more`` says otherwise."""
    record = AttemptRecord(
        id=number,
        queued=queued,
        number=queued.attempts + 1,
        gpus=(),
        labels=(),
        process=_MADE_UP,
        log="log",
        started_at=1.0,
        started_mono=1.0,
    )
    return replace(record, **more)
