"""Pauses running jobs, resumes and ends them: for other users of their GPUs, when disk space runs out, and when they
don't use their GPUs.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuherd.jobs.attempts import DISK_CHECK_S, MOST_IDLE_ENDS
from gpuherd.jobs.attempts.supervise import Attempt, Supervisor
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed
from gpuherd.jobs.completion import NoFault
from gpuherd.jobs.gpu.idle_jobs import IdleAction
from gpuherd.jobs.gpu.usage import Action, ActionKind
from gpuherd.jobs.job import Job
from gpuherd.jobs.queue.schema import may_pass
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import EventKind, PauseReason
from gpuherd.jobs.reporter import Reporter

_MB = 1 << 20
# So much more than the limit must be free before work goes on: otherwise jobs would stop and go with every log line.
_AGAIN = 1.1


class DiskGuard:
    """Whether there is enough space on the disks of a run, checked every few seconds while jobs run or wait, and where
    one job works and writes, checked for a job that ran out of space. It costs one system call a folder.

    Attributes:
        low: a sentence while there is too little space, else None.
        due_at: when to call ``look`` again (by ``clock.mono``), None for never.
    """

    def __init__(self, folders: Sequence[Path], min_mb: int):
        self._folders = tuple(dict.fromkeys(folders))
        self._min_mb = min_mb
        self.low: str | None = None
        self.due_at: float | None = 0.0 if min_mb else None

    def change(self, min_mb: int) -> None:
        """So many MB must be free from the next check on."""
        self._min_mb = min_mb
        if self.due_at is None and min_mb:
            self.due_at = 0.0

    def look(self, now: float) -> bool:
        """Checks all folders; returns whether there is too little space in one where there was enough, or reverse."""
        was = self.low is not None
        if not self._min_mb:
            self.low, self.due_at = None, None
            return was
        self.due_at = now + DISK_CHECK_S
        wanted = self._min_mb * (_AGAIN if was else 1.0)
        found = None
        for folder in self._folders:
            free = free_mb(folder)
            if free is not None and free < wanted:
                found = self._sentence(folder, free)
                break
        self.low = found
        return was != (found is not None)

    def lacking_for(self, job: Job) -> str | None:
        """A sentence while there is too little space where this job works or writes its result, else None.

        A file system that could never have so much free, since it is read-only or too small, does not count.
        """
        for folder in (job.cwd, job.result and str(Path(job.result).parent)) if self._min_mb else ():
            found = None if not folder else _statvfs(Path(folder))
            if found is None or found.f_flag & os.ST_RDONLY or _mb(found, found.f_blocks) < self._min_mb * _AGAIN:
                continue
            free = _mb(found, found.f_bavail)
            if free < self._min_mb * _AGAIN:
                return self._sentence(Path(str(folder)), free)
        return None

    def _sentence(self, folder: Path, free: int) -> str:
        return f"{free} MB are free in {folder}; at least {self._min_mb} MB must be free (--min-disk)"


def free_mb(folder: Path) -> int | None:
    """Free space in MB (2^20 bytes) that we may use, None where it is unknown."""
    found = _statvfs(folder)
    return None if found is None else _mb(found, found.f_bavail)


def _statvfs(folder: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(folder)
    except OSError:
        return None


def _mb(found: os.statvfs_result, blocks: int) -> int:
    return blocks * found.f_frsize // _MB


logger = logging.getLogger(__name__)


class Preemption:
    """Pauses and resumes the attempts of one dispatcher: a mark in the queue, then a signal to the processes, so that a
    successor knows what it finds. ``gpu.usage`` decides about other users, ``disk`` about space."""

    def __init__(self, queue: Queue, supervisor: Supervisor, reporter: Reporter, disk: DiskGuard):
        self._queue = queue
        self._supervisor = supervisor
        self._reporter = reporter
        self._disk = disk

    def taken_over(self, now: float) -> None:
        """Attempts were taken over. An earlier dispatcher may have paused them for a disk that has space again."""
        self._disk.look(now)
        if self._disk.low is not None:
            self._on_disk(now)
        else:
            for attempt in tuple(self._supervisor.running.values()):
                if PauseReason.DISK in attempt.paused:
                    self._resume(attempt, PauseReason.DISK, now)

    def look_at_disk(self, now: float) -> bool:
        """Checks the disks; whether there is too little space where there was enough, or reverse."""
        changed = self._disk.look(now)
        if changed:
            self._on_disk(now)
        return changed

    def give_way(self, actions: Sequence[Action], now: float) -> None:
        """Pauses, requeues or resumes attempts because of other users on their GPUs."""
        for action in actions:
            attempt = next((a for a in self._supervisor.running.values() if a.record.id == action.attempt), None)
            if attempt is not None:
                self._give_way(attempt, action, now)

    def end_idleness(self, actions: Sequence[IdleAction], now: float) -> None:
        """Reports, pauses, requeues or cancels attempts that don't use their GPUs."""
        for action in actions:
            attempt = next((a for a in self._supervisor.running.values() if a.record.id == action.attempt), None)
            if attempt is not None and attempt.kill_at is None and self._end_idleness(attempt, action, now):
                self._reporter.about(EventKind.IDLE, attempt.record, action.sentence)

    def _end_idleness(self, attempt: Attempt, action: IdleAction, now: float) -> bool:
        """Carries it out; False when the queue can't be written now: the next look tries again."""
        record = attempt.record
        try:
            if action.kind == "pause":
                self._queue.mark_paused(record.id, PauseReason.IDLE, now)
                self._supervisor.set_paused(attempt, attempt.paused | {PauseReason.IDLE}, now)
            elif action.kind == "cancel":
                by = f"gpuherd: it {action.sentence.partition(':')[0]}"
                self._queue.cancel((record.queued.job.name,), by)
                attempt.cancelled_by = by
                self._supervisor.stop(attempt, now)
            elif action.kind == "requeue":
                if self._queue.ends_in_a_row(record.queued.id, NoFault.IDLE) >= MOST_IDLE_ENDS:
                    attempt.passed = Passed(LimitKind.IDLE, action.idle_s)
                else:
                    attempt.no_fault = NoFault.IDLE
                self._supervisor.stop(attempt, now)
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            return False
        return True

    def _give_way(self, attempt: Attempt, action: Action, now: float) -> None:
        self._reporter.notice(action.sentence)
        if action.kind is ActionKind.REQUEUE:
            attempt.no_fault = NoFault.GAVE_WAY
            self._supervisor.stop(attempt, now)
        elif action.kind is ActionKind.PAUSE:
            self._pause(attempt, PauseReason.STRANGER, now)
        elif action.kind is ActionKind.RESUME:
            self._resume(attempt, PauseReason.STRANGER, now)

    def _on_disk(self, now: float) -> None:
        """Pauses or resumes all attempts: there is too little space, or enough again."""
        running = tuple(self._supervisor.running.values())
        if self._disk.low is not None:
            self._reporter.notice(
                f"{self._disk.low}; what runs is paused ({len(running)} running) and nothing is started"
            )
            for attempt in running:
                self._pause(attempt, PauseReason.DISK, now)
        else:
            self._reporter.notice("there is space on the disk again; jobs go on")
            for attempt in running:
                self._resume(attempt, PauseReason.DISK, now)

    def _pause(self, attempt: Attempt, why: PauseReason, now: float) -> None:
        if attempt.kill_at is None:
            _although_full(lambda: self._queue.mark_paused(attempt.record.id, why, now))
            self._supervisor.set_paused(attempt, attempt.paused | {why}, now)

    def _resume(self, attempt: Attempt, why: PauseReason, now: float) -> None:
        _although_full(lambda: self._queue.mark_resumed(attempt.record.id, why, now))
        self._supervisor.set_paused(attempt, attempt.paused - {why}, now)


def _although_full(write: Callable[[], object]) -> None:
    """Writes a mark that the run can do without: a pause for want of space must not fail for want of space, nor because
    another program keeps the queue locked."""
    try:
        write()
    except sqlite3.OperationalError as problem:
        if not may_pass(problem):
            raise
        logger.warning("can't write to the queue: %s", problem)
