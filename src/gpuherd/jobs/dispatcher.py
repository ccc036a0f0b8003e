"""The dispatcher: an event loop that runs a queue's jobs on this machine.

It waits for events, never in fixed steps: a job's end comes through its pidfd, Ctrl-C through a socket, what people ask
through a bell, and timers are the next deadline of those who have one (checks of the GPUs while a job waits for one,
strangers on ours, time limits, back-offs, leftovers, the disk, the display). At each event it asks ``policy.decide``
what to start and does it. All progress is in the queue before it counts: the dispatcher may be killed at any instant,
and the next one goes on from the queue's file.

What starts is ``deciding``'s part, how a start goes ``starting``'s, how an end goes ``ending``'s, who stands still for
a while ``pausing``'s, what the GPUs say ``gpudesk``'s, and what people ask ``obeying``'s; here is when.
"""

from __future__ import annotations

import logging
import os
import selectors
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext

from gpuherd.errors import CannotWrite
from gpuherd.jobs import clock
from gpuherd.jobs.deciding import Deciding
from gpuherd.jobs.diskguard import DiskGuard
from gpuherd.jobs.ending import Endings, ended, lost
from gpuherd.jobs.events import EventKind
from gpuherd.jobs.failures import clean
from gpuherd.jobs.fulldisk import may_pass
from gpuherd.jobs.gpudesk import GpuDesk
from gpuherd.jobs.health import HealthBook
from gpuherd.jobs.job import Job
from gpuherd.jobs.leftovers import Leftovers
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.obeying import Obeying
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.outcome import Outcome
from gpuherd.jobs.pausing import Pausing
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.retuning import SETTABLE
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settings import NO_SETTINGS, Settings
from gpuherd.jobs.standby import Standby
from gpuherd.jobs.standing import GpuStanding, Standing, StandingFile
from gpuherd.jobs.starting import START_AGAIN_S, Starter
from gpuherd.jobs.stopping import Ask, StopSignals
from gpuherd.jobs.supervisor import GRACE_S, Attempt, Supervisor

logger = logging.getLogger(__name__)


class Dispatcher:
    """Works a queue off. One use: ``run`` once.

    Args:
        queue: open. ``run`` takes its lock (``DispatcherLock``) unless ``lock`` says that the caller has it.
        run: where attempts' folders and logs go.
        options: which GPUs, how many, when one is free, and how jobs are treated.
        reporter: who is told.
        jobs: what was submitted, to see before the start that it can run here at all.
        serve: stay when nothing is left to do, until told to end.
        lock: held by the caller on this queue.
        settings: the user's and the machine's limits; ``load_settings`` reads them again when that is asked.
        on_ready: called once it is at work and hears what is asked.
        grace_s: seconds between SIGTERM and SIGKILL.

    Raises NoSuchGpu for an unknown GPU id, and JobCannotFit when none of the jobs could ever run here.
    """

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        options: DispatchOptions,
        reporter: Reporter | None = None,
        jobs: Sequence[Job] = (),
        *,
        serve: bool = False,
        lock: DispatcherLock | None = None,
        settings: Settings = NO_SETTINGS,
        load_settings: Callable[[], Settings] = lambda: NO_SETTINGS,
        on_ready: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
    ):
        self._queue = queue
        self._run = run
        self._tell = reporter or Reporter(queue, run)
        self._serve = serve
        self._lock = lock
        self._on_ready = on_ready
        self.options = options
        self._supervisor = Supervisor(run, queue.tag, options, grace_s)
        self._health = HealthBook(queue)
        self._desk = GpuDesk(options, queue.tag, self._supervisor, self._health, settings)
        self._endings = Endings(queue, run, self._tell, self._health)
        self._leftovers = Leftovers(queue.tag)
        self._pausing = Pausing(queue, self._supervisor, self._tell, DiskGuard((run.root, run.logs), options.min_disk))
        self._obeying = Obeying(queue, run, self, settings, load_settings)
        self._deciding = Deciding(
            queue,
            self._supervisor,
            self._desk,
            self._health,
            self._tell,
            options,
            jobs,
            serve=serve,
            closed=self._closed,
            settings=settings,
        )
        self.asked = Ask.GO_ON
        self._standing = StandingFile(run.standing)
        self._show_at = 0.0
        self._selector = selectors.DefaultSelector()

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Runs until nothing is left to run or somebody ends it, and until no process of the run is left.

        Raises QueueBusy when another dispatcher has the queue, CannotWrite when a full disk keeps it from ending.
        """
        with nullcontext() if self._lock is not None else closing(DispatcherLock(self._run.lock)):
            began_at = clock.wall()
            run_id = self._queue.begin_run(began_at, clock.mono())
            starter = Starter(self._queue, self._supervisor, self._desk, self._tell, run_id, began_at)
            self._deciding.look_at_queue()
            with (
                StopSignals() as signals,
                closing(self._obeying),
                closing(self._desk),
                self._selector,
                closing(starter.standby),
            ):
                self._selector.register(signals, selectors.EVENT_READ)
                self._obeying.listen()
                if self._obeying.bell is not None:
                    self._selector.register(self._obeying.bell, selectors.EVENT_READ)
                self._adopt()
                self._obeying.begin()
                self._leftovers.expect(clock.mono() - 1)
                self._on_ready()
                self._loop(starter, signals)
                outcome = self._outcome(signals)
            self._run.remove_stray_attempt_files(())
            self._standing.remove()
            self._end_run(run_id)
            return outcome

    def _end_run(self, run_id: int) -> None:
        try:
            self._queue.end_run(run_id, clock.wall())
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            # All that matters is recorded; whoever counts takes the last end for the run's.
            logger.warning("can't write the end of the run into the queue: %s", problem)

    def _loop(self, starter: Starter, signals: StopSignals) -> None:
        while True:
            try:
                self._obey(signals)
                self._keep_time(starter)
                self._start_what_can(starter)
                if self._is_over():
                    return
            except sqlite3.OperationalError as problem:
                if not may_pass(problem):
                    raise
                self._hold(starter, problem)
            over = []
            for key, _ in self._selector.select(self._time_to_next(starter)):
                if key.fileobj is signals:
                    signals.drain_wakeups()
                elif key.fileobj is self._obeying.bell:
                    self._obeying.hear()
                else:
                    over.append(key.fd)
            if over:
                self._ended(over, starter.standby)

    def _hold(self, starter: Starter, problem: sqlite3.OperationalError) -> None:
        """The queue can't be used, as on a full disk: nothing is decided for a moment, what runs goes on."""
        if starter.again_at is None:
            logger.warning("can't use the queue now, trying again in %g s: %s", START_AGAIN_S, problem)
        starter.again_at = clock.mono() + START_AGAIN_S
        self._deciding.due_at = None

    def _is_over(self) -> bool:
        if self._supervisor.running or self._endings.again_at is not None:
            return self._can_not_end()
        now = clock.wall()
        if self.asked is Ask.GO_ON and (self._serve or self._is_work_left(now)):
            return False
        self._leftovers.hurry(clock.mono())
        return self._leftovers.due_at is None

    def _can_not_end(self) -> bool:
        if not self._supervisor.running and self.asked >= Ask.STOP:
            # Told to stop, and it still can't be: what has ended meanwhile is found again by the next start.
            raise CannotWrite(f"can't write {self._run.queue}: {self._endings.trouble}; put that right and start again")
        return False

    def _is_work_left(self, wall: float) -> bool:
        queue = self._queue
        if self._deciding.waits:
            # Asked of the queue only when the last decision, which comes after every change, has left nobody waiting.
            return True
        return bool(queue.head(1, wall)) or queue.next_not_before(wall) is not None or queue.held() > 0

    def _keep_time(self, starter: Starter) -> None:
        now = clock.mono()
        self._supervisor.keep_time(now)
        if self._endings.again_at is not None and now >= self._endings.again_at and self._endings.record(now):
            self.decide_soon(now)
        if self._leftovers.due_at is not None and now >= self._leftovers.due_at:
            running = [attempt.process.traces for attempt in self._supervisor.running.values()]
            self._leftovers.sweep([*running, *starter.standby.traces], now)
        self._pausing.give_way(self._desk.keep_time(now, may_start=self.asked is Ask.GO_ON), now)
        for text in self._desk.fetch_notices():
            self._tell.notice(text)
        if self._desk.changed:
            self._desk.changed = False
            self.decide_soon(now)
        if self._wants_disk() and self._pausing.look_at_disk(now):
            self.decide_soon(now)
        self._obeying.keep_time(now)
        self._standing.keep_time(now, self._stands)
        following = self._deciding.following if self.asked is Ask.GO_ON else ()
        starter.standby.keep_time(now, following, starter.threads)
        every = self._tell.every_s
        if every is not None and now >= self._show_at:
            self._show_at = now + every
            attempts = tuple(self._supervisor.running.values())
            self._tell.show(attempts, self._deciding.waiting_for, self._deciding.at_once())

    def _time_to_next(self, starter: Starter) -> float | None:
        may_start = self.asked is Ask.GO_ON
        times = [
            self._supervisor.next_deadline(),
            self._leftovers.due_at,
            self._endings.again_at,
            self._desk.next_at(may_start=may_start),
            self._obeying.due_at,
            self._standing.due_at,
            starter.standby.due_at,
        ]
        if may_start:
            # Else nothing is decided any more, and a decision that is due would keep the loop spinning.
            times += [self._deciding.due_at, starter.again_at]
        if self._wants_disk():
            times.append(self._pausing.due_at)
        if self._tell.every_s is not None:
            times.append(self._show_at)
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - clock.mono()) if known else None

    def _wants_disk(self) -> bool:
        return bool(self._supervisor.running) or self._pausing.disk_low is not None  # else before the next start

    # --- deciding ---------------------------------------------------------------------------------------------

    def decide_soon(self, when: float) -> None:
        """A decision may come out otherwise at this time (by ``clock.mono``)."""
        self._deciding.soon(when)

    def _start_what_can(self, starter: Starter) -> None:
        now = clock.mono()
        if starter.again_at is not None and now >= starter.again_at:
            starter.again_at, self._deciding.due_at = None, now
        due_at = self._deciding.due_at
        if due_at is None or now < due_at or self.asked is not Ask.GO_ON:
            return
        self._pausing.look_at_disk(now)
        self._deciding.start_what_can(starter, self._watch_for_end)
        self._standing.touch()

    def _watch_for_end(self, attempt: Attempt) -> None:
        self._selector.register(attempt.process.pidfd, selectors.EVENT_READ)

    def _closed(self) -> str | None:
        if self._endings.again_at is not None:
            return self._endings.trouble
        return self._pausing.disk_low

    # --- ending -----------------------------------------------------------------------------------------------

    def _ended(self, pidfds: Sequence[int], standby: Standby) -> None:
        ends = []
        now, at = clock.mono(), clock.wall()
        for pidfd in pidfds:
            self._selector.unregister(pidfd)
            attempt, found = self._supervisor.collect(pidfd)
            if found.code != 0:
                self._pausing.look_for(attempt.record.queued.job, now)
            problem = self._desk.problem_of(attempt.record) if found.code != 0 else None
            seen = self._desk.seen(attempt, disk_low=self._pausing.disk_low is not None)
            ends.append(ended(attempt, found, at=at, now=now, gpu_problem=problem, seen=seen))
            standby.ended(now - attempt.record.started_mono, now)
            self._leftovers.expect(now, attempt.process.traces)
            self._desk.released(attempt.record, now)
        self._endings.machine = [gpu.uuid for gpu in self._desk.gpus]
        self._endings.settle(ends, now)
        self.decide_soon(now)

    # --- coming and going -------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Takes over what an earlier dispatcher left running, and settles what has ended since."""
        now, at = clock.mono(), clock.wall()
        ends = []
        for record in self._queue.running():
            found = self._supervisor.take_over(record, now, copied=not self._queue.owns(record))
            if isinstance(found, Attempt):
                self._selector.register(found.process.pidfd, selectors.EVENT_READ)
                self._tell.about(EventKind.ADOPTED, record, "left running by an earlier gpuherd; taken over")
            else:
                ends.append(lost(found, at, now))
        if self._supervisor.gpus:
            self._desk.open()
            self._desk.started(now)
        if ends:
            self._endings.settle(ends, now)
        self._pausing.taken_over(now)
        running = {attempt.record.id for attempt in self._supervisor.running.values()}
        self._run.remove_stray_attempt_files(running | self._endings.unrecorded)

    def _obey(self, signals: StopSignals) -> None:
        """Does what a signal asked for since the last time."""
        if signals.reload:
            signals.reload = False
            self._tell.notice(self._obeying.reload())
        if signals.asked > self.asked:
            self.end(signals.asked, "Ctrl-C: " if signals.asked is Ask.DRAIN else "")

    def end(self, asked: Ask, why: str) -> str:
        """Starts nothing new from now on, and with STOP ends what runs; returns a sentence about it."""
        self.asked = asked
        self._standing.touch()
        # No job waits for a GPU any more: nothing of ours shall be in the way of those who do.
        self._desk.wanted(False, clock.mono())
        running = len(self._supervisor.running)
        if asked is Ask.DRAIN:
            text = f"{why}nothing new is started; what runs goes on to its end ({running} running)"
            hint = " (Ctrl-C again stops them and puts them back in the queue)" if why else ""
            self._tell.notice(text + hint)
        else:
            text = f"{why}stopping what runs and putting it back in the queue ({running} running)"
            self._tell.notice(text)
            self._supervisor.stop_all(clock.mono(), 0.0 if asked is Ask.STOP_NOW else None)
        return text

    def retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Other options and settings from now on. Raises NoSuchGpu; then nothing is changed."""
        self._desk.retune(options, settings)
        self.options = options
        self._deciding.retune(options, settings)
        self._pausing.retune(options.min_disk)
        self._supervisor.retune(options)
        self.decide_soon(clock.mono())

    def enforce_marks(self) -> None:
        """Does with the processes of running jobs what the queue says of them by now."""
        now = clock.mono()
        records = {record.id: record for record in self._queue.running()}
        for attempt in tuple(self._supervisor.running.values()):
            record = records.get(attempt.record.id)
            if record is not None:
                self._supervisor.enforce(attempt, record, now)
        self.decide_soon(now)

    def _outcome(self, signals: StopSignals) -> Outcome:
        counts = self._queue.counts()
        return Outcome(
            done=counts.done,
            failed=counts.failed,
            waiting=counts.waiting,
            cancelled=counts.cancelled,
            failures=tuple(self._tell.failures),
            # Asked to stop when nothing was left to do: that is a run that ended by itself.
            stopped_by=signals.exit_code if counts.waiting else None,
        )

    def _stands(self) -> Standing:
        """What those are told who look on."""
        views = self._desk.views(clock.mono(), clock.wall()) if self._desk.is_open else ()
        return Standing(
            pid=os.getpid(),
            mode=self.asked.mode,
            closed=self._closed(),
            waits={wait.job: clean(wait.reason) for wait in self._deciding.waits},
            gpus=tuple(GpuStanding.of(view) for view in views),
            at_once=self._deciding.at_once(),
            settings={name: getattr(self.options, name) for name in SETTABLE},
        )
