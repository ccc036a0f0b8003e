"""Supervises this machine's running attempts: starts them, takes over those of a dead dispatcher, pauses, resumes and
ends them.

This module handles processes and their time limits; ``complete.settle`` decides what an end means for the job. The code
that orders a pause writes it into the queue first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuherd.engines.local.process import Exit, Launch, LocalProcess, adopt, read_exit, start
from gpuherd.engines.process_tree import (
    ProcessId,
    Seen,
    Traces,
    any_held,
    ask_to_end,
    boot_id,
    everyone,
    kill,
    locks_held,
    members,
)
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.attempts import (
    GRACE_S,
    ORPHANS_FIRST_SCAN_S,
    ORPHANS_GIVE_UP_S,
    ORPHANS_GRACE_S,
    ORPHANS_NEXT_SCAN_S,
    ORPHANS_SURE_S,
)
from gpuherd.jobs.attempts.time_limits import Supervised, TimeLimits, Timer
from gpuherd.jobs.completion import Known, NoFault, Observed
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import AttemptRecord, PauseReason, QueuedJob
from gpuherd.jobs.run_dir import ATTEMPTS_A_FILE, RunDirectory

# Pauses that a person ends.
UNTIL_RESUMED = frozenset({PauseReason.USER, PauseReason.IDLE})


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
    ) -> Attempt:
        """Starts an attempt's shell, which waits for ``let_go``; the queue has no record of it. Raises CannotStart."""
        if attempt_id % ATTEMPTS_A_FILE == 0:
            running = {attempt.record.id for attempt in self.running.values()}
            self.run.remove_stray_attempt_files({*running, attempt_id})
        log = self.run.attempt_log(queued.job.name, queued.attempts + 1)
        process = start(
            Launch(
                tag=self._tag(attempt_id),
                argv=queued.job.argv,
                env=queued.job.env,
                cwd=queued.job.cwd,
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
        record = AttemptRecord(
            id=attempt_id,
            queued=queued,
            number=queued.attempts + 1,
            gpus=(),
            labels=(),
            process=process.identity,
            log=str(log),
            started_at=0.0,
            started_mono=0.0,
        )
        return self._attempt(record, process, 0.0)

    def prepare(
        self, attempt: Attempt, gpus: Sequence[Gpu], *, at: float, mono: float, shared_mb: int | None = None
    ) -> Attempt:
        """Notes where and when an attempt that waits begins, to be recorded before its go-ahead."""
        attempt.record = replace(
            attempt.record,
            gpus=tuple(gpu.uuid for gpu in gpus),
            labels=tuple(gpu.label for gpu in gpus),
            started_at=at,
            started_mono=mono,
            shared_mb=shared_mb,
        )
        attempt.timer = self._timer(attempt.record, mono)
        return attempt

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
            # What the user pauses or resumes is in the queue; there may have been no space for the mark of a pause of
            # our own.
            own = attempt.paused - UNTIL_RESUMED
            self.set_paused(attempt, own | (record.paused & UNTIL_RESUMED), now)

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
        return Attempt(
            record=record,
            process=process,
            progress_file=self.run.attempt_progress(record.id),
            tag=self._tag(record.id),
            timer=self._timer(record, now),
            adopted=adopted,
        )

    def _timer(self, record: AttemptRecord, now: float) -> Timer:
        limits = TimeLimits.of(record.queued.job, self.options)
        timer = Timer(record.started_mono, limits, seen_at=now, idle_s=record.paused_s)
        if record.paused_mono is not None:
            timer.pause(min(now, record.paused_mono))
        return timer


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


# Ends orphans: processes of an attempt whose main process has ended.
#
# They are found by what they inherited, wherever they hide (``engines.process_tree``). SIGTERM at first sight,
# SIGKILL when they are still there a moment later. One scan of all processes serves all attempts that have ended
# since the last one, so that many short jobs don't cost a scan each.

logger = logging.getLogger(__name__)

# One scan can miss a process that forks and exits in a loop. Orphans are gone when so many scans in a row don't find
# any.
_LOOKS_TO_BE_SURE = 3


@dataclass
class _Spell:
    """When orphans of an attempt were first and last seen."""

    first: float
    last: float


class Orphans:
    """Finds and ends the orphans of attempts that have ended. ``due_at`` is when to call ``sweep``, None for never.

    Args:
        queue_tag: prefix of the tags of this queue's attempts; a tag with this prefix that no live attempt has belongs
            to an attempt that has ended, perhaps under an earlier dispatcher.
    """

    def __init__(self, queue_tag: str):
        self._prefix = f"{queue_tag}/"
        self._ended: set[Traces] = set()
        self._spells: dict[str | None, _Spell] = {}
        self._stuck: set[ProcessId] = set()
        self._nothing_seen = 0
        self._looked_at_all = False
        self._since_ticks = 0
        self._scanned_at = 0.0
        self._expected_at = 0.0
        self.due_at: float | None = None

    def expect(self, now: float, traces: Traces | None = None) -> None:
        """An attempt has ended and may have left orphans; ``traces`` where they are known."""
        if traces is not None:
            self._ended.add(traces)
        self._expected_at = now
        if self.due_at is None:
            self.due_at = max(now + ORPHANS_FIRST_SCAN_S, self._scanned_at + ORPHANS_NEXT_SCAN_S)

    def hurry(self, now: float) -> None:
        """There is nothing else to wait for: a first scan that is planned is due now."""
        if self.due_at is not None and not self._spells:
            self.due_at = now

    def sweep(self, live: Collection[Traces], now: float) -> None:
        """Ends every process of an attempt that is not ``live``; plans the next scan until none is left."""
        self._scanned_at = now
        if self._looked_at_all and not self._spells:
            # The first scan found what an earlier dispatcher left; the rest is no older than its attempts.
            self._since_ticks = min((each.leader.start_ticks for each in self._ended), default=0)
        strays = self._find(live)
        self._remember(strays, now)
        late = {attempt for attempt, spell in self._spells.items() if now - spell.first >= ORPHANS_GRACE_S}
        for process in strays:
            if process.attempt not in late:
                self._ask(process, first=self._spells[process.attempt].first == now)
        if late:
            kill(lambda: [process for process in self._find(live) if process.attempt in late])
        for attempt in [key for key, spell in self._spells.items() if now - spell.first > ORPHANS_GIVE_UP_S]:
            self._give_up(attempt, strays)
        if self._is_done(live, now):
            # A session without processes has ended, and its number may be used again.
            self._ended.clear()
            self._spells.clear()
            self.due_at = None
        else:
            self.due_at = now + (ORPHANS_FIRST_SCAN_S if strays else ORPHANS_SURE_S)

    def _remember(self, strays: Collection[Seen], now: float) -> None:
        # One time an attempt, not one a process: a process that forks in a loop is always new, and would never be old
        # enough.
        for process in strays:
            self._spells.setdefault(process.attempt, _Spell(now, now)).last = now
        self._looked_at_all = True
        self._spells = {key: spell for key, spell in self._spells.items() if now - spell.last <= 2 * ORPHANS_GRACE_S}
        self._nothing_seen = 0 if strays else self._nothing_seen + 1

    def _is_done(self, live: Collection[Traces], now: float) -> bool:
        if self._nothing_seen < (_LOOKS_TO_BE_SURE if self._spells else 1):
            return False
        # If a lease is still held, a process was missed, or we are not permitted to see it.
        in_use = {lock for each in live for lock in each.locks}
        held = any_held({lock for each in self._ended for lock in each.locks} - in_use)
        return not held or now - self._expected_at > ORPHANS_GIVE_UP_S

    def _find(self, live: Collection[Traces]) -> tuple[Seen, ...]:
        tags = {each.tag for each in live}
        found = members(
            everyone(self._since_ticks), lambda tag: tag.startswith(self._prefix) and tag not in tags, self._ended, live
        )
        return tuple(process for process in found if process.process not in self._stuck)

    def _ask(self, process: Seen, *, first: bool) -> None:
        if first:
            logger.info("an attempt left process %d behind; ending it", process.process.pid)
        ask_to_end(process.process)

    def _give_up(self, attempt: str | None, strays: Collection[Seen]) -> None:
        """In uninterruptible sleep, usually in a driver: a user can't end such a process."""
        stuck = {process.process for process in strays if process.attempt == attempt}
        logger.warning("can't end process %s; look at it with ps", ", ".join(str(each.pid) for each in stuck))
        self._stuck |= stuck
        del self._spells[attempt]
