"""Sends requests to a queue: cancel, retry, pause, resume, drain, stop, set, reload, priority. Carries them out itself
where no dispatcher runs.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing

from gpuherd.engines.options import EngineOptions
from gpuherd.errors import GpuherdError, QueueBusy, UsageError
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.complete import Completion
from gpuherd.jobs.attempts.failures import clean
from gpuherd.jobs.attempts.orphans import Leftovers
from gpuherd.jobs.attempts.supervise import GRACE_S, Attempt, Supervisor
from gpuherd.jobs.completion import NoFault
from gpuherd.jobs.control.messages import OF_JOBS, Answer, Control, ControlKind, priority_of, ring
from gpuherd.jobs.control.server import apply
from gpuherd.jobs.dispatcher_state import engine_name
from gpuherd.jobs.gpu.health import HealthBook
from gpuherd.jobs.lock import DispatcherLock, Role
from gpuherd.jobs.options import DispatchOptions, changes
from gpuherd.jobs.queue.errors import raising_cannot_write
from gpuherd.jobs.queue.interventions import Letter
from gpuherd.jobs.queue.reader import is_there
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptRecord
from gpuherd.jobs.remote import dispatcher
from gpuherd.jobs.remote.outcome import Outcomes, RemoteAttempt
from gpuherd.jobs.remote.query import Asking
from gpuherd.jobs.remote.spool import Folder
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.options import did_you_mean

# Asking something of a queue while it is worked off: cancel, retry, pause, resume, drain, stop, set, reload,
# priority.
#
# ``send`` writes the wish into the queue and rings the dispatcher's bell; the dispatcher does it and writes the
# answer beside it. A dispatcher that is killed in between leaves the wish standing, and its successor does it, once.
# Where no dispatcher is at work, ``send`` takes the queue's lock and does it here by the same code.

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.05
_NAMES_LOOKED_AT = 5000


def send(run: RunDirectory, control: Control, *, wait_s: float = 10.0) -> Answer:
    """Asks for something and waits for the answer, at most ``wait_s`` seconds for a dispatcher that does not react.

    Raises:
        UsageError: no queue in this folder, no such job (with the nearest name), option or priority. Nothing was asked
            then.
        QueueUnreadable: its queue is damaged or of another version. CannotWrite: the disk is full.
    """
    check(control)
    if not is_there(run.queue):
        raise UsageError(f"{run.root} holds no queue of gpuherd's; name the run folder")
    # A dispatcher at work has looked through the file; without one, this process works on the queue itself.
    with Queue(run.queue, check=DispatcherLock.holder(run.lock) is None) as queue:
        _refuse_unknown(queue, control)
        by = _user()
        with raising_cannot_write(run.queue, "ask again; nothing was asked"):
            number = queue.post(Letter(0, clock.wall(), control.kind, by, control.jobs, control.settings))
        deadline, pause = time.monotonic() + wait_s, _FIRST_LOOK_S
        while True:
            ring(run.control_fifo)
            answer = _answer(queue, number) or _do_here(queue, run, number)
            if answer is not None:
                return answer
            if time.monotonic() >= deadline:
                pid = DispatcherLock.holder(run.lock)
                return Answer(False, f"gpuherd (pid {pid or 'unknown'}) has not answered yet; it stays asked")
            time.sleep(pause)
            pause = min(_LONGEST_LOOK_S, 2 * pause)


def poke(run: RunDirectory) -> bool:
    """Tells the dispatcher to look at its queue, after ``Queue.add``; False when none is at work."""
    return ring(run.control_fifo)


def check(control: Control) -> None:
    """Raises UsageError for settings that could never be."""
    if control.kind is ControlKind.SET:
        if not control.settings:
            raise UsageError("set: say what to set, max_gpus=2 for example")
        changes(control.settings)
    elif control.kind is ControlKind.PRIORITY:
        priority_of(control.settings)
    elif control.settings:
        raise UsageError(f"{control.kind} takes no settings")
    if control.jobs and control.kind not in OF_JOBS:
        raise UsageError(f"{control.kind} is for the run as a whole; it takes no jobs")


def _refuse_unknown(queue: Queue, control: Control) -> None:
    unknown = queue.unknown(control.jobs)
    if unknown:
        hint = did_you_mean(unknown[0], queue.names(_NAMES_LOOKED_AT), show=clean)
        raise UsageError(f"there is no job {clean(unknown[0])!r} in this queue{hint}")


def _answer(queue: Queue, number: int) -> Answer | None:
    reply = queue.reply_to(number)
    return None if reply is None else Answer(reply.ok, reply.text, reply.applied_by, reply.changed)


def _do_here(queue: Queue, run: RunDirectory, number: int) -> Answer | None:
    """Does it, if no dispatcher is at work, and all else that is asked."""
    try:
        lock = DispatcherLock(run.lock, Role.CONTROL)
    except QueueBusy:
        return None
    with closing(lock):
        # Only now: this brings in what starts and ends processes.

        take_care(queue, run)
        return _answer(queue, number)


def _user() -> str:
    import getpass  # slow to import, and seldom needed

    try:
        return clean(getpass.getuser())
    except (KeyError, OSError):
        return "someone"


# Does what is requested of a queue on which no dispatcher works, by the same code; the caller holds the queue's lock.
#
# Jobs that a dead dispatcher left running run on. Those that are to end are ended here, as a dispatcher would: TERM,
# grace, KILL, record. Those without a request are not touched. Nothing is started.


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
    completion = Completion(queue, run, tell, HealthBook(queue))
    handed = [record for record in running if record.handed is not None and queue.owns(record)]
    if any(record.queued.cancelled_by is not None for record in handed):
        end_cancelled(queue, run, tell, completion, handed, GRACE_S)
    here = [record for record in running if record.handed is None]
    requested = {record.id for record in here if _is_requested(record, before.get(record.id))}
    if requested:
        with closing(Supervisor(run, queue.tag, DispatchOptions())) as supervisor:
            _end_here(queue, supervisor, completion, here, requested)


def _is_requested(record: AttemptRecord, before: AttemptRecord | None) -> bool:
    """Whether a cancel, pause or resume was requested for this running attempt."""
    return record.queued.cancelled_by is not None or before is None or record.paused != before.paused


def _end_here(
    queue: Queue,
    supervisor: Supervisor,
    completion: Completion,
    records: Sequence[AttemptRecord],
    requested: Collection[int],
) -> None:
    """Pauses, resumes and ends the attempts of this machine for which that was requested."""
    now, at = clock.mono(), clock.wall()
    for record in records:
        if record.id not in requested:
            continue
        found = supervisor.take_over(record, now, at, copied=False)
        if not isinstance(found, Attempt) and record.queued.cancelled_by is not None:
            completion.complete([found], now)
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
            completion.complete([attempt.ended(how, at=clock.wall(), now=now)], now)
    others = [record for record in records if record.id not in requested]
    while leftovers.due_at is not None:
        leftovers.hurry(clock.mono())
        select.select([], [], [], max(0.0, leftovers.due_at - clock.mono()))
        live = [attempt.process.traces for attempt in supervisor.running.values()]
        live += [traces for record in others if (traces := supervisor.traces(record)) is not None]
        leftovers.sweep(live, clock.mono())


# Ends jobs in an engine's hands that are to end for good, while nobody follows the queue; the caller has its lock.

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0


def end_cancelled(
    queue: Queue,
    run: RunDirectory,
    tell: Reporter,
    completion: Completion,
    records: Sequence[AttemptRecord],
    grace_s: float,
) -> None:
    """Ends those that are to end, and those that wait there to follow them, and records it. One that its engine can't
    be told of now, or that takes longer to end than its grace, stays marked, and is ended by the next gpuherd that
    works on the queue.

    Args:
        records: all attempts in an engine's hands.
    """
    handed = RemoteAttempt.among(records, run)
    wanted = {
        number: followed for number, followed in handed.items() if followed.record.queued.cancelled_by is not None
    }
    if not wanted:
        return
    (name,) = {followed.handed.engine for followed in wanted.values()}
    options = dispatcher.recall(run)
    if options is None or options.engine != name:
        options = EngineOptions(engine=name)  # type: ignore[arg-type]  # it stands in the queue
    try:
        with closing(dispatcher.make(options)) as engine:
            asking = Asking(engine, tell, engine_name(name))
            _Ending(queue, run, tell, asking, completion, handed, grace_s).follow(wanted)
    except GpuherdError as problem:
        logger.warning("can't tell %s that jobs are cancelled: %s", engine_name(name), problem)


class _Ending:
    """Sees some of those that are out to their ends."""

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        tell: Reporter,
        asking: Asking,
        completion: Completion,
        handed: dict[int, RemoteAttempt],
        grace_s: float,
    ):
        self._queue = queue
        self._tell = tell
        self._asking = asking
        self._completion = completion
        self._handed = handed
        self._folder = Folder(run)
        self._outcomes = Outcomes(run, asking, self._folder, grace_s)
        self._folder.recall_gone(handed)
        self._until = clock.mono() + grace_s + _PATIENCE_S

    def follow(self, wanted: dict[int, RemoteAttempt]) -> None:
        """Returns when these have ended, or it has taken too long."""
        asking = self._asking
        self._outcomes.adopt(wanted.values())
        while True:
            now = clock.mono()
            if now >= asking.due_at:
                found = asking.look([followed.ticket for followed in wanted.values()], now)
                for number, followed in wanted.items():
                    if found is not None:
                        followed.seen(found.get(number), now, now)
            before, wanted = wanted, self._without_ended(wanted)
            self._folder.keep_gone(self._handed.values())
            if not wanted.keys() <= before.keys():
                continue  # what followed those that have ended needs to wait for nothing
            asking.keep_time(now)
            if not wanted or now >= self._until:
                return
            until = min(self._folder.due_at, asking.due_at, self._until)
            select.select([], [], [], max(0.0, until - clock.mono()))
            self._folder.look(wanted, clock.mono())

    def _without_ended(self, wanted: dict[int, RemoteAttempt]) -> dict[int, RemoteAttempt]:
        """Those of them that have not ended, and what is to end now that the others have."""
        left, ends = {}, []
        for number, followed in wanted.items():
            end = self._outcomes.judge(followed)
            if end is None:
                self._outcomes.call_off(followed)
                left[number] = followed
            else:
                ends.append(end)
                del self._handed[number]
        if not ends:
            return left
        self._completion.complete(ends, clock.mono())
        if any(end.no_fault is not None for end in ends) and not self._completion.unrecorded:
            for needed, fate, names in self._queue.doom_hopeless():
                self._tell.cancelled(names, needed, fate)
        stranded = [self._handed[number] for number in self._queue.stranded() & self._handed.keys() - left.keys()]
        self._outcomes.adopt(stranded)
        for followed in stranded:
            if not followed.has_begun:
                followed.recalled = followed.recalled or NoFault.DEPENDENCY_FAILED
                left[followed.record.id] = followed
        return left
