"""The order of a start: leases, one more look at the GPUs under them, a shell that waits, the record in the queue, the
go-ahead. Starts that come together share the look, and a few at a time the record.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from gpuherd.engines.local import CannotStart
from gpuherd.jobs import clock
from gpuherd.jobs.events import EventKind
from gpuherd.jobs.failures import FailureClass
from gpuherd.jobs.fulldisk import may_pass
from gpuherd.jobs.givingup import give_up
from gpuherd.jobs.gpudesk import GpuDesk
from gpuherd.jobs.policy import Start
from gpuherd.jobs.queue import Overtaken, Queue
from gpuherd.jobs.records import QueuedJob, StartRecord
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.standby import Ready, Standby
from gpuherd.jobs.supervisor import Attempt, Supervisor, Waiting

if TYPE_CHECKING:
    from gpuherd.gpus.lease import Lease
    from gpuherd.gpus.state import Gpu

# After a start failed for want of processes, files, memory or space, which may pass.
START_AGAIN_S = 1.0
# So many starts share a record in the queue: more would make the first wait for the last, fewer cost a record each.
_AT_ONCE = 2


class _Claimed:
    """A shell that stood by, for the time in which it is not clear yet whether its job can be started."""

    def __init__(self, ready: Ready):
        self._ready = ready
        self._is_open = True

    def use(self, gpus: Sequence[Gpu], lease_fds: Sequence[int]) -> Waiting:
        """It is started on these GPUs: from now on it is the attempt's."""
        self._ready.waiting.process.assign(gpus, lease_fds)
        self._is_open = False
        self._ready.close()
        return self._ready.waiting

    def end(self) -> None:
        """Gives it up unless it was used."""
        if self._is_open:
            self._is_open = False
            self._ready.abandon()


@dataclass(frozen=True, slots=True)
class _Leased:
    """A start whose GPUs are taken, and the shell that has inherited its leases, where there is one."""

    start: Start
    leases: Sequence[Lease]
    claimed: _Claimed | None = None


class Starter:
    """Carries starts out.

    Attributes:
        standby: the shells that wait for the next starts.
        again_at: when to try again what failed for want of something (by ``clock.mono``), else None.
    """

    def __init__(
        self, queue: Queue, supervisor: Supervisor, desk: GpuDesk, tell: Reporter, run_id: int, began_at: float
    ):
        self._queue = queue
        self._supervisor = supervisor
        self._desk = desk
        self._tell = tell
        self._run_id = run_id
        self._began_at = began_at
        self._numbers = count(queue.last_attempt() + 1)
        self.standby = Standby(supervisor, desk, lambda: next(self._numbers))
        self.threads = 1
        self.again_at: float | None = None

    def start_all(
        self, starts: Sequence[Start], head: Mapping[int, QueuedJob], promised_mb: Mapping[int, int | None]
    ) -> tuple[Attempt, ...]:
        """Starts what can be started of it; returns the attempts that run now. ``promised_mb``: by job that shares."""
        with ExitStack() as held:
            # The job's processes hold the leases in the end. Our copies must go, or a lock would outlive its job.
            leased = [found for start in starts if (found := self._lease(start, head[start.job], held)) is not None]
            leased_mono = clock.mono()
            free = self._desk.still_free([each.start for each in leased])
            ready = [each for each in leased if all(gpu.uuid in free for gpu in each.start.gpus)]
            running: list[Attempt] = []
            for first in range(0, len(ready), _AT_ONCE):
                prepared = []
                for each in ready[first : first + _AT_ONCE]:
                    shared_mb = promised_mb[each.start.job] if each.start.shared else None
                    record = self._prepare(each, head[each.start.job], leased_mono, shared_mb)
                    prepared += [] if record is None else [record]
                running += self._let_go(prepared)
                if self.again_at is not None:
                    break
        self._desk.drop_unused()
        self.standby.started(clock.mono())
        return tuple(running)

    def _lease(self, start: Start, queued: QueuedJob, held: ExitStack) -> _Leased | None:
        """Takes the start's GPUs, for the shell that stands by where there is one. None when somebody was faster."""
        ready = None if start.shared else self.standby.claim(queued, self.threads)
        if ready is None:
            leases = self._desk.take(start, queued, held, {})
            return None if leases is None else _Leased(start, leases)
        # Also when what follows fails: else the shell would keep the GPU that was taken for it.
        claimed = _Claimed(ready)
        held.callback(claimed.end)
        leases = self._desk.take(start, queued, held, ready.leases)
        if leases is None:
            return None
        if not all(lease.was_ahead for lease in leases):
            # Another lock file than the one that the shell has: it would not hold the lease.
            claimed.end()
            return _Leased(start, leases)
        return _Leased(start, leases, claimed)

    def _prepare(
        self, leased: _Leased, queued: QueuedJob, leased_mono: float, shared_mb: int | None
    ) -> tuple[Attempt, StartRecord] | None:
        at, mono = clock.wall(), clock.mono()
        start, fds = leased.start, [lease.fd for lease in leased.leases]
        try:
            if leased.claimed is None:
                waiting = self._supervisor.launch(
                    next(self._numbers), queued, self.threads, gpus=start.gpus, lease_fds=fds
                )
            else:
                waiting = leased.claimed.use(start.gpus, fds)
        except (CannotStart, OSError) as problem:
            self._cannot_start(queued, problem)
            return None
        attempt = self._supervisor.prepare(waiting, start.gpus, at=at, mono=mono, shared_mb=shared_mb)
        wait_s = max(0.0, at - max(queued.ready_at, self._began_at))
        return attempt, StartRecord(attempt.record, wait_s, leased_mono if start.gpus else None)

    def _let_go(self, prepared: Sequence[tuple[Attempt, StartRecord]]) -> tuple[Attempt, ...]:
        if not prepared:
            return ()
        try:
            self._queue.record_starts([record for _, record in prepared], self._run_id)
        except BaseException as problem:
            for attempt, _ in prepared:
                attempt.process.release()
            if isinstance(problem, Overtaken):
                return ()  # the next decision, which follows at once, reads them anew
            if isinstance(problem, sqlite3.OperationalError) and may_pass(problem):
                self._later(problem)
                return ()
            raise
        for attempt, _ in prepared:
            self._supervisor.let_go(attempt)
        for attempt, _ in prepared:
            labels = attempt.record.labels
            place = f" on GPU {', '.join(labels)}" if labels else " on the CPU"
            self._tell.about(EventKind.STARTED, attempt.record, "started" + place)
        return tuple(attempt for attempt, _ in prepared)

    def _cannot_start(self, queued: QueuedJob, problem: CannotStart | OSError) -> None:
        if isinstance(problem, CannotStart) and not problem.may_pass:
            self.give_up(queued, FailureClass.NEVER_STARTED, str(problem))
        else:
            self._later(problem)

    def _later(self, problem: Exception) -> None:
        self._tell.notice(f"can't start a job now, trying again in {START_AGAIN_S:g} s: {problem}")
        self.again_at = clock.mono() + START_AGAIN_S

    def give_up(self, queued: QueuedJob, failure: FailureClass, reason: str) -> None:
        """A job fails without an attempt; later, where the disk is full."""
        problem = give_up(self._queue, self._tell, [queued], failure, reason)
        if problem is not None:
            self._later(problem)
