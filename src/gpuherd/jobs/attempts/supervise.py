"""Supervises this machine's running attempts: starts them, takes over those of a dead dispatcher, pauses, resumes and
ends them.

This module handles processes and their time limits; ``retry.settle`` decides what an end means for the job. The code
that orders a pause writes it into the queue first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuherd.engines.local.process import Exit, Launch, LocalProcess, adopt, read_exit, start
from gpuherd.engines.process_tree import Traces, boot_id, locks_held
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.attempts import GRACE_S
from gpuherd.jobs.attempts.time_limits import Supervised, TimeLimits, Timer
from gpuherd.jobs.completion import Known, NoFault, Observed
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import AttemptRecord, PauseReason, QueuedJob
from gpuherd.jobs.run_dir import ATTEMPTS_A_FILE, RunDirectory


@dataclass(eq=False, kw_only=True)
class Attempt(Supervised):
    """A running attempt of this machine.

    Attributes:
        tag: what its processes carry in their environment.
        adopted: an earlier dispatcher has started it.
        no_fault: why it is being ended through no fault of its own; ``cancelled_by``: who has cancelled its job.
        paused: why its processes are stopped now, () while they are not.
    """

    record: AttemptRecord
    tag: str
    adopted: bool = False
    no_fault: NoFault | None = None
    cancelled_by: str | None = None
    paused: frozenset[PauseReason] = frozenset()

    def paused_s(self, now: float, /) -> float:
        """Seconds for which we have paused it until now."""
        return self.timer.paused_s(now)

    def ended(
        self, end: Exit, *, at: float, now: float, gpu_problem: str | None = None, observed: Observed | None = None
    ) -> Known:
        """What is known of its end: ``at`` by the wall clock, ``now`` by the machine's."""
        return Known(
            record=self.record,
            exit=end,
            at=at,
            mono=now,
            no_fault=NoFault.NEVER_WENT if self.adopted and not end.started else self.no_fault,
            cancelled_by=self.cancelled_by,
            passed=self.passed,
            paused_s=self.timer.paused_s(now),
            gpu_problem=gpu_problem,
            observed=observed or Observed(),
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """An attempt's shell that waits for its go-ahead; the queue holds no record of it yet."""

    attempt: int
    queued: QueuedJob
    threads: int
    process: LocalProcess
    log: Path


@dataclass
class Supervisor:
    """Running attempts by the pidfd that becomes readable at their end."""

    run: RunDirectory
    queue_id: str
    options: DispatchOptions
    grace_s: float = GRACE_S
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    running: dict[int, Attempt] = field(default_factory=dict)

    @property
    def gpus(self) -> set[str]:
        """UUIDs of the GPUs on which our attempts run."""
        return {uuid for attempt in self.running.values() for uuid in attempt.record.gpus}

    @property
    def over_at(self) -> dict[str, float]:
        """By GPU's UUID, when the job that has the GPU for itself is over at the latest (by ``clock.mono``), for jobs
        with a time limit: the limit and the grace."""
        found: dict[str, float] = {}
        for attempt in self.running.values():
            over_at = attempt.timer.over_at() if attempt.record.shared_mb is None else None
            if over_at is not None:
                found |= dict.fromkeys(attempt.record.gpus, over_at + self.grace_s)
        return found

    @property
    def on_cpu(self) -> int:
        """How many attempts run without a GPU."""
        return sum(not attempt.record.gpus for attempt in self.running.values())

    def launch(
        self,
        attempt_id: int,
        queued: QueuedJob,
        threads: int,
        *,
        gpus: Sequence[Gpu] = (),
        lease_fds: Sequence[int] = (),
        ahead_fds: Sequence[int] = (),
    ) -> Waiting:
        """Starts an attempt's shell, which waits for ``let_go``. Raises CannotStart."""
        if attempt_id % ATTEMPTS_A_FILE == 0:
            running = {attempt.record.id for attempt in self.running.values()}
            self.run.remove_stray_attempt_files({*running, attempt_id})
        log = self.run.attempt_log(queued.job.name, queued.attempts + 1)
        process = start(
            Launch(
                tag=self._tag(attempt_id),
                job=queued.job,
                log=log,
                status=self.run.attempt_status(attempt_id),
                progress=self.run.attempt_progress(attempt_id),
                gpus=tuple(gpus),
                lease_fds=tuple(lease_fds),
                ahead_fds=tuple(ahead_fds),
                threads=threads if queued.job.cpus is None else queued.job.cpus,
            ),
            self.inherited,
        )
        return Waiting(attempt_id, queued, threads, process, log)

    def prepare(
        self, waiting: Waiting, gpus: Sequence[Gpu], *, at: float, mono: float, shared_mb: int | None = None
    ) -> Attempt:
        """The attempt to record for a shell that waits, before its go-ahead."""
        record = AttemptRecord(
            id=waiting.attempt,
            queued=waiting.queued,
            number=waiting.queued.attempts + 1,
            gpus=tuple(gpu.uuid for gpu in gpus),
            labels=tuple(gpu.label for gpu in gpus),
            process=waiting.process.identity,
            log=str(waiting.log),
            started_at=at,
            started_mono=mono,
            shared_mb=shared_mb,
        )
        return self._attempt(record, waiting.process, mono)

    def let_go(self, attempt: Attempt) -> None:
        """Lets a prepared attempt run, after it was recorded."""
        self.running[attempt.process.pidfd] = attempt
        attempt.process.go()

    def take_over(self, record: AttemptRecord, now: float, at: float, *, copied: bool) -> Attempt | Known:
        """An attempt that a dead dispatcher left: it still runs, or it has ended meanwhile. What the queue says of it
        (paused, to be cancelled) is carried out.

        Args:
            now, at: this moment by the machine's clock and by the wall clock.
            copied: the queue is a copy of another, whose attempts are none of ours.
        """
        status = self.run.attempt_status(record.id)
        if copied:
            return lost(record, Exit(started=True), NoFault.COPIED, None, at)
        if record.process is None:
            raise ValueError(f"attempt {record.id} has no process on this machine: {record.handed}")
        if record.process.boot != boot_id():
            return lost(record, Exit(started=True), NoFault.REBOOT, None, at)
        tag = self._tag(record.id)
        process = adopt(record.process, status, tag)
        if process is None:
            ended = read_exit(status, tag)
            return lost(record, ended, None if ended.started else NoFault.NEVER_WENT, now, at)
        attempt = self._attempt(record, process, now, adopted=True)
        self.running[process.pidfd] = attempt
        self.set_paused(attempt, record.paused, now)
        self.enforce(attempt, record, now)
        if not record.paused and record.paused_s:
            # Its dispatcher may have died between recording that it is resumed and resuming it. (An attempt that stands
            # still and that we have never paused was stopped by its owner; it stays so.)
            process.resume()
        return attempt

    def traces(self, record: AttemptRecord) -> Traces | None:
        """The traces that identify the processes of a running attempt, without following it; None when it has ended."""
        process = record.process
        if process is None or process.boot != boot_id() or not process.is_alive():
            return None
        return Traces(self._tag(record.id), process, locks_held(process.pid))

    def close(self) -> None:
        """Stops supervising; the attempts run on."""
        for attempt in self.running.values():
            attempt.process.release()
        self.running.clear()

    def collect(self, pidfd: int) -> tuple[Attempt, Exit]:
        """Removes the attempt whose descriptor has become readable; returns it and how its process ended."""
        attempt = self.running.pop(pidfd)
        return attempt, attempt.process.collect()

    def enforce(self, attempt: Attempt, record: AttemptRecord, now: float) -> None:
        """Cancels, pauses or resumes the processes as marked in the queue: ``record`` is the attempt as the queue has
        it now."""
        if record.queued.cancelled_by is not None and attempt.cancelled_by is None:
            attempt.cancelled_by = record.queued.cancelled_by
            self.stop(attempt, now)
        elif attempt.kill_at is None:
            # The user's requests are in the queue; there may have been no space for the mark of a pause of our own.
            own = attempt.paused - {PauseReason.USER}
            self.set_paused(attempt, own | (record.paused & {PauseReason.USER}), now)

    def set_paused(self, attempt: Attempt, why: frozenset[PauseReason], now: float) -> None:
        """Pauses the attempt's processes for these reasons, or resumes them when there is none."""
        if why and not attempt.paused:
            attempt.timer.pause(now)
            attempt.process.pause()
        elif attempt.paused and not why:
            attempt.process.resume()
            attempt.timer.resume(now)
        attempt.paused = why

    def stop(self, attempt: Attempt, now: float, grace_s: float | None = None) -> None:
        """SIGTERM now, SIGKILL after the grace; a paused attempt is resumed so that it can end."""
        if attempt.kill_at is None:
            attempt.timer.resume(now)
            attempt.paused = frozenset()
        attempt.end(now, self.grace_s if grace_s is None else grace_s)

    def stop_all(self, now: float, grace_s: float | None = None) -> None:
        """The same for every attempt; each waits again."""
        for attempt in self.running.values():
            attempt.no_fault = NoFault.STOPPED
            self.stop(attempt, now, grace_s)

    def keep_time(self, now: float) -> None:
        """Ends what has passed a time limit, and kills what has passed its grace."""
        for attempt in self.running.values():
            attempt.keep_time(now, self.grace_s)

    def next_deadline(self) -> float | None:
        """When ``keep_time`` has something to do, None for never."""
        return min((at for attempt in self.running.values() if (at := attempt.next_at()) is not None), default=None)

    def retune(self, options: DispatchOptions) -> None:
        """Sets the options for attempts that start from now on."""
        self.options = options

    def _tag(self, attempt_id: int) -> str:
        return f"{self.queue_id}/{attempt_id}"

    def _attempt(self, record: AttemptRecord, process: LocalProcess, now: float, *, adopted: bool = False) -> Attempt:
        limits = TimeLimits.of(record.queued.job, self.options)
        timer = Timer(record.started_mono, limits, seen_at=now, idle_s=record.paused_s)
        if record.paused_mono is not None:
            timer.pause(min(now, record.paused_mono))
        return Attempt(
            record=record,
            process=process,
            progress_file=self.run.attempt_progress(record.id),
            tag=self._tag(record.id),
            timer=timer,
            adopted=adopted,
        )


def lost(record: AttemptRecord, end: Exit, no_fault: NoFault | None, now: float | None, at: float) -> Known:
    """An attempt of a dead dispatcher that has ended since. ``now``: None where the machine's clock began anew."""
    mono = now
    if now is not None and end.ran_s is not None:
        # By the status file, so that hours without a dispatcher don't count as the job's.
        mono = min(now, record.started_mono + end.ran_s)
        at -= now - mono
    return Known(
        record=record,
        exit=end,
        at=at,
        mono=mono,
        no_fault=no_fault,
        cancelled_by=record.queued.cancelled_by,
        paused_s=record.paused_s,
        observed=Observed(gpus=record.gpus),
    )
