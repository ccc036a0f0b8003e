"""An attempt that nobody has started, for tests of what is recorded of one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuherd.engines.local.process import Exit
from gpuherd.engines.process_tree import ProcessId
from gpuherd.gpus.state import SIMULATED
from gpuherd.jobs.attempts.failures import Diagnosis, classify
from gpuherd.jobs.completion import Known, Settlement
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptRecord, AttemptRow, AttemptState, JobStatus, QueuedJob, StartRecord

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
        queue.record_starts([StartRecord(record, 0.0, None)], run)


def diagnosed(code: int | None = None, signal: int | None = None, *, started: bool = True, **more: Any) -> Diagnosis:
    """The diagnosis of a process that ended so; ``more``: as for ``classify``."""
    return classify(Exit(started, code, signal), **more)


def settled(
    attempt: AttemptRecord | int, state: AttemptState, job: JobState, at: float = 2.0, **more: Any
) -> Settlement:
    """An attempt that ended so. ``more``: facts of ``Known``, and ``code``, ``failure``, ``reason``, ``again``."""
    if isinstance(attempt, int):
        attempt = attempt_of(QueuedJob(0, Job(name="any", argv=("true",)), 0, 0, 0.0, frozenset(), 0.0), attempt)
    exit_ = Exit(started=True, code=more.pop("code", None))
    failure, reason, again = more.pop("failure", None), more.pop("reason", None), more.pop("again", None)
    diagnosis = None if failure is None else Diagnosis(failure, reason or "", retry=True, elsewhere=False)
    known = Known(record=attempt, exit=exit_, at=at, **{"mono": at, **more})
    return Settlement(known, state, job, reason, diagnosis, again)
