"""An attempt that nobody has started, for tests of what is recorded of one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuherd.engines.process_tree import ProcessId
from gpuherd.gpus.state import SIMULATED
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptRecord, AttemptRow, AttemptState, JobStatus, QueuedJob

SIMULATED_GPU = f"GPU-1f0a92c3-77aa-4b1c-9d2e-{SIMULATED}"
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


def running_job(title: str, gpus: tuple[str, ...] = (), *, paused: bool = False, **more: Any) -> JobStatus:
    """A running job as a display is given it; ``more`` is of its attempt."""
    attempt = AttemptRow(
        id=1,
        job=title,
        number=1,
        state=AttemptState.RUNNING,
        gpus=gpus,
        gpu_uuids=gpus,
        log="log",
        started_at=1.0,
        **more,
    )
    state = JobState.RUNNING
    return JobStatus(id=1, name=title, title=title, state=state, paused=paused, gpus=len(gpus), attempt=attempt)


def queue_that_ran_on(path: Path, gpu: str) -> None:
    """A queue of which a job has run on the GPU of this UUID."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(Queue(path)) as queue:
        queue.submit([Job(name="first", argv=("true",), gpus=1)])
        run = queue.begin_run(0.0, 0.0)
        (queued,) = queue.head(1, 1e9)
        record = attempt_of(queued, 1, gpus=(gpu,), labels=("0",))
        queue.record_start(record, run, wait_s=0.0, leased_mono=None)
