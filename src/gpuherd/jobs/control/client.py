"""Sends requests to a queue: cancel, retry, pause, resume, priority, set, reload, drain, stop.

``send`` writes the request into the queue and wakes the dispatcher, which carries it out and writes the response next
to it (``control.server``). If the dispatcher is killed in between, its successor carries the request out, once. Where
no dispatcher runs, ``send`` takes the queue's lock and carries the request out itself, by the same code; then it ends
the jobs that are to end as a dispatcher would: TERM, grace, KILL, record. It starts nothing, and leaves alone the jobs
that a dead dispatcher left running and that no request names.
"""

from __future__ import annotations

import logging
import os
import select
import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from gpuherd.engines.options import EngineOptions
from gpuherd.errors import GpuherdError, QueueBusy, UsageError, clean
from gpuherd.gpus.lease_files import user_name
from gpuherd.jobs import clock
from gpuherd.jobs.attempts import GRACE_S
from gpuherd.jobs.attempts.complete import Completion
from gpuherd.jobs.attempts.supervise import Attempt, Orphans, Supervisor
from gpuherd.jobs.control.messages import OF_JOBS, ControlKind, Request, Response, priority_of, wake
from gpuherd.jobs.control.server import ControlServer
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.lock import DispatcherLock, LockRole
from gpuherd.jobs.options import DispatchOptions, changes
from gpuherd.jobs.queue.reader import is_there
from gpuherd.jobs.queue.schema import may_pass, raising_cannot_write
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptRecord
from gpuherd.jobs.remote import dispatcher
from gpuherd.jobs.remote.tracker import EngineQueries, Tracker
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.options import did_you_mean

logger = logging.getLogger(__name__)

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.05
_NAMES_LOOKED_AT = 5000
# Added to the grace in which an engine's jobs may end while this process waits for them.
_PATIENCE_S = 5.0


def send(run: RunDirectory, request: Request, *, wait_s: float = 10.0) -> Response:
    """Sends a request and waits for the response, at most ``wait_s`` seconds for a dispatcher that does not react.

    Raises:
        UsageError: no queue in this folder, no such job (with the nearest name), option or priority. Nothing was
            written then.
        QueueUnreadable: its queue is damaged or of another version. CannotWrite: the disk is full.
    """
    check(request)
    if not is_there(run.queue):
        raise UsageError(f"{run.root} holds no queue of gpuherd's; name the run folder")
    # A running dispatcher has checked the file; without one, this process works on the queue itself.
    with Queue(run.queue, check=DispatcherLock.holder(run.lock) is None) as queue:
        _refuse_unknown(queue, request)
        by = clean(user_name(os.geteuid()))
        with raising_cannot_write(run.queue, "give the command again; no request was written"):
            number = queue.add_request(replace(request, by=by, at=clock.wall()))
        deadline, pause = time.monotonic() + wait_s, _FIRST_LOOK_S
        while True:
            wake(run.control_fifo)
            response = queue.response(number) or _carry_out_here(queue, run, number)
            if response is not None:
                return response
            if time.monotonic() >= deadline:
                pid = DispatcherLock.holder(run.lock)
                waits = "the request waits in the queue and will be carried out"
                return Response(False, f"gpuherd (pid {pid or 'unknown'}) has not answered yet; {waits}")
            time.sleep(pause)
            pause = min(_LONGEST_LOOK_S, 2 * pause)


def poke(run: RunDirectory) -> bool:
    """Has the dispatcher look at its queue, after ``Queue.add``; False when none runs."""
    return wake(run.control_fifo)


def check(request: Request) -> None:
    """Raises UsageError for settings that no queue could accept."""
    if request.kind == ControlKind.SET:
        if not request.settings:
            raise UsageError("set: say what to set, max_gpus=2 for example")
        changes(request.settings)
    elif request.kind == ControlKind.PRIORITY:
        priority_of(request.settings)
    elif request.settings:
        raise UsageError(f"{request.kind} takes no settings")
    if request.jobs and request.kind not in OF_JOBS:
        raise UsageError(f"{request.kind} is for the run as a whole; it takes no jobs")


def _refuse_unknown(queue: Queue, request: Request) -> None:
    unknown = queue.unknown(request.jobs)
    if unknown:
        hint = did_you_mean(unknown[0], queue.names(_NAMES_LOOKED_AT), show=clean)
        raise UsageError(f"there is no job {clean(unknown[0])!r} in this queue{hint}")


# --- where no dispatcher runs -------------------------------------------------------------------------------------


def _carry_out_here(queue: Queue, run: RunDirectory, number: int) -> Response | None:
    """Carries out every open request if no dispatcher runs; the response to this one, None if one runs."""
    try:
        lock = DispatcherLock(run.lock, LockRole.CONTROL)
    except QueueBusy:
        return None
    with closing(lock):
        before = {record.id: record for record in queue.running()}
        ControlServer(queue, run).carry_out_all()
        running = queue.running()
        if running and not queue.copied:
            _MarkEnforcer(queue, run).enforce(before, running)
        return queue.response(number)


class _MarkEnforcer:
    """Does with running attempts what the marks in the queue say, in place of a dispatcher."""

    def __init__(self, queue: Queue, run: RunDirectory):
        self._queue = queue
        self._run = run
        self._reporter = Reporter(queue, run)
        self._completion = Completion(queue, run, self._reporter, GpuHealth(queue))

    def enforce(self, before: Mapping[int, AttemptRecord], running: Sequence[AttemptRecord]) -> None:
        """Returns when the attempts that are to end have ended, and those to pause or resume have done so.

        Args:
            before: attempts that ran before the requests were carried out; ``running``: those that run now.
        """
        self._end_remote([record for record in running if record.handed is not None and self._queue.owns(record)])
        local = [record for record in running if record.handed is None]
        requested = {record.id for record in local if _is_requested(record, before.get(record.id))}
        if requested:
            with closing(Supervisor(self._run, self._queue.tag, DispatchOptions())) as supervisor:
                self._end_local(supervisor, local, requested)

    def _end_local(self, supervisor: Supervisor, records: Sequence[AttemptRecord], requested: Collection[int]) -> None:
        """Pauses, resumes and ends the attempts of this machine for which that was requested."""
        now, at = clock.mono(), clock.wall()
        for record in records:
            if record.id not in requested:
                continue
            found = supervisor.take_over(record, now, at, copied=False)
            if not isinstance(found, Attempt) and record.queued.cancelled_by is not None:
                self._completion.complete([found], now)
        ending = {fd: attempt for fd, attempt in supervisor.running.items() if attempt.cancelled_by is not None}
        orphans = Orphans(self._queue.tag)
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
                orphans.expect(now, attempt.process.traces)
                self._completion.complete([attempt.ended(how, at=clock.wall(), now=now)], now)
        others = [record for record in records if record.id not in requested]
        while orphans.due_at is not None:
            orphans.hurry(clock.mono())
            select.select([], [], [], max(0.0, orphans.due_at - clock.mono()))
            live = [attempt.process.traces for attempt in supervisor.running.values()]
            live += [traces for record in others if (traces := supervisor.traces(record)) is not None]
            orphans.sweep(live, clock.mono())

    def _end_remote(self, records: Sequence[AttemptRecord]) -> None:
        """Cancels attempts in an engine, with those that wait there to follow them, and records their ends. Where the
        engine can't be reached now, or an attempt takes longer to end than its grace, the mark stays, and the next
        gpuherd that works on the queue ends it.

        Args:
            records: all attempts in the engine.
        """
        cancelled = [
            each.handed for each in records if each.queued.cancelled_by is not None and each.handed is not None
        ]
        if not cancelled:
            return
        name = cancelled[0].engine
        options = dispatcher.recall(self._run)
        if options is None or options.engine != name:
            options = EngineOptions(engine=name)
        try:
            with closing(dispatcher.make(options)) as engine:
                queries = EngineQueries(engine, self._reporter, engine_name(name))
                tracker = Tracker(
                    self._queue,
                    self._run,
                    self._reporter,
                    queries,
                    self._completion,
                    GRACE_S,
                    only_called_back=True,
                )
                tracker.take_over(records)
                until = clock.mono() + GRACE_S + _PATIENCE_S
                while tracker.calls_back and clock.mono() < until:
                    tracker.keep_time(clock.mono())
                    due_at = tracker.due_at
                    queries.wait(until if due_at is None else min(due_at, until))
        except (GpuherdError, sqlite3.OperationalError) as problem:
            if isinstance(problem, sqlite3.OperationalError) and not may_pass(problem):
                raise
            logger.warning("can't cancel jobs in %s: %s", engine_name(name), problem)


def _is_requested(record: AttemptRecord, before: AttemptRecord | None) -> bool:
    """Whether a cancel, pause or resume was requested for this running attempt."""
    return record.queued.cancelled_by is not None or before is None or record.paused != before.paused
