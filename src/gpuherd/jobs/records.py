"""What the queue tells of jobs and attempts: plain frozen data, as it stood when it was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuherd.engines.processes import ProcessId
from gpuherd.jobs.job import Job, JobState


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue.

    Attributes:
        id: rises with the time of submission: the lower is the older.
        tries: failures so far that count against ``job.retries``.
        attempts: starts so far, over all runs.
        not_before: wall-clock second before which it is not started again.
        avoid: UUIDs of GPUs on which it failed.
        ready_at: wall-clock second since which it could have run.
    """

    id: int
    job: Job
    tries: int
    attempts: int
    not_before: float
    avoid: frozenset[str]
    ready_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """An attempt that has been started: who, where, when.

    Attributes:
        id: unique in the queue.
        queued: the job as it was when it started.
        number: which attempt of the job this is, from 1.
        gpus, labels: UUIDs and short names of its GPUs; () on the CPU.
        process: its main process.
        log: path of its log.
        started_at, started_mono: by the wall clock and by the machine's own.
    """

    id: int
    queued: QueuedJob
    number: int
    gpus: tuple[str, ...]
    labels: tuple[str, ...]
    process: ProcessId
    log: str
    started_at: float
    started_mono: float

    @property
    def title(self) -> str:
        """What people call the job."""
        return self.queued.job.title or self.queued.job.name


class AttemptState(StrEnum):
    """How an attempt stands. ``REQUEUED`` is an end that says nothing about the job: we stopped it, or it never ran."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REQUEUED = "requeued"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """An end, and what becomes of the job: DONE, FAILED, or WAITING for another try.

    ``ended_mono`` is None when the machine was restarted meanwhile, whose clock then began anew.
    """

    attempt: int
    state: AttemptState
    job_state: JobState
    ended_at: float
    ended_mono: float | None
    exit_code: int | None = None
    signal: int | None = None
    failure_class: str | None = None
    reason: str | None = None
    not_before: float = 0.0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """A finished or running attempt as the metrics see it. Seconds; ``ended_at`` is None while it runs."""

    job: str
    number: int
    run: int
    state: AttemptState
    gpus: tuple[str, ...]
    labels: tuple[str, ...]
    wait_s: float
    started_at: float
    ended_at: float | None
    run_s: float | None
    failure_class: str | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Jobs of the latest submission by state."""

    waiting: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.waiting + self.running + self.done + self.failed + self.cancelled

    @classmethod
    def of(cls, by_state: Mapping[str, int]) -> Counts:
        """From a mapping of state to number; what is missing is 0."""
        return cls(**{state.value: by_state.get(state.value, 0) for state in JobState})
