"""Reports the events of a run: to the log, failures.jsonl, the queue's diary, a display and the caller. Decides nothing
and changes no job. Also starts and ends the metrics endpoint and the notifications.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from gpuherd.atomic import append_line
from gpuherd.engines.progress import Progress
from gpuherd.errors import UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import clean, with_code
from gpuherd.jobs.completion import Settlement
from gpuherd.jobs.eta import Pace, Running, Waiting, job_eta_s, run_eta_s
from gpuherd.jobs.job import JobState
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import (
    AttemptRecord,
    AttemptRow,
    AttemptState,
    Counts,
    Event,
    EventKind,
    Failure,
    JobStatus,
    Outcome,
    PauseReason,
    RunSnapshot,
)
from gpuherd.jobs.run_dir import RunDirectory

if TYPE_CHECKING:
    from gpuherd.jobs.monitor.notify import Notifier
    from gpuherd.jobs.monitor.prometheus import MetricsServer


logger = logging.getLogger("gpuherd.jobs")

# Events that the tables of jobs and attempts don't record, so that the diary does.
_DIARY = frozenset({EventKind.ADOPTED, EventKind.CANCELLED, EventKind.NOTICE, EventKind.REQUEUED})
_LEVELS = {EventKind.FAILED: logging.ERROR, EventKind.RETRY: logging.WARNING, EventKind.CANCELLED: logging.WARNING}


class Shown(Protocol):
    """A running attempt for the display: on this machine, or in an engine."""

    @property
    def record(self) -> AttemptRecord:
        """Its record in the queue."""

    @property
    def paused(self) -> frozenset[PauseReason]:
        """Why its processes are stopped now."""

    def paused_s(self, now: float, /) -> float:
        """Seconds for which its processes were stopped by us until now (by ``clock.mono``)."""

    def progress(self) -> Progress | None:
        """The latest progress that the job reported."""


class Display(Protocol):
    """Shows a run to people. ``every_s``: seconds between two snapshots."""

    every_s: float

    def event(self, event: Event) -> None:
        """Shows an event."""
        ...

    def snapshot(self, snapshot: RunSnapshot) -> None:
        """Shows the state of the run."""
        ...


class Reporter:
    """Reports the events of one run. ``failures``: jobs that have failed for good in it."""

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        display: Display | None = None,
        on_event: Callable[[Event], None] | None = None,
    ):
        self._queue = queue
        self._run = run
        self._display = display
        self._on_event = on_event
        self._pace = Pace()
        self._waiting: tuple[int, Waiting] = (0, Waiting(0))
        self.failures: list[Failure] = []

    @property
    def every_s(self) -> float | None:
        """How often the display wants a snapshot, None without a display."""
        return None if self._display is None else self._display.every_s

    def emit(
        self,
        kind: EventKind,
        text: str,
        *,
        job: str | None = None,
        title: str | None = None,
        attempt: AttemptRecord | None = None,
        run_s: float | None = None,
    ) -> None:
        """Reports an event. Job, title, GPUs and log are those of ``attempt`` where that is given."""
        event = Event(kind=kind, at=clock.wall(), text=text, job=job, title=title, run_s=run_s)
        if attempt is not None:
            event = replace(
                event,
                job=attempt.queued.job.name,
                title=attempt.title,
                attempt=attempt.number,
                gpus=attempt.labels,
                log=attempt.log,
            )
        # A display shows the event; a second line on standard error would only break it.
        level = _LEVELS.get(kind, logging.INFO) if self._display is None else logging.INFO
        logger.log(level, "%s", text)
        if kind in _DIARY:
            try:
                self._queue.note(event.at, kind, text, event.job, event.attempt)
            except sqlite3.OperationalError as problem:
                # A full disk, usually: the diary is for people, and the run must not end for it.
                logger.warning("can't write to the queue's diary: %s", problem)
        if self._display is not None:
            self._display.event(event)
        if self._on_event is not None:
            self._on_event(event)

    def notice(self, text: str) -> None:
        """Reports something about the run as a whole."""
        self.emit(EventKind.NOTICE, text)

    def about(self, kind: EventKind, attempt: AttemptRecord, text: str, run_s: float | None = None) -> None:
        """Reports something about an attempt: ``text`` follows the job's title."""
        self.emit(kind, f"{clean(attempt.title)}: {text}", attempt=attempt, run_s=run_s)

    def ended(self, settlement: Settlement) -> None:
        """Reports an attempt's end and what follows for its job."""
        attempt, run_s = settlement.known.record, settlement.known.run_s or 0.0
        if settlement.job is JobState.DONE:
            self._pace = self._pace.after(max(0.0, run_s - settlement.known.paused_s), attempt.queued.job.cost)
            self.about(EventKind.DONE, attempt, f"done in {run_s:.1f} s", run_s)
        elif settlement.job is JobState.CANCELLED:
            self.about(EventKind.CANCELLED, attempt, settlement.reason or "cancelled", run_s)
        elif settlement.diagnosis is None:
            self.about(EventKind.REQUEUED, attempt, settlement.reason or "waits again", run_s)
        elif settlement.job is JobState.WAITING:
            how = f" {settlement.again.change}" if settlement.again is not None and settlement.again.change else ""
            found = settlement.diagnosis
            text = f"attempt {attempt.number} failed ({found.failure}), will be tried again{how}"
            self.about(EventKind.RETRY, attempt, f"{text}: {with_code(found.exit_code, found.reason)}", run_s)
        else:
            found = settlement.diagnosis
            job = attempt.queued.job.name
            failure = Failure(
                job, attempt.title, found.failure, found.reason, attempt.number, attempt.log, found.exit_code
            )
            self.failures.append(failure)
            why = with_code(found.exit_code, found.reason)
            self.about(EventKind.FAILED, attempt, f"failed ({found.failure}): {why} (log: {attempt.log})", run_s)

    def requeued(self, attempts: Sequence[AttemptRecord], reason: str) -> None:
        """Reports attempts that ended through no fault of their jobs, all for one reason; the jobs wait again."""
        first, last = (clean(attempt.title) for attempt in (attempts[0], attempts[-1]))
        text = f"{len(attempts)} jobs, {first} to {last}: {reason}"
        self.emit(EventKind.REQUEUED, text)

    def given_up(self, failures: Sequence[Failure]) -> None:
        """Reports jobs that failed for good without an attempt, all for one reason."""
        self.failures += failures
        first = failures[0]
        if len(failures) == 1:
            text = f"{clean(first.title)}: {first.reason}"
            self.emit(EventKind.FAILED, text, job=first.job, title=first.title)
            return
        text = f"{len(failures)} jobs, {clean(first.title)} to {clean(failures[-1].title)}: {first.reason}"
        self.emit(EventKind.FAILED, text)

    def cancelled(self, jobs: Sequence[str], needed: str, fate: JobState = JobState.FAILED) -> None:
        """Reports jobs that can't run any more, because one that they need has failed or was cancelled."""
        how = "was cancelled" if fate is JobState.CANCELLED else "failed"
        for job in jobs:
            text = f"{clean(job)}: cancelled, it needs {clean(needed)}, which {how}"
            self.emit(EventKind.CANCELLED, text, job=job, title=job)

    def write_failure(self, settlement: Settlement) -> None:
        """Writes a line of failures.jsonl for a failed attempt. A kill just after it can make the same line come twice,
        never be missing."""
        known, attempt, diagnosis = settlement.known, settlement.known.record, settlement.diagnosis
        if diagnosis is None:
            return
        record = {
            "time": datetime.fromtimestamp(known.at, UTC).isoformat(timespec="seconds"),
            "job": attempt.queued.job.name,
            "title": attempt.title,
            "attempt": attempt.number,
            "class": diagnosis.failure.value,
            "reason": diagnosis.reason,
            "retried": settlement.job is JobState.WAITING,
            "exit_code": known.exit.code,
            "signal": known.exit.signal,
            "gpus": list(attempt.labels),
            "gpu_uuids": list(attempt.gpus),
            "run_s": None if known.run_s is None else round(known.run_s, 3),
            "log": attempt.log,
            "last_lines": last_lines(known.log_tail),
        }
        try:
            append_line(self._run.failures, json.dumps(record))
        except OSError as problem:
            # The queue has it too; a full disk must not end the run.
            logger.warning("can't write %s: %s", self._run.failures, problem.strerror)

    def show(
        self,
        running: Sequence[Shown],
        waiting_for: str | None,
        at_once: int,
        in_line: int = 0,
        back_in_s: Sequence[float] = (),
    ) -> None:
        """Gives the display a snapshot. ``at_once``, ``back_in_s``: as for ``run_eta_s``; ``in_line``: how many jobs
        wait in an engine beyond this machine."""
        if self._display is None:
            return
        counts = self._queue.counts(exact=False)
        jobs, paces = [], []
        for each in running:
            queued, row = each.record.queued, _row(each)
            jobs.append(
                JobStatus(
                    id=queued.id,
                    name=queued.job.name,
                    title=each.record.title,
                    state=JobState.RUNNING,
                    paused=bool(row.paused),
                    gpus=queued.gpus,
                    memory_mb=queued.memory_mb,
                    attempt=row,
                )
            )
            paces.append(Running(row.worked_s or 0.0, queued.job.cost, row.eta_s))
        waiting = self._those_waiting(counts.waiting + in_line)
        self._display.snapshot(
            RunSnapshot(
                counts=counts,
                running=tuple(jobs),
                waiting_for=waiting_for,
                eta_s=run_eta_s(self._pace, waiting, paces, at_once, back_in_s),
                paused=self._queue.held() + sum(job.paused for job in jobs),
                in_line=in_line,
            )
        )

    def _those_waiting(self, jobs: int) -> Waiting:
        """The costs are read again only when their number has changed: a display draws four times a second."""
        if not self._pace.cost:
            return Waiting(jobs)
        if self._waiting[0] != jobs:
            self._waiting = (jobs, self._queue.those_waiting())
        return self._waiting[1]


def _row(attempt: Shown) -> AttemptRow:
    """A running attempt with its times so far and its progress."""
    record, progress = attempt.record, attempt.progress()
    if record.handed is None:
        now = clock.mono()
        run_s, paused_s = max(0.0, now - record.started_mono), attempt.paused_s(now)
    else:
        # By the wall clock: it may have begun before this machine was started, whose own clock began anew then.
        run_s, paused_s = max(0.0, clock.wall() - record.started_at), 0.0
    return AttemptRow(
        id=record.id,
        job=record.queued.job.name,
        number=record.number,
        state=AttemptState.RUNNING,
        gpus=record.labels,
        gpu_uuids=record.gpus,
        log=record.log,
        started_at=record.started_at,
        run_s=run_s,
        paused=tuple(sorted(attempt.paused)),
        paused_s=paused_s,
        progress=progress,
        eta_s=job_eta_s(progress, run_s - paused_s),
        handed=record.handed,
    )


class MonitorServices:
    """The metrics endpoint and the notifications of a run, as a context around it. Each is imported only when the
    options ask for it. Raises UsageError for a command or an address that could never work, and on entering for a port
    that is taken. ``serve``: the run stays when all is done.
    """

    def __init__(self, run: RunDirectory, options: DispatchOptions, *, serve: bool = False):
        self._run = run
        self._port = options.prometheus
        self._server: MetricsServer | None = None
        self._notifier: Notifier | None = None
        self._outcome: Outcome | None = None
        if options.notify_command or options.webhook:
            from gpuherd.jobs.monitor.notify import Channels, Notifier

            channels = Channels.of(options.notify_command, options.webhook)
            self._notifier = Notifier(channels, str(run.root), self._counts if serve else None)

    def listener(self, on_event: Callable[[Event], None] | None) -> Callable[[Event], None] | None:
        """A listener that passes events on to the notifications and to this one."""
        notifier = self._notifier
        if notifier is None:
            return on_event

        def both(event: Event) -> None:
            notifier.event(event)
            if on_event is not None:
                on_event(event)

        return both

    def _counts(self) -> Counts:
        """The counts now; called in the notifier's thread."""
        from gpuherd.jobs.monitor.status import opened, read_counts

        with opened(self._run) as reader:
            return read_counts(reader)

    def ended(self, outcome: Outcome) -> Outcome:
        """Takes the outcome for the last notice, and returns it."""
        self._outcome = outcome
        return outcome

    def __enter__(self) -> MonitorServices:
        if self._port is not None:
            from gpuherd.jobs.monitor.prometheus import MetricsServer

            self._server = MetricsServer(self._run, self._port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        # A wrong call needs no notice: the user sees its message.
        if self._notifier is not None and not isinstance(error, UsageError):
            self._notifier.close(self._outcome)


def last_lines(text: str, count: int = 20) -> list[str]:
    """The last lines that are not blank, each sanitised for a terminal."""
    return [line for line in (clean(raw) for raw in text.splitlines()[-4 * count :]) if line][-count:]
