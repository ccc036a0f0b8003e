"""The attempts that run now: starts them, takes over those of a dead dispatcher, keeps their time limits, ends them.

Everything here is about processes; what an end means for the job is decided by ``settle``, and recorded by the
dispatcher.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.engines.local import Exit, Launch, LocalProcess, adopt, read_exit, start
from gpuherd.engines.processes import boot_id
from gpuherd.engines.progress import Progress
from gpuherd.engines.progress import read as read_progress
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.records import AttemptRecord, QueuedJob
from gpuherd.jobs.rundir import ATTEMPTS_A_FILE, RunDirectory
from gpuherd.jobs.settle import Blameless

GRACE_S = 10.0


@dataclass(eq=False)
class Attempt:
    """A running attempt. ``kill_at`` is set (by ``clock.mono``) while it is being stopped."""

    record: AttemptRecord
    process: LocalProcess
    progress_file: Path
    adopted: bool = False
    kill_at: float | None = None
    timed_out: bool = False
    stopped: bool = False

    def progress(self) -> Progress | None:
        """What the job last told of itself."""
        return read_progress(self.progress_file)


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt of a dead dispatcher that has ended meanwhile."""

    record: AttemptRecord
    exit: Exit
    blameless: Blameless | None


@dataclass
class Supervisor:
    """Running attempts by the descriptor that tells their end."""

    run: RunDirectory
    queue_id: str
    grace_s: float = GRACE_S
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    running: dict[int, Attempt] = field(default_factory=dict)

    @property
    def gpus(self) -> set[str]:
        """UUIDs of the GPUs on which our attempts run."""
        return {uuid for attempt in self.running.values() for uuid in attempt.record.gpus}

    @property
    def on_cpu(self) -> int:
        """How many attempts run without a GPU."""
        return sum(not attempt.record.gpus for attempt in self.running.values())

    def prepare(
        self,
        attempt_id: int,
        queued: QueuedJob,
        gpus: Sequence[Gpu],
        lease_fds: Sequence[int],
        threads: int,
        *,
        at: float,
        mono: float,
    ) -> Attempt:
        """Starts an attempt's shell, which waits for ``let_go``. Raises CannotStart."""
        if attempt_id % ATTEMPTS_A_FILE == 0:
            running = {attempt.record.id for attempt in self.running.values()}
            self.run.remove_stray_attempt_files({*running, attempt_id})
        number = queued.attempts + 1
        progress = self.run.attempt_progress(attempt_id)
        log = self.run.attempt_log(queued.job.name, number)
        process = start(
            Launch(
                tag=f"{self.queue_id}/{attempt_id}",
                argv=queued.job.argv,
                env=queued.job.env,
                cwd=queued.job.cwd,
                log=log,
                status=self.run.attempt_status(attempt_id),
                progress=progress,
                gpus=tuple(gpus),
                lease_fds=tuple(lease_fds),
                threads=threads,
            ),
            self.inherited,
        )
        record = AttemptRecord(
            id=attempt_id,
            queued=queued,
            number=number,
            gpus=tuple(gpu.uuid for gpu in gpus),
            labels=tuple(gpu.label for gpu in gpus),
            process=process.identity,
            log=str(log),
            started_at=at,
            started_mono=mono,
        )
        return Attempt(record, process, progress)

    def let_go(self, attempt: Attempt) -> None:
        """Lets a prepared attempt run; it is recorded by now."""
        self.running[attempt.process.pidfd] = attempt
        attempt.process.go()

    def take_over(self, record: AttemptRecord, *, copied: bool) -> Attempt | LostAttempt:
        """An attempt that a dead dispatcher left: running still, or ended meanwhile.

        ``copied``: the queue is a copy of another, whose attempts are none of ours.
        """
        status = self.run.attempt_status(record.id)
        if copied:
            return LostAttempt(record, Exit(started=True), Blameless.COPIED)
        if record.process.boot != boot_id():
            return LostAttempt(record, Exit(started=True), Blameless.REBOOT)
        tag = f"{self.queue_id}/{record.id}"
        process = adopt(record.process, status, tag)
        if process is None:
            ended = read_exit(status, tag)
            return LostAttempt(record, ended, None if ended.started else Blameless.NEVER_WENT)
        attempt = Attempt(record, process, self.run.attempt_progress(record.id), adopted=True)
        self.running[process.pidfd] = attempt
        return attempt

    def collect(self, pidfd: int) -> tuple[Attempt, Exit]:
        """Takes out the attempt whose descriptor has become readable, and says how it ended."""
        attempt = self.running.pop(pidfd)
        return attempt, attempt.process.collect()

    def stop_all(self, now: float, grace_s: float | None = None) -> None:
        """TERM to every attempt now, KILL after the grace."""
        for attempt in self.running.values():
            attempt.stopped = True
            self._stop(attempt, now, self.grace_s if grace_s is None else grace_s)

    def keep_time(self, now: float) -> None:
        """Stops what has passed its time limit, and kills what has passed its grace."""
        for attempt in self.running.values():
            at = _deadline(attempt)
            if at is None or now < at:
                continue
            if attempt.kill_at is None:
                attempt.timed_out = True
                self._stop(attempt, now, self.grace_s)
            else:
                attempt.process.signal(signal.SIGKILL)
                attempt.kill_at = now + self.grace_s

    def next_deadline(self) -> float | None:
        """When ``keep_time`` has something to do, None for never."""
        return min((at for attempt in self.running.values() if (at := _deadline(attempt)) is not None), default=None)

    def _stop(self, attempt: Attempt, now: float, grace_s: float) -> None:
        if attempt.kill_at is None:
            attempt.process.signal(signal.SIGTERM)
            attempt.kill_at = now + grace_s
        else:
            attempt.kill_at = min(attempt.kill_at, now + grace_s)


def _deadline(attempt: Attempt) -> float | None:
    if attempt.kill_at is not None:
        return attempt.kill_at
    limit = attempt.record.queued.job.timeout_s
    return None if limit is None else attempt.record.started_mono + limit
