"""Pauses running jobs and lets them go on: for other users of their GPUs, and for want of disk space."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuherd.jobs.attempts.supervise import Attempt, Supervisor
from gpuherd.jobs.completion import NoFault
from gpuherd.jobs.gpu.usage import Action, ActionKind
from gpuherd.jobs.job import Job
from gpuherd.jobs.queue.errors import may_pass
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import PauseReason
from gpuherd.jobs.reporter import Reporter

# Is there space on the disks of a run? Checked every few seconds while jobs run or wait; below the limit nothing
# starts. And is there space where one job works and writes? Checked for a job that ran out of it; that job alone
# waits.
#
# One call to the file system a folder, and the answer as a sentence. The dispatcher decides what to do about it.

EVERY_S = 2.0
_MB = 1 << 20
# So much more than the limit must be free before work goes on: else it would stop and go with every log line.
_AGAIN = 1.1


class DiskGuard:
    """``low`` is a sentence while there is too little space, else None.

    ``due_at`` is when to call ``look`` (again), None for never.
    """

    def __init__(self, folders: Sequence[Path], min_mb: int):
        self._folders = tuple(dict.fromkeys(folders))
        self._min_mb = min_mb
        self.low: str | None = None
        self.due_at: float | None = 0.0 if min_mb else None

    def change(self, min_mb: int) -> None:
        """So much must be free from now on; to be seen at the next look."""
        self._min_mb = min_mb
        if self.due_at is None and min_mb:
            self.due_at = 0.0

    def look(self, now: float) -> bool:
        """Looks at all folders; returns whether there is too little space in one where there was enough, or reverse."""
        was = self.low is not None
        if not self._min_mb:
            self.low, self.due_at = None, None
            return was
        self.due_at = now + EVERY_S
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


# When running jobs stand still for a while and go on: for somebody else on their GPU, and for want of disk space.
#
# What strangers make us do is decided in ``yielding``, how much space there must be is ``diskguard``'s; here it is
# done: a mark in the queue, then a signal to the processes, so that a successor knows what it finds.

logger = logging.getLogger(__name__)


class Preemption:
    """Pauses and resumes the attempts of one dispatcher."""

    def __init__(self, queue: Queue, supervisor: Supervisor, reporter: Reporter, disk: DiskGuard):
        self._queue = queue
        self._supervisor = supervisor
        self._reporter = reporter
        self._disk = disk

    @property
    def disk_low(self) -> str | None:
        """A sentence while there is too little space, else None."""
        return self._disk.low

    @property
    def due_at(self) -> float | None:
        """When the disk is to be looked at (by ``clock.mono``), None for never."""
        return self._disk.due_at

    def retune(self, min_disk_mb: int) -> None:
        """So much space must be free from now on."""
        self._disk.change(min_disk_mb)

    def taken_over(self, now: float) -> None:
        """Attempts were taken over. An earlier dispatcher may have paused them for a disk that has space by now."""
        self._disk.look(now)
        if self._disk.low is not None:
            self._on_disk(now)
        else:
            for attempt in tuple(self._supervisor.running.values()):
                if PauseReason.DISK in attempt.paused:
                    self._resume(attempt, PauseReason.DISK, now)

    def look_at_disk(self, now: float) -> bool:
        """Looks, if it is time; whether there is too little space where there was enough, or reverse."""
        return self._disk.due_at is not None and now >= self._disk.due_at and self.look_at_disk_now(now)

    def look_at_disk_now(self, now: float) -> bool:
        """As ``look_at_disk``, whether or not it is time."""
        changed = self._disk.look(now)
        if changed:
            self._on_disk(now)
        return changed

    def lacks_space(self, job: Job) -> str | None:
        """A sentence while there is too little space where this job works and writes, else None."""
        return self._disk.lacking_for(job)

    def give_way(self, actions: Sequence[Action], now: float) -> None:
        """To strangers on GPUs of ours, or back from that."""
        for action in actions:
            attempt = next((a for a in self._supervisor.running.values() if a.record.id == action.attempt), None)
            if attempt is not None:
                self._give_way(attempt, action, now)

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
        """There is too little space, or there is enough again."""
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
