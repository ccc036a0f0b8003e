"""Does what is requested of a queue on which no dispatcher works, by the same code; the caller holds the queue's lock.

Jobs that a dead dispatcher left running run on. Those that are to end are ended here, as a dispatcher would: TERM,
grace, KILL, record. Those without a request are not touched. Nothing is started.
"""

from __future__ import annotations

import select
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing

from gpuherd.errors import UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.applying import apply
from gpuherd.jobs.ending import Ended, Endings, lost
from gpuherd.jobs.health import HealthBook
from gpuherd.jobs.leftovers import Leftovers
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.records import AttemptRecord
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.supervisor import GRACE_S, Attempt, Supervisor


class _NobodyThere:
    """What only a dispatcher can do."""

    name = "here"

    def __init__(self, run: RunDirectory):
        self._run = run

    def set(self, settings: Mapping[str, str]) -> str:
        raise UsageError(f"no gpuherd works on {self._run.root}; give {', '.join(settings)} when you start one")

    def reload(self) -> str:
        return f"no gpuherd works on {self._run.root}; the next one reads the settings when it starts"

    def drain(self) -> str:
        return f"no gpuherd works on {self._run.root}"

    def stop(self) -> str:
        return f"no gpuherd works on {self._run.root}"


def take_care(queue: Queue, run: RunDirectory) -> None:
    """Applies all that is requested, and sees to it that jobs which are to end have ended when this returns."""
    hands = _NobodyThere(run)
    before = {record.id: record for record in queue.running()}
    for letter in queue.letters():
        apply(queue, letter, hands)
    running = queue.running()
    if not running or queue.copied:
        return
    tell = Reporter(queue, run)
    endings = Endings(queue, run, tell, HealthBook(queue))
    handed = [record for record in running if record.handed is not None and queue.owns(record)]
    if any(record.queued.cancelled_by is not None for record in handed):
        from gpuherd.jobs.handover.caretaking import end_cancelled

        end_cancelled(queue, run, tell, endings, handed, GRACE_S)
    here = [record for record in running if record.handed is None]
    requested = {record.id for record in here if _is_requested(record, before.get(record.id))}
    if requested:
        with closing(Supervisor(run, queue.tag, DispatchOptions())) as supervisor:
            _end_here(queue, supervisor, endings, here, requested)


def _is_requested(record: AttemptRecord, before: AttemptRecord | None) -> bool:
    """Whether a cancel, pause or resume was requested for this running attempt."""
    return record.queued.cancelled_by is not None or before is None or record.paused != before.paused


def _end_here(
    queue: Queue,
    supervisor: Supervisor,
    endings: Endings,
    records: Sequence[AttemptRecord],
    requested: Collection[int],
) -> None:
    """Pauses, resumes and ends the attempts of this machine for which that was requested."""
    now, at = clock.mono(), clock.wall()
    for record in records:
        if record.id not in requested:
            continue
        found = supervisor.take_over(record, now, copied=False)
        if not isinstance(found, Attempt) and record.queued.cancelled_by is not None:
            endings.settle([lost(found, at, now)], now)
    ending = {fd: attempt for fd, attempt in supervisor.running.items() if attempt.cancelled_by is not None}
    leftovers = Leftovers(queue.tag)
    ends = select.poll()  # not select, which knows no descriptor above 1023
    for fd in ending:
        ends.register(fd, select.POLLIN)
    while ending:
        supervisor.keep_time(clock.mono())
        due = supervisor.next_deadline()
        for fd, _ in ends.poll(None if due is None else max(0.0, due - clock.mono()) * 1000):
            ends.unregister(fd)
            attempt, how = supervisor.collect(fd)
            del ending[fd]
            now = clock.mono()
            leftovers.expect(now, attempt.process.traces)
            ended = Ended(
                record=attempt.record,
                exit=how,
                at=clock.wall(),
                mono=now,
                cancelled_by=attempt.cancelled_by,
                paused_s=attempt.timer.paused_s(now),
            )
            endings.settle([ended], now)
    others = [record for record in records if record.id not in requested]
    while leftovers.due_at is not None:
        leftovers.hurry(clock.mono())
        select.select([], [], [], max(0.0, leftovers.due_at - clock.mono()))
        live = [attempt.process.traces for attempt in supervisor.running.values()]
        live += [traces for record in others if (traces := supervisor.traces(record)) is not None]
        leftovers.sweep(live, clock.mono())
