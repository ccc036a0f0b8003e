"""Shells of the next jobs, started while there is nothing else to do, so that a GPU works again sooner after an end.

To start a shell takes longer than all else between a job's end and the next one's start. While short jobs run one after
the other, those that are next therefore get theirs before there is a GPU for them: in a quiet moment, one at a time. It
waits for its go-ahead as every shell does (``engines.local``), and nothing of it is in the queue; if the dispatcher is
killed, it reads the end of its pipe and ends, and its job waits as before. Which GPU it gets it is told with the
go-ahead. The lease it has from its birth: the lock files of the GPUs in question, open but not locked, of which the
dispatcher locks the one that it takes; a lock belongs to the open file, and so to all who have inherited it.

What stands by is given up when its job is not next any more, and after a while, so that no job runs in a folder and
with a program of long ago. It decides nothing: which job starts where is ``policy``'s part, whether it was foreseen
here or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuherd.engines.local import CannotStart
from gpuherd.engines.tree import Traces
from gpuherd.jobs.gpudesk import GpuDesk
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.supervisor import Supervisor, Waiting

if TYPE_CHECKING:
    from gpuherd.gpus.lease import Lease

# Longer jobs don't feel the milliseconds.
_SHORT_S = 10.0
# For so long a shell stands by, and so long after the last short job's end any is made.
_AT_MOST_S = 2 * _SHORT_S
# A quiet moment: longer than the time between ends that come together, which must not wait for what is made here.
_QUIET_S = 0.02
# No more than so many stand by, with so many open lock files: each has one for each GPU in question.
_MOST, _MOST_FILES = 8, 128


@dataclass(frozen=True, slots=True)
class Ready:
    """A shell that stands by. ``leases``: by GPU's UUID, the open lock files that it was given."""

    waiting: Waiting
    leases: Mapping[str, Lease]
    since: float

    def abandon(self) -> None:
        """Gives it up; its empty log goes with it."""
        self.waiting.process.abandon()
        self.close()
        with suppress(OSError):
            if self.waiting.log.stat().st_size == 0:
                self.waiting.log.unlink()

    def close(self) -> None:
        """Closes our copies of the lock files."""
        for lease in self.leases.values():
            lease.close()


class Standby:
    """The shells that stand by.

    Args:
        new_attempt: gives the number of the next attempt.

    Attributes:
        due_at: when ``keep_time`` has something to do (by ``clock.mono``), None for not before something happens.
    """

    def __init__(self, supervisor: Supervisor, desk: GpuDesk, new_attempt: Callable[[], int]):
        self._supervisor = supervisor
        self._desk = desk
        self._new_attempt = new_attempt
        self._ready: dict[int, Ready] = {}
        self._short_until = 0.0
        self.due_at: float | None = None

    @property
    def traces(self) -> list[Traces]:
        """What the processes that stand by are known by."""
        return [ready.waiting.process.traces for ready in self._ready.values()]

    def ended(self, ran_s: float, now: float) -> None:
        """A job has ended after so many seconds: now is no quiet moment."""
        if ran_s < _SHORT_S:
            self._short_until = now + _AT_MOST_S
        self.due_at = now + _QUIET_S

    def started(self, now: float) -> None:
        """Jobs have been started, which may have taken long: whoever has ended meanwhile comes first."""
        if self.due_at is not None:
            self.due_at = max(self.due_at, now + _QUIET_S)

    def keep_time(self, now: float, following: Sequence[QueuedJob], threads: int) -> None:
        """Makes one shell more, or gives up what stands by in vain. ``following``: the jobs that are next, in order."""
        is_due = self.due_at is not None and now >= self.due_at
        if not self._ready and not is_due:
            return
        if now > self._short_until:
            following = ()
        ids = {queued.id for queued in following}
        for job, ready in list(self._ready.items()):
            if job not in ids or now - ready.since > _AT_MOST_S:
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
                self.due_at += _AT_MOST_S + _QUIET_S

    def claim(self, queued: QueuedJob, threads: int) -> Ready | None:
        """The shell that stands by for exactly this attempt, which the caller now has to start or abandon."""
        ready = self._ready.pop(queued.id, None)
        if ready is None:
            return None
        waiting = ready.waiting
        if waiting.queued == queued and waiting.threads == threads and waiting.process.waits_for_go():
            return ready
        ready.abandon()
        return None

    def close(self) -> None:
        """Gives up all."""
        for ready in self._ready.values():
            ready.abandon()
        self._ready.clear()

    def _make(self, queued: QueuedJob, threads: int, now: float) -> bool:
        leases = self._desk.open_ahead() if queued.request.gpus else {}
        try:
            waiting = self._supervisor.launch(
                self._new_attempt(), queued, threads, ahead_fds=[lease.fd for lease in leases.values()]
            )
        except (CannotStart, OSError):
            # Why is said when the job is to be started in earnest.
            for lease in leases.values():
                lease.close()
            return False
        self._ready[queued.id] = Ready(waiting, leases, now)
        return True
