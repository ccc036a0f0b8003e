"""Reports the events of a run: to the log, failures.jsonl, the queue's diary, a display and the caller. Decides nothing
and changes no job.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from gpuherd.atomic import append_line
from gpuherd.errors import GpuherdError, clean
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import with_code
from gpuherd.jobs.completion import Settlement
from gpuherd.jobs.job import JobState
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptRecord, Event, EventKind, Failure, RunSnapshot
from gpuherd.jobs.run_dir import RunDirectory

logger = logging.getLogger("gpuherd.jobs")

# Events that the tables of jobs and attempts don't record, so that the diary does.
_DIARY = frozenset({EventKind.ADOPTED, EventKind.CANCELLED, EventKind.IDLE, EventKind.NOTICE, EventKind.REQUEUED})
_LEVELS = {
    EventKind.FAILED: logging.ERROR,
    EventKind.RETRY: logging.WARNING,
    EventKind.CANCELLED: logging.WARNING,
    EventKind.IDLE: logging.WARNING,
}


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
        listeners: Sequence[Callable[[Event], None]] = (),
    ):
        self._queue = queue
        self._run = run
        self._display = display
        self._listeners = listeners
        self.failures: list[Failure] = []

    @property
    def every_s(self) -> float | None:
        """How often the display wants a snapshot, None without a display."""
        return None if self._display is None else self._display.every_s

    def emit(self, kind: EventKind, text: str, **of: Any) -> None:
        """Reports an event. ``of``: further fields of ``Event``."""
        event = Event(kind=kind, at=clock.wall(), text=text, **of)
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
        for listener in self._listeners:
            listener(event)

    def notice(self, text: str) -> None:
        """Reports something about the run as a whole."""
        self.emit(EventKind.NOTICE, text)

    def about(self, kind: EventKind, attempt: AttemptRecord, text: str, run_s: float | None = None) -> None:
        """Reports something about an attempt: ``text`` follows the job's title."""
        self.emit(
            kind,
            f"{clean(attempt.title)}: {text}",
            job=attempt.queued.job.name,
            title=attempt.title,
            attempt=attempt.number,
            gpus=attempt.labels,
            log=attempt.log,
            run_s=run_s,
        )

    def ended(self, settlement: Settlement) -> None:
        """Reports an attempt's end and what follows for its job."""
        attempt, run_s, job = settlement.known.record, settlement.known.run_s or 0.0, settlement.job
        found, log = settlement.diagnosis, attempt.log
        if job is JobState.DONE:
            kind, text = EventKind.DONE, f"done in {run_s:.1f} s"
        elif job is JobState.CANCELLED:
            kind, text = EventKind.CANCELLED, settlement.reason or "cancelled"
        elif found is None:
            kind, text = EventKind.REQUEUED, settlement.reason or "waits again"
        elif job is JobState.WAITING:
            how = f" {settlement.again.change}" if settlement.again is not None and settlement.again.change else ""
            text = f"attempt {attempt.number} failed ({found.failure}), will be tried again{how}"
            kind, text = EventKind.RETRY, f"{text}: {with_code(found.exit_code, found.reason)}"
        else:
            name, title = attempt.queued.job.name, attempt.title
            failure = Failure(name, title, found.failure, found.reason, attempt.number, log, found.exit_code)
            self.failures.append(failure)
            why = with_code(found.exit_code, found.reason)
            kind, text = EventKind.FAILED, f"failed ({found.failure}): {why} (log: {log})"
        self.about(kind, attempt, text, run_s)

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

    def show(self, waiting_for: str | None) -> None:
        """Gives the display a snapshot: the status as ``gpuherd status`` reads it, and which job is next and why it
        waits."""
        from gpuherd.jobs.monitor.job_status import JobSelection
        from gpuherd.jobs.monitor.status import read_status

        if self._display is None:
            return
        try:
            status = read_status(self._run, JobSelection(states=(JobState.RUNNING,), begun=True))
        except GpuherdError as problem:
            logger.debug("can't show the run now: %s", problem)
            return
        in_line = 0 if status.in_engine is None else status.in_engine.in_line
        self._display.snapshot(
            RunSnapshot(status.counts, status.jobs, waiting_for, status.eta_s, status.paused, in_line)
        )


def last_lines(text: str, count: int = 20) -> list[str]:
    """The last lines that are not blank, each sanitised for a terminal."""
    return [line for line in (clean(raw) for raw in text.splitlines()[-4 * count :]) if line][-count:]
