"""What a run tells while it goes: events as they happen, and now and then the whole picture. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpuherd.engines.progress import Progress
from gpuherd.jobs.records import Counts


class EventKind(StrEnum):
    """What happened."""

    HANDED = "handed over"  # to an engine beyond this machine, which starts it when it can
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"  # for good
    RETRY = "retry"  # failed, and gets another try
    REQUEUED = "requeued"  # ended without fault of its own, and waits again
    ADOPTED = "adopted"  # taken over from a dispatcher that died
    CANCELLED = "cancelled"
    NOTICE = "notice"  # something about the run as a whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        at: wall-clock second.
        text: one sentence for people, free of control characters.
        job: name of the job, None for a notice.
        title: what people call it.
        attempt: number of the job's attempt, from 1.
        gpus: labels of its GPUs (``0``, ``3:1``); () on the CPU.
        log: the attempt's log.
        run_s: how long the attempt ran, for an end.
    """

    kind: EventKind
    at: float
    text: str
    job: str | None = None
    title: str | None = None
    attempt: int | None = None
    gpus: tuple[str, ...] = ()
    log: str | None = None
    run_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunningLine:
    """A running job as the display shows it. ``eta_s`` is None while nothing can be said; ``paused``: it is stopped;
    ``node``: where it runs, for one beyond this machine.
    """

    title: str
    gpus: tuple[str, ...]
    elapsed_s: float
    progress: Progress | None
    eta_s: float | None
    paused: bool = False
    node: str | None = None


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The whole run at one moment.

    Attributes:
        running: what runs, and what stands still with its GPU.
        waiting_for: a sentence on which job is next and why it waits, None when none waits.
        eta_s: seconds until all is done, None while nothing can be said.
        paused: running and waiting jobs that don't go on by themselves.
        in_line: jobs that count as running and that an engine beyond this machine has not begun yet.
    """

    counts: Counts
    running: tuple[RunningLine, ...]
    waiting_for: str | None
    eta_s: float | None
    paused: int = 0
    in_line: int = 0
