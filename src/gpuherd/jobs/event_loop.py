"""The event loop over a queue, the same for jobs of this machine (``dispatcher``) and jobs submitted to an engine
beyond it (``remote.dispatcher``).

It waits for events, never in fixed steps: Ctrl-C comes through a socket, requests through a FIFO, ends of jobs through
their descriptors, and the timeout is the next deadline of any component. At each event it carries out requests, runs
what is due, starts what can start, and checks whether all is over. All progress is in the queue before it counts: the
loop may be killed at any instant, and the next one continues from the queue's file.
"""

from __future__ import annotations

import logging
import os
import selectors
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import TypedDict

from gpuherd.engines.registry import LOCAL
from gpuherd.errors import CannotWrite, clean
from gpuherd.jobs import clock
from gpuherd.jobs.attempts import GRACE_S
from gpuherd.jobs.attempts.complete import Completion
from gpuherd.jobs.attempts.preempt import DiskGuard
from gpuherd.jobs.control.messages import StopLevel, StopSignals
from gpuherd.jobs.control.server import ControlServer
from gpuherd.jobs.dispatcher_state import DispatcherState, StateFile
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.options import SETTABLE, DispatchOptions
from gpuherd.jobs.queue.schema import may_pass
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import Outcome, QueuedJob
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.scheduler.types import Wait
from gpuherd.jobs.settings import NO_SETTINGS, Settings

logger = logging.getLogger(__name__)

# A display is brought up to date again after so many times as long as that takes.
_SHOW_SHARE = 20


class Terms(TypedDict, total=False):
    """Optional arguments of a loop; see ``Loop``."""

    serve: bool
    lock: DispatcherLock | None
    settings: Settings
    load_settings: Callable[[], Settings]
    on_ready: Callable[[], None]
    grace_s: float


class Decisions:
    """When a dispatcher decides what starts, and what its last decision was.

    Attributes:
        due_at: earliest time (by ``clock.mono``) at which the decision can change, None if only an event can change it.
        waits: every job that the last decision let wait.
        waiting_for: a sentence on which job is next and why it waits, None when none does.
    """

    def __init__(self) -> None:
        self.due_at: float | None = 0.0
        self.waits: Sequence[Wait] = ()
        self.waiting_for: str | None = None

    def soon(self, when: float) -> None:
        """The decision can change at this time (by ``clock.mono``)."""
        self.due_at = when if self.due_at is None else min(when, self.due_at)

    def note(self, waits: Sequence[Wait], jobs: Mapping[int, QueuedJob]) -> None:
        """A decision was made that lets these jobs wait."""
        self.waits, self.waiting_for = waits, None
        if waits:
            job = jobs[waits[0].job].job
            self.waiting_for = clean(f"{job.title or job.name} waits: {waits[0].reason}")


class Loop(ABC):
    """Works a queue off. One use: ``run`` once.

    Args:
        queue: open. ``run`` takes its lock (``DispatcherLock``) unless ``lock`` says that the caller has it.
        run: where attempts' folders and logs go.
        options: how much at once, and how jobs are treated.
        reporter: reports what happens.
        engine: the name of what runs the jobs.
        serve: stay when nothing is left to do, until a request to end.
        lock: held by the caller on this queue.
        settings: the user's and the machine's limits; ``load_settings`` reads them again on request.
        on_ready: called once it is at work and serves requests.
        grace_s: seconds between SIGTERM and SIGKILL.

    Attributes:
        options, settings: as they are now.
        stop_level: how far it is to end.
    """

    _decisions: Decisions  # set by each loop

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        options: DispatchOptions,
        reporter: Reporter | None,
        *,
        engine: str = LOCAL,
        serve: bool = False,
        lock: DispatcherLock | None = None,
        settings: Settings = NO_SETTINGS,
        load_settings: Callable[[], Settings] = lambda: NO_SETTINGS,
        on_ready: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
    ):
        self.options, self.settings, self.load_settings = options, settings, load_settings
        self.stop_level = StopLevel.GO_ON
        self._queue = queue
        self._run = run
        self._reporter = reporter or Reporter(queue, run)
        self._engine_name = engine
        self._serve = serve
        self._lock = lock
        self._on_ready = on_ready
        self._grace_s = grace_s
        self._health = GpuHealth(queue)
        self._disk = DiskGuard((run.root, run.logs), options.min_disk)
        self._completion = Completion(queue, run, self._reporter, self._health)
        self._control = ControlServer(queue, run, self)
        self._state_file = StateFile(run.state_file)
        self._show_at = 0.0
        self._selector = selectors.DefaultSelector()

    def run(self) -> Outcome:
        """Runs until nothing is left to run or it is ended, and until no process of the run is left on this machine.

        Raises QueueBusy when another gpuherd has the queue, CannotWrite when a full disk keeps it from ending.
        """
        with nullcontext() if self._lock is not None else closing(DispatcherLock(self._run.lock)):
            began_at = clock.wall()
            run_id = self._queue.begin_run(began_at, clock.mono(), self._engine_name)
            held = ExitStack()
            self._begin(run_id, began_at, held)
            with StopSignals() as signals, closing(self._control), self._selector, held:
                self._selector.register(signals, selectors.EVENT_READ)
                self._control.listen()
                if self._control.fifo is not None:
                    self._selector.register(self._control.fifo, selectors.EVENT_READ)
                self._adopt()
                self._control.begin()
                self._on_ready()
                self._loop(signals)
                outcome = self._outcome(signals)
            self._run.remove_stray_attempt_files(self._left_at_work())
            self._state_file.remove()
            self._end_run(run_id)
            return outcome

    # --- what each loop does in its own way -------------------------------------------------------------------

    @abstractmethod
    def _begin(self, run_id: int, began_at: float, held: ExitStack) -> None:
        """The run has its number. What goes into ``held`` is closed after the loop."""

    @abstractmethod
    def _adopt(self) -> None:
        """Takes over what an earlier loop left running, and settles what has ended since."""

    @abstractmethod
    def _look_after(self, now: float) -> None:
        """Does what is due."""

    @abstractmethod
    def _start_what_can(self) -> None:
        """Decides when it is due, unless the loop is to end, and carries the decision out."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether the loop has nothing more to do. Raises CannotWrite when it is to end and can't."""

    @abstractmethod
    def _end_words(self, *, drains: bool) -> tuple[str, str]:
        """A sentence on what happens to the running jobs, and what a second Ctrl-C does; "" for nothing."""

    @abstractmethod
    def _end_work(self, level: StopLevel) -> None:
        """Carries that out."""

    @abstractmethod
    def _ends_recorded(self, now: float) -> None:
        """Ends that could not be recorded before are in the queue now."""

    @abstractmethod
    def _hold(self, problem: sqlite3.OperationalError) -> None:
        """The queue can't be used, as on a full disk: no decision is made for a moment, running jobs go on."""

    @abstractmethod
    def _due(self) -> Sequence[float | None]:
        """When the components of this loop have something to do (by ``clock.mono``)."""

    def _waiting_for(self) -> str | None:
        """A sentence for the display on which job is next and why it waits, None when none does."""
        return self._decisions.waiting_for

    def _readable(self, descriptors: Sequence[int]) -> None:
        """Descriptors that the loop's own work has given to the selector are readable."""
        raise ValueError(f"unexpected descriptors {descriptors}")

    def _left_at_work(self) -> Collection[int]:
        """The attempts that go on after the loop, by number."""
        return ()

    # --- requests, from ``control.server`` -----------------------------------------------------------------------

    def retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Other options and settings from now on. Raises NoSuchGpu; then nothing is changed."""
        self._retune(options, settings)
        self.options, self.settings = options, settings
        self._disk.change(options.min_disk)
        self.decide_soon(clock.mono())

    @abstractmethod
    def _retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Passes them on to what this loop has of its own."""

    def end(self, level: StopLevel, why: str) -> str:
        """Starts nothing new from now on, and with STOP ends what runs; returns a sentence about it."""
        self.stop_level = level
        self._state_file.touch()
        text, again = self._end_words(drains=level is StopLevel.DRAIN)
        self._reporter.notice(f"{why}{text}" + (f" (Ctrl-C again {again})" if why and again else ""))
        self._end_work(level)
        return f"{why}{text}"

    @abstractmethod
    def enforce_marks(self) -> None:
        """Does with what runs what the queue says of it by now."""

    def decide_soon(self, when: float) -> None:
        """The decision can change at this time (by ``clock.mono``)."""
        self._decisions.soon(when)

    # --- the loop ---------------------------------------------------------------------------------------------

    def _loop(self, signals: StopSignals) -> None:
        while True:
            try:
                self._hear(signals)
                self._keep_time()
                self._start_what_can()
                if self._is_over():
                    return
            except sqlite3.OperationalError as problem:
                if not may_pass(problem):
                    raise
                self._hold(problem)
            others = []
            for key, _ in self._selector.select(self._time_to_next()):
                if key.fileobj is signals:
                    signals.drain_wakeups()
                elif key.fileobj is self._control.fifo:
                    self._control.hear()
                else:
                    others.append(key.fd)
            if others:
                self._readable(others)

    def _hear(self, signals: StopSignals) -> None:
        """Does what a signal has requested since the last time."""
        if signals.reload:
            signals.reload = False
            self._reporter.notice(self._control.reload())
        if signals.level > self.stop_level:
            self._signalled(signals)

    def _signalled(self, signals: StopSignals) -> None:
        """A signal requests an end."""
        self.end(signals.level, "Ctrl-C: " if signals.level is StopLevel.DRAIN else "")

    def _keep_time(self) -> None:
        now, completion = clock.mono(), self._completion
        if completion.again_at is not None and now >= completion.again_at and completion.record(now):
            self._ends_recorded(now)
        self._look_after(now)
        self._control.keep_time(now)
        self._state_file.keep_time(now, self._state)
        if self._reporter.every_s is not None and now >= self._show_at:
            began = clock.mono()
            self._reporter.show(self._waiting_for())
            # The queue may be long: a display takes at most a twentieth of the time.
            self._show_at = began + max(self._reporter.every_s, _SHOW_SHARE * (clock.mono() - began))

    def _time_to_next(self) -> float | None:
        times = [*self._due(), self._completion.again_at, self._control.due_at, self._state_file.due_at]
        if self._reporter.every_s is not None:
            times.append(self._show_at)
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - clock.mono()) if known else None

    # --- the end ----------------------------------------------------------------------------------------------

    def _is_work_left(self) -> bool:
        """Whether a job waits that may yet run here, or one is still to come."""
        if self.stop_level is not StopLevel.GO_ON:
            return False
        if self._serve or self._decisions.waits:
            # The queue is read only when the last decision, which follows every change, has left no job waiting.
            return True
        queue, wall = self._queue, clock.wall()
        return bool(queue.head(1, wall)) or queue.next_not_before(wall) is not None or queue.held() > 0

    def _cannot_end(self) -> CannotWrite:
        """The error when it is to stop and ends can't be recorded: the next start finds them again."""
        return CannotWrite(f"can't write {self._run.queue}: {self._completion.trouble}; put that right and start again")

    def _end_run(self, run_id: int) -> None:
        try:
            self._queue.end_run(run_id, clock.wall())
        except sqlite3.OperationalError as problem:
            if not may_pass(problem):
                raise
            # Everything that matters is recorded; the metrics take the last attempt's end for the run's.
            logger.warning("can't write the end of the run into the queue: %s", problem)

    def _outcome(self, signals: StopSignals) -> Outcome:
        counts = self._queue.counts()
        # Running are at the end only those that were left to an engine.
        left = counts.waiting + counts.running
        return Outcome(
            done=counts.done,
            failed=counts.failed,
            waiting=left,
            cancelled=counts.cancelled,
            failures=tuple(self._reporter.failures),
            # Asked to stop when nothing was left to do: that is a run that ended by itself.
            stopped_by=signals.exit_code if left else None,
            drained=bool(left) and signals.exit_code is None and self.stop_level is not StopLevel.GO_ON,
        )

    def _state(self) -> DispatcherState:
        """The state for ``status`` and ``top``."""
        return DispatcherState(
            pid=os.getpid(),
            mode=self.stop_level.mode,
            waits={wait.job: clean(wait.reason) for wait in self._decisions.waits},
            settings={name: getattr(self.options, name) for name in SETTABLE},
        )
