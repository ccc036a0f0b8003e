"""The attempts that run now: starts them, takes over those of a dead dispatcher, keeps their time limits, ends them.

Everything here is about processes; what an end means for the job is decided by ``settle``, and recorded by the
dispatcher.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.engines.local import PROGRESS_FILE, STATUS_FILE, Exit, Launch, LocalProcess, adopt, read_exit, start
from gpuherd.engines.processes import boot_id
from gpuherd.engines.progress import Progress
from gpuherd.engines.progress import read as read_progress
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.records import QueuedJob, RunningAttempt
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settle import Blameless

GRACE_S = 10.0


@dataclass(eq=False)
class Attempt:
    """A running attempt. ``kill_at`` is set while it is being stopped; times are of ``clock.mono``."""

    id: int
    queued: QueuedJob
    number: int
    gpus: tuple[str, ...]
    labels: tuple[str, ...]
    process: LocalProcess
    folder: Path
    log: Path
    started_mono: float
    started_at: float
    adopted: bool = False
    kill_at: float | None = None
    timed_out: bool = False
    stopped: bool = False

    @property
    def title(self) -> str:
        """What people call the job."""
        return self.queued.job.title or self.queued.job.name

    def progress(self) -> Progress | None:
        """What the job last told of itself."""
        return read_progress(self.folder / PROGRESS_FILE)


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt of a dead dispatcher that has ended meanwhile. ``ended_at`` is None when nobody knows."""

    record: RunningAttempt
    exit: Exit
    blameless: Blameless | None
    ended_at: float | None


@dataclass
class Supervisor:
    """Running attempts by the descriptor that tells their end."""

    run: RunDirectory
    queue_id: str
    grace_s: float = GRACE_S
    running: dict[int, Attempt] = field(default_factory=dict)

    @property
    def gpus(self) -> set[str]:
        """UUIDs of the GPUs on which our attempts run."""
        return {uuid for attempt in self.running.values() for uuid in attempt.gpus}

    @property
    def on_cpu(self) -> int:
        """How many attempts run without a GPU."""
        return sum(not attempt.gpus for attempt in self.running.values())

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
        """Starts an attempt's shell, which waits for ``let_go``. Raises CannotStart and OSError (folder, log)."""
        number = queued.attempts + 1
        folder = self.run.attempt_dir(attempt_id)
        folder.mkdir(parents=True, exist_ok=True)
        log = self.run.attempt_log(queued.job.name, number)
        process = start(
            Launch(
                tag=f"{self.queue_id}/{attempt_id}",
                argv=queued.job.argv,
                env=queued.job.env,
                cwd=queued.job.cwd,
                log=log,
                folder=folder,
                gpus=tuple(gpus),
                lease_fds=tuple(lease_fds),
                threads=threads,
            )
        )
        return Attempt(
            id=attempt_id,
            queued=queued,
            number=number,
            gpus=tuple(gpu.uuid for gpu in gpus),
            labels=tuple(gpu.label for gpu in gpus),
            process=process,
            folder=folder,
            log=log,
            started_at=at,
            started_mono=mono,
        )

    def let_go(self, attempt: Attempt) -> None:
        """Lets a prepared attempt run; it is recorded by now."""
        self.running[attempt.process.pidfd] = attempt
        attempt.process.go()

    def take_over(self, record: RunningAttempt, labels: tuple[str, ...]) -> Attempt | LostAttempt:
        """An attempt that a dead dispatcher left: running still, or ended meanwhile."""
        folder = self.run.attempt_dir(record.id)
        if record.process.boot != boot_id():
            return LostAttempt(record, Exit(started=True), Blameless.REBOOT, None)
        process = adopt(record.process, folder)
        if process is None:
            ended = read_exit(folder)
            return LostAttempt(record, ended, None if ended.started else Blameless.NEVER_WENT, _last_change(folder))
        attempt = Attempt(
            id=record.id,
            queued=record.queued,
            number=record.number,
            gpus=record.gpus,
            labels=labels,
            process=process,
            folder=folder,
            log=Path(record.log),
            started_at=record.started_at,
            started_mono=record.started_mono,
            adopted=True,
        )
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
            limit = attempt.queued.job.timeout_s
            if attempt.kill_at is None and limit is not None and now >= attempt.started_mono + limit:
                attempt.timed_out = True
                self._stop(attempt, now, self.grace_s)
            elif attempt.kill_at is not None and now >= attempt.kill_at:
                attempt.process.signal(signal.SIGKILL)
                attempt.kill_at = now + self.grace_s

    def next_deadline(self) -> float | None:
        """When ``keep_time`` has something to do, None for never."""
        times = [
            attempt.kill_at if attempt.kill_at is not None else attempt.started_mono + attempt.queued.job.timeout_s
            for attempt in self.running.values()
            if attempt.kill_at is not None or attempt.queued.job.timeout_s is not None
        ]
        return min(times, default=None)

    def _stop(self, attempt: Attempt, now: float, grace_s: float) -> None:
        if attempt.kill_at is None:
            attempt.process.signal(signal.SIGTERM)
            attempt.kill_at = now + grace_s
        else:
            attempt.kill_at = min(attempt.kill_at, now + grace_s)


def _last_change(folder: Path) -> float | None:
    try:
        return (folder / STATUS_FILE).stat().st_mtime
    except OSError:
        return None
