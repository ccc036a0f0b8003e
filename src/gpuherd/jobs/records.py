"""Records of a run: rows of jobs and attempts, events while it runs, and its outcome. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuherd.engines.process_tree import ProcessId
from gpuherd.engines.progress import Progress
from gpuherd.errors import ExitCode
from gpuherd.jobs.attempts.failures import FailureClass, in_words
from gpuherd.jobs.job import Job, JobState

# Jobs and attempts as the queue had them when they were read.


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The resources that a job requests now: those of its spec, or more after it ran out of memory. MB (2^20 bytes) on
    each GPU."""

    gpus: int
    memory_mb: int | None = None
    share: bool = False


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue.

    Attributes:
        id: rises with the time of submission: the lower id is the older job.
        tries: failures so far that count against ``job.retries``.
        attempts: starts so far, over all runs.
        not_before: wall-clock second before which it is not started again.
        avoid: UUIDs of GPUs on which it failed.
        ready_at: wall-clock second since which it could have run: its needs have succeeded, and its round is open.
        adapted: what it requests after a retry changed that; None while it is what the job declares.
        cancelled_by: who has cancelled it while it runs; else None.
        rank: the higher goes first in the order ``longest`` (``ordering.rank``).
    """

    id: int
    job: Job
    tries: int
    attempts: int
    not_before: float
    avoid: frozenset[str]
    ready_at: float
    adapted: ResourceRequest | None = None
    cancelled_by: str | None = None
    rank: float = 0.0

    @property
    def request(self) -> ResourceRequest:
        """The resources that it requests now."""
        return self.adapted or ResourceRequest(self.job.gpus, self.job.memory_mb, self.job.share)

    @property
    def family(self) -> str | None:
        """The family whose memory is like its own; None on another number of GPUs than it declares, where each GPU
        holds less."""
        return self.job.family if self.gpus == self.job.gpus else None

    @property
    def may_ask_less(self) -> bool:
        """Whether the memory that others of its family needed may lower its request: not once it has failed."""
        return self.adapted is None and not self.avoid

    @property
    def gpus(self) -> int:
        """How many GPUs it requests now."""
        return self.request.gpus

    @property
    def memory_mb(self) -> int | None:
        """How much free memory it requests on each GPU now; None if unknown."""
        return self.request.memory_mb

    @property
    def share(self) -> bool:
        """Whether it may share its GPU now."""
        return self.request.share


class PauseReason(StrEnum):
    """Why a running attempt's processes are stopped; there can be several reasons at once."""

    USER = "user"
    DISK = "disk"
    STRANGER = "stranger"
    IDLE = "idle"  # until a person resumes it


@dataclass(frozen=True, slots=True)
class Handed:
    """How an attempt in an engine beyond this machine is found again.

    Attributes:
        engine: the engine's name (``--engine``).
        batch, index: the batch that it was submitted in, and its place there.
        handle: the engine's own id for it; None while it is unknown.
        node: where it runs; None while it waits there.
    """

    engine: str
    batch: str
    index: int
    handle: str | None = None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Predecessor:
    """An attempt submitted to an engine that another one depends on: its number, and the engine's own id for it."""

    attempt: int
    handle: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """An attempt that has been started or submitted: job, place, time.

    Attributes:
        id: unique in the queue.
        queued: the job as it was when it started.
        number: which attempt of the job this is, from 1.
        gpus, labels: UUIDs and short names of its GPUs; () on the CPU.
        process: its main process; None for one that was submitted to an engine.
        handed: how it is found in its engine; None for one that runs on this machine.
        log: path of its log.
        started_at, started_mono: by the wall clock and by the machine's own.
        shared_mb: the memory that it was promised on a GPU that it shares; None when it has its GPUs for itself.
        paused: why its processes were stopped when this was read; since ``paused_mono``, and ``paused_s`` before.
    """

    id: int
    queued: QueuedJob
    number: int
    gpus: tuple[str, ...]
    labels: tuple[str, ...]
    process: ProcessId | None
    log: str
    started_at: float
    started_mono: float
    handed: Handed | None = None
    shared_mb: int | None = None
    paused: frozenset[PauseReason] = frozenset()
    paused_mono: float | None = None
    paused_s: float = 0.0

    @property
    def title(self) -> str:
        """What people call the job."""
        return self.queued.job.title or self.queued.job.name


@dataclass(frozen=True, slots=True)
class StartRecord:
    """A start to record. ``wait_s``: how long the job could have run and did not; ``leased_mono``: when its GPUs were
    leased.
    """

    attempt: AttemptRecord
    wait_s: float
    leased_mono: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The begin of an attempt in an engine: where, on which GPUs, and when by both clocks of this machine."""

    attempt: int
    node: str
    gpus: tuple[str, ...]
    labels: tuple[str, ...]
    at: float
    mono: float


class AttemptState(StrEnum):
    """How an attempt stands. ``REQUEUED`` is an end that says nothing about the job: we stopped it, or it never ran."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REQUEUED = "requeued"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRow:
    """An attempt, running or ended. Seconds; MB of 2^20 bytes.

    Attributes:
        job: the job's name.
        gpus, gpu_uuids: labels and UUIDs of its GPUs; () on the CPU.
        pid: None where an engine beyond this machine has it (``handed``).
        run_s: length, with the ``paused_s`` in which its processes were stopped by us. While it runs, and where nobody
            recorded its end, None as recorded in the queue and the time so far in a status; None for one that an engine
            beyond this machine never began.
        wait_s: how long the job could have run and did not; grows in a status while an engine has not begun it.
        peak_mb: the most memory that it was seen to use on one GPU, None when not measured.
        paused: why its processes are stopped now, () while they run.
        shared_mb: as in AttemptRecord.
        progress, eta_s: in a status, of a running attempt that reports its progress; else None.
    """

    id: int
    job: str
    number: int
    state: AttemptState
    gpus: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    pid: int | None = None
    log: str
    started_at: float
    ended_at: float | None = None
    run_s: float | None = None
    wait_s: float = 0.0
    exit_code: int | None = None
    signal: int | None = None
    failure_class: str | None = None
    peak_mb: int | None = None
    paused: tuple[PauseReason, ...] = ()
    paused_s: float = 0.0
    shared_mb: int | None = None
    progress: Progress | None = None
    eta_s: float | None = None
    handed: Handed | None = None

    @property
    def in_line(self) -> bool:
        """Whether an engine beyond this machine has it, and has not begun it yet."""
        return self.state is AttemptState.RUNNING and self.handed is not None and self.handed.node is None

    @property
    def worked_s(self) -> float | None:
        """``run_s`` without the pauses."""
        return None if self.run_s is None else max(0.0, self.run_s - self.paused_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """A job and its latest attempt, as people and programs see it.

    Attributes:
        paused: it is held, or its processes are stopped.
        reason: why it waits (in an engine too), how it failed, or why it was cancelled.
        gpus, memory_mb: how many GPUs it asks for now, and how much memory on each.
        learned: why ``memory_mb`` is not what the job declared.
        ready_at: of a waiting job, the wall-clock second since which it could have run; None while it can't.
    """

    id: int
    name: str
    title: str
    state: JobState
    paused: bool = False
    reason: str | None = None
    gpus: int
    memory_mb: int | None = None
    learned: str | None = None
    priority: int = 0
    tries: int = 0
    attempts: int = 0
    ready_at: float | None = None
    command: tuple[str, ...] = ()
    attempt: AttemptRow | None = None


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


# What a run reports: events as they happen, and now and then a snapshot of the whole. Plain frozen data.


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
    IDLE = "idle"  # does not use its GPUs
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
class RunSnapshot:
    """The whole run at one moment.

    Attributes:
        running: running jobs, each with its attempt; also those that are paused.
        waiting_for: a sentence on which job is next and why it waits, None when none waits.
        eta_s: seconds until all is done, None while nothing can be said.
        paused: running and waiting jobs that don't go on by themselves.
        in_line: jobs that count as running and that an engine beyond this machine has not begun yet.
    """

    counts: Counts
    running: tuple[JobStatus, ...]
    waiting_for: str | None
    eta_s: float | None
    paused: int = 0
    in_line: int = 0


# How a run ended: plain frozen data for whoever called ``run_jobs``.


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that has failed for good. ``attempt``, ``log`` and ``exit_code`` are those of its last attempt; None where
    there was none."""

    job: str
    title: str
    failure: FailureClass
    reason: str
    attempt: int
    log: str | None
    exit_code: int | None = None

    @property
    def sentence(self) -> str:
        """Its class, exit code and reason, and where its log is."""
        log = "" if self.log is None else f" (log: {self.log})"
        return in_words(self.failure, self.exit_code, self.reason) + log


@dataclass(frozen=True, slots=True)
class Outcome:
    """Jobs of this submission by state, and the failures.

    Attributes:
        waiting: not yet run when the run ended, because it was interrupted.
        cancelled: can't run, because a job that they need has failed.
        stopped_by: INTERRUPTED or TERMINATED when a signal ended the run before all was done, else None.
        drained: a command (``gpuherd drain``, ``gpuherd down``) ended it before all was done.
    """

    done: int
    failed: int
    waiting: int
    cancelled: int
    failures: tuple[Failure, ...] = ()
    stopped_by: ExitCode | None = None
    drained: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether a signal or a command ended the run before all was done; the same command goes on from there."""
        return self.stopped_by is not None or self.drained

    @property
    def complete(self) -> bool:
        """Whether every job is done."""
        return not (self.failed or self.cancelled or self.waiting)

    @property
    def unsolvable(self) -> tuple[Failure, ...]:
        """Failures that the same command would meet again: what the job was given is at fault."""
        return tuple(each for each in self.failures if each.failure is FailureClass.BAD_INPUT)

    @property
    def exit_code(self) -> ExitCode:
        """What a command that ran these jobs exits with: 0 also when it was drained and nothing has failed."""
        if self.stopped_by is not None:
            return self.stopped_by
        drained_well = self.drained and not (self.failed or self.cancelled)
        return ExitCode.OK if self.complete or drained_well else ExitCode.FAILED
