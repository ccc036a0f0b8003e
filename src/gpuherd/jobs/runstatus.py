"""How a run stands, as plain frozen data: what ``status`` reads, and what it can be asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.engines.progress import Progress
from gpuherd.jobs.job import JobState
from gpuherd.jobs.records import AttemptState, Counts, Handed, PauseReason
from gpuherd.jobs.standing import Standing
from gpuherd.jobs.whereabouts import InEngine

# What people look for first comes first.
SHOWN_FIRST = (JobState.RUNNING, JobState.FAILED, JobState.WAITING, JobState.CANCELLED, JobState.DONE)
PAGE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptStatus:
    """A job's latest attempt. Seconds; MB of 2^20 bytes.

    ``run_s`` goes on while it runs, and is None when its process has ended and nobody has recorded how.
    ``paused``: why its processes are stopped now, () while they run; ``paused_s``: how long they were, in all.
    ``handed``: how an engine beyond this machine has it, None for one on this machine; else ``pid`` is None. While it
    is in the engine's line (``in_line``), ``run_s`` is None, and ``wait_s`` goes on.
    ``progress`` and ``eta_s`` are None unless it runs and has told something; ``peak_mb`` where nobody measured it.
    """

    id: int
    number: int
    state: AttemptState
    gpus: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    pid: int | None
    log: str
    started_at: float
    ended_at: float | None
    run_s: float | None
    wait_s: float
    exit_code: int | None
    signal: int | None
    failure_class: str | None
    peak_mb: int | None
    paused: tuple[PauseReason, ...]
    paused_s: float
    progress: Progress | None = None
    eta_s: float | None = None
    handed: Handed | None = None

    @property
    def in_line(self) -> bool:
        """Whether an engine beyond this machine has it, and has not begun it yet."""
        return self.state is AttemptState.RUNNING and self.handed is not None and self.handed.node is None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """A job and how it stands. ``reason``: why it waits, also in an engine's line, or how it failed, or why it was
    cancelled.

    ``gpus`` is how many it asks for now, ``memory_mb`` how much on each, ``learned`` why that is not what it declared,
    ``paused`` that it was told to wait (or stands still while running).
    ``ready_at``: of a waiting job, the wall-clock second since which it could have run; None while it can't.
    """

    id: int
    name: str
    title: str
    state: JobState
    paused: bool
    reason: str | None
    gpus: int
    memory_mb: int | None
    learned: str | None
    priority: int
    tries: int
    attempts: int
    ready_at: float | None
    command: tuple[str, ...]
    attempt: AttemptStatus | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatcherStatus:
    """The gpuherd that works on the queue. ``standing`` is None while it has told nothing of itself."""

    pid: int
    since: float
    standing: Standing | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run at one moment.

    Attributes:
        folder: the run folder.
        at: wall-clock second of the look.
        counts: jobs of the latest submission by state; ``paused`` of them were told to wait.
        held: names of waiting jobs that are paused, the first few: they come last, and may not be on the page.
        dispatcher: who works on it, None for nobody.
        in_engine: what of the running jobs an engine beyond this machine has; None for none.
        jobs: the page that was asked for, running first, then failed, waiting, cancelled, done.
        matching: how many jobs the page is taken from.
        eta_s: seconds until all is done by the mean length of jobs so far, None while nothing can be said.
        left_out: GPUs that are left out for a while, by label, each with a sentence on how long and why.
    """

    folder: Path
    at: float
    counts: Counts
    paused: int
    dispatcher: DispatcherStatus | None
    jobs: tuple[JobStatus, ...]
    matching: int
    eta_s: float | None
    held: tuple[str, ...] = ()
    in_engine: InEngine | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Which jobs to tell of: those in these states (all if empty), with ``text`` in their name, after ``offset``.

    ``each``: of every state but the running at most so many, so that one long state does not hide the others.
    """

    states: Collection[JobState] = ()
    text: str = ""
    names: Collection[str] = ()
    limit: int = PAGE
    offset: int = 0
    each: int | None = None


EVERYTHING = Page(limit=2**31)
