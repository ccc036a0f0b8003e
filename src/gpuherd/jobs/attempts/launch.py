"""Starts attempts: shells started in advance, leases, the record in the queue, the go-ahead."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.engines.local.process import CannotStart
from gpuherd.engines.process_tree import Traces
from gpuherd.jobs import clock
from gpuherd.jobs.attempts import PREFORK_KEEP_S, PREFORK_QUIET_S, PREFORK_SHORT_S, START_AGAIN_S
from gpuherd.jobs.attempts.complete import give_up
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.attempts.supervise import Attempt, Supervisor
from gpuherd.jobs.gpu.manager import GpuManager
from gpuherd.jobs.queue.schema import may_pass
from gpuherd.jobs.queue.store import Overtaken, Queue
from gpuherd.jobs.records import AttemptRecord, EventKind, QueuedJob, StartRecord
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.scheduler.types import Start

if TYPE_CHECKING:
    from gpuherd.gpus.leases import Lease
    from gpuherd.gpus.state import Gpu


# Prefork: shells of the next jobs, started while there is nothing else to do, so that a GPU works again sooner after an
# end.
#
# Starting a shell takes longer than everything else between a job's end and the next job's start. While short jobs
# follow each other, the next jobs therefore get their shells before there is a GPU for them: in a quiet moment, one at
# a time. A preforked shell waits for its go-ahead as every shell does (``engines.local.process``), and the queue holds
# no record of it: if the dispatcher is killed, the shell reads the end of its pipe and exits, and its job waits as
# before. The go-ahead names its GPUs. It inherits the lease from the start: the lock files of all GPUs in question,
# open but not locked, of which the dispatcher locks the ones that it takes. A lock belongs to the open file, and so to
# every process that has inherited it.
#
# A preforked shell is ended when its job is not next any more, and after a while, so that no job runs in an old folder
# or with an old program. Preforking decides nothing: ``policy`` decides which job starts where, whether its shell is
# ready or not.

# At most so many shells, with so many open lock files: each shell has one for each GPU in question.
_MOST, _MOST_FILES = 8, 128


@dataclass(slots=True)
class _Preforked:
    """A shell started in advance, for so many threads. ``leases``: by GPU's UUID, the open lock files that it has."""

    attempt: Attempt
    leases: Mapping[str, Lease]
    threads: int
    since: float
    _is_open: bool = True

    def use(self, gpus: Sequence[Gpu], lease_fds: Sequence[int]) -> Attempt:
        """It is started on these GPUs: from now on ``abandon`` does nothing."""
        self.attempt.process.assign(gpus, lease_fds)
        self._close()
        return self.attempt

    def abandon(self) -> None:
        """Ends it unless it was used; its empty log goes with it."""
        if not self._is_open:
            return
        self.attempt.process.abandon()
        self._close()
        log = Path(self.attempt.record.log)
        with suppress(OSError):
            if log.stat().st_size == 0:
                log.unlink()

    def _close(self) -> None:
        """Closes our copies of the lock files."""
        self._is_open = False
        for lease in self.leases.values():
            lease.close()


class Prefork:
    """The preforked shells of one dispatcher.

    Args:
        new_attempt: returns the number of the next attempt.

    Attributes:
        due_at: when ``keep_time`` has something to do (by ``clock.mono``); None until an event.
    """

    def __init__(self, supervisor: Supervisor, gpus: GpuManager, new_attempt: Callable[[], int]):
        self._supervisor = supervisor
        self._gpus = gpus
        self._new_attempt = new_attempt
        self._ready: dict[int, _Preforked] = {}
        self._short_until = 0.0
        self.due_at: float | None = None

    @property
    def traces(self) -> list[Traces]:
        """How the processes of the preforked shells are recognised."""
        return [ready.attempt.process.traces for ready in self._ready.values()]

    def ended(self, ran_s: float, now: float) -> None:
        """A job has ended after so many seconds: this is no quiet moment."""
        if ran_s < PREFORK_SHORT_S:
            self._short_until = now + PREFORK_KEEP_S
        self.due_at = now + PREFORK_QUIET_S

    def started(self, now: float) -> None:
        """Jobs have been started, which may have taken long: jobs that have ended meanwhile come first."""
        if self.due_at is not None:
            self.due_at = max(self.due_at, now + PREFORK_QUIET_S)

    def keep_time(self, now: float, following: Sequence[QueuedJob], threads: int) -> None:
        """Starts one more shell, or ends those that are not needed. ``following``: the jobs that are next, in order."""
        is_due = self.due_at is not None and now >= self.due_at
        if not self._ready and not is_due:
            return
        if now > self._short_until:
            following = ()
        ids = {queued.id for queued in following}
        for job, ready in list(self._ready.items()):
            if job not in ids or now - ready.since > PREFORK_KEEP_S:
                self._ready.pop(job).abandon()
        if not is_due:
            return
        most = min(_MOST, len(self._supervisor.running), _MOST_FILES // max(1, len(self._supervisor.gpus)))
        missing = next((queued for queued in following[:most] if queued.id not in self._ready), None)
        if missing is not None and self._make(missing, threads, now):
            self.due_at = now
        else:
            self.due_at = min((ready.since for ready in self._ready.values()), default=None)
            if self.due_at is not None:
                self.due_at += PREFORK_KEEP_S + PREFORK_QUIET_S

    def claim(self, queued: QueuedJob, threads: int) -> _Preforked | None:
        """The shell preforked for exactly this attempt, which the caller must now start or abandon."""
        ready = self._ready.pop(queued.id, None)
        if ready is None:
            return None
        same = ready.attempt.record.queued == queued and ready.threads == threads
        if same and ready.attempt.process.waits_for_go():
            return ready
        ready.abandon()
        return None

    def close(self) -> None:
        """Ends all of them."""
        for ready in self._ready.values():
            ready.abandon()
        self._ready.clear()

    def _make(self, queued: QueuedJob, threads: int, now: float) -> bool:
        leases = self._gpus.open_ahead() if queued.request.gpus else {}
        try:
            attempt = self._supervisor.launch(
                self._new_attempt(), queued, threads, ahead_fds=[lease.fd for lease in leases.values()]
            )
        except (CannotStart, OSError):
            # The reason is reported when the job is really started.
            for lease in leases.values():
                lease.close()
            return False
        self._ready[queued.id] = _Preforked(attempt, leases, threads, now)
        return True


# The order of a start: leases, one more check of the GPUs under the leases, a shell that waits, the record in the
# queue, the go-ahead. Starts that come together share the check, and a few at a time share the record.

# So many starts share a record in the queue: more would delay the first one, fewer would cost a record each.
_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class _Leased:
    """A start whose GPUs are leased, and the preforked shell that has inherited the leases, if there is one."""

    start: Start
    leases: Sequence[Lease]
    preforked: _Preforked | None = None


class Launcher:
    """Carries out starts.

    Attributes:
        prefork: the shells preforked for the next starts.
        again_at: when to retry a start that failed for lack of something (by ``clock.mono``), else None.
    """

    def __init__(
        self, queue: Queue, supervisor: Supervisor, gpus: GpuManager, reporter: Reporter, run_id: int, began_at: float
    ):
        self._queue = queue
        self._supervisor = supervisor
        self._gpus = gpus
        self._reporter = reporter
        self._run_id = run_id
        self._began_at = began_at
        self._numbers = count(queue.last_attempt() + 1)
        self.prefork = Prefork(supervisor, gpus, lambda: next(self._numbers))
        self.threads = 1
        self.again_at: float | None = None

    def start_all(
        self, starts: Sequence[Start], head: Mapping[int, QueuedJob], promised_mb: Mapping[int, int | None]
    ) -> tuple[Attempt, ...]:
        """Starts what can be started; returns the attempts that run now. ``promised_mb``: GPU memory promised to jobs
        that share."""
        with ExitStack() as held:
            # In the end only the job's processes hold the leases: our copies must be closed, or a lock would outlive
            # its job.
            leased = [found for start in starts if (found := self._lease(start, head[start.job], held)) is not None]
            leased_mono = clock.mono()
            free = self._gpus.still_free([each.start for each in leased])
            ready = [each for each in leased if all(gpu.uuid in free for gpu in each.start.gpus)]
            running: list[Attempt] = []
            for first in range(0, len(ready), _AT_ONCE):
                prepared = []
                for each in ready[first : first + _AT_ONCE]:
                    shared_mb = promised_mb[each.start.job] if each.start.shared else None
                    attempt = self._prepare(each, head[each.start.job], shared_mb)
                    prepared += [] if attempt is None else [attempt]
                running += self._let_go(prepared, leased_mono)
                if self.again_at is not None:
                    break
        self._gpus.drop_unused()
        self.prefork.started(clock.mono())
        return tuple(running)

    def _lease(self, start: Start, queued: QueuedJob, held: ExitStack) -> _Leased | None:
        """Leases the start's GPUs, for the preforked shell if there is one. None when another process was faster."""
        ready = None if start.shared else self.prefork.claim(queued, self.threads)
        if ready is None:
            leases = self._gpus.take(start, queued, held, {})
            return None if leases is None else _Leased(start, leases)
        # Also when what follows fails: otherwise the shell would keep the GPU that was leased for it.
        held.callback(ready.abandon)
        leases = self._gpus.take(start, queued, held, ready.leases)
        if leases is None:
            return None
        if not all(lease.was_ahead for lease in leases):
            # A lock file other than the shell's: the shell would not hold the lease.
            ready.abandon()
            return _Leased(start, leases)
        return _Leased(start, leases, ready)

    def _prepare(self, leased: _Leased, queued: QueuedJob, shared_mb: int | None) -> Attempt | None:
        at, mono = clock.wall(), clock.mono()
        start, fds = leased.start, [lease.fd for lease in leased.leases]
        try:
            if leased.preforked is None:
                attempt = self._supervisor.launch(
                    next(self._numbers), queued, self.threads, gpus=start.gpus, lease_fds=fds
                )
            else:
                attempt = leased.preforked.use(start.gpus, fds)
        except (CannotStart, OSError) as problem:
            self._cannot_start(queued, problem)
            return None
        return self._supervisor.prepare(attempt, start.gpus, at=at, mono=mono, shared_mb=shared_mb)

    def _start_record(self, record: AttemptRecord, leased_mono: float) -> StartRecord:
        wait_s = max(0.0, record.started_at - max(record.queued.ready_at, self._began_at))
        return StartRecord(record, wait_s, leased_mono if record.gpus else None)

    def _let_go(self, prepared: Sequence[Attempt], leased_mono: float) -> Sequence[Attempt]:
        if not prepared:
            return ()
        try:
            starts = [self._start_record(attempt.record, leased_mono) for attempt in prepared]
            self._queue.record_starts(starts, self._run_id)
        except BaseException as problem:
            for attempt in prepared:
                attempt.process.release()
            if isinstance(problem, Overtaken):
                return ()  # the next decision, which follows at once, reads them anew
            if isinstance(problem, sqlite3.OperationalError) and may_pass(problem):
                self._later(problem)
                return ()
            raise
        for attempt in prepared:
            self._supervisor.let_go(attempt)
        for attempt in prepared:
            labels = attempt.record.labels
            place = f" on GPU {', '.join(labels)}" if labels else " on the CPU"
            self._reporter.about(EventKind.STARTED, attempt.record, "started" + place)
        return prepared

    def _cannot_start(self, queued: QueuedJob, problem: CannotStart | OSError) -> None:
        if isinstance(problem, CannotStart) and not problem.may_pass:
            self.give_up(queued, FailureClass.NEVER_STARTED, str(problem))
        else:
            self._later(problem)

    def _later(self, problem: Exception) -> None:
        self._reporter.notice(f"can't start a job now, trying again in {START_AGAIN_S:g} s: {problem}")
        self.again_at = clock.mono() + START_AGAIN_S

    def give_up(self, queued: QueuedJob, failure: FailureClass, reason: str) -> None:
        """A job fails without an attempt; where the disk is full, later."""
        problem = give_up(self._queue, self._reporter, [queued], failure, reason)
        if problem is not None:
            self._later(problem)
