"""The dispatcher: works a queue off with this machine's GPUs and CPUs.

An event loop that is woken by a job's end through its pidfd, and whose timers are checks of the GPUs while a job waits
for one, other users on our GPUs, time limits, back-offs, orphans and the disk. At each event
``scheduler.policy.decide`` decides what starts.

``cycle`` decides what starts, ``attempts.launch`` starts it, ``attempts.complete`` records ends, ``attempts.preempt``
pauses, ``gpu.manager`` reads and leases the GPUs, and ``control.server`` carries out requests; this module says when.
"""

from __future__ import annotations

import logging
import selectors
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Unpack

from gpuherd.jobs import clock
from gpuherd.jobs.attempts import START_AGAIN_S
from gpuherd.jobs.attempts.launch import Launcher
from gpuherd.jobs.attempts.orphans import Orphans
from gpuherd.jobs.attempts.preempt import Preemption
from gpuherd.jobs.attempts.supervise import Attempt, Supervisor
from gpuherd.jobs.control.messages import StopLevel
from gpuherd.jobs.cycle import Cycle
from gpuherd.jobs.dispatcher_state import DispatcherState, GpuState
from gpuherd.jobs.event_loop import Loop, Terms
from gpuherd.jobs.gpu.manager import GpuManager
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import EventKind
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.settings import NO_SETTINGS, Settings

logger = logging.getLogger(__name__)


class Dispatcher(Loop):
    """Works a queue off on this machine. One use: ``run`` once.

    Args:
        queue, run, options, reporter, and by name serve, lock, settings, load_settings, on_ready, grace_s: as for
            ``Loop``; the options say also which GPUs, and when one is free.
        jobs: the submitted jobs, to check before the start that they can run here at all.

    Raises NoSuchGpu for an unknown GPU id, and JobCannotFit when none of the jobs could ever run here.
    """

    _starter: Launcher

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        options: DispatchOptions,
        reporter: Reporter | None = None,
        jobs: Sequence[Job] = (),
        **terms: Unpack[Terms],
    ):
        super().__init__(queue, run, options, reporter, **terms)
        settings = terms.get("settings", NO_SETTINGS)
        self._supervisor = Supervisor(run, queue.tag, options, self._grace_s)
        self._desk = GpuManager(options, queue.tag, self._supervisor, self._health, settings)
        self._orphans = Orphans(queue.tag)
        self._preemption = Preemption(queue, self._supervisor, self._reporter, self._disk)
        self._cycle = self._decisions = Cycle(
            queue,
            self._supervisor,
            self._desk,
            self._health,
            self._reporter,
            options,
            jobs,
            serve=self._serve,
            closed=self._closed,
            lacks_space=self._disk.lacking_for,
            settings=settings,
        )

    def _begin(self, run_id: int, began_at: float, held: ExitStack) -> None:
        self._launcher = Launcher(self._queue, self._supervisor, self._desk, self._reporter, run_id, began_at)
        held.callback(self._desk.close)
        held.callback(self._launcher.prefork.close)
        self._cycle.look_at_queue()

    def _hold(self, problem: sqlite3.OperationalError) -> None:
        if self._launcher.again_at is None:
            logger.warning("can't use the queue now, trying again in %g s: %s", START_AGAIN_S, problem)
        self._launcher.again_at = clock.mono() + START_AGAIN_S
        self._cycle.due_at = None

    def _is_over(self) -> bool:
        if self._supervisor.running or self._completion.again_at is not None:
            if not self._supervisor.running and self.asked >= StopLevel.STOP:
                raise self._cannot_end()
            return False
        if self._is_work_left():
            return False
        self._orphans.hurry(clock.mono())
        return self._orphans.due_at is None

    def _look_after(self, now: float) -> None:
        prefork = self._launcher.prefork
        self._supervisor.keep_time(now)
        if self._orphans.due_at is not None and now >= self._orphans.due_at:
            running = [attempt.process.traces for attempt in self._supervisor.running.values()]
            self._orphans.sweep([*running, *prefork.traces], now)
        self._preemption.give_way(self._desk.keep_time(now, may_start=self.asked is StopLevel.GO_ON), now)
        for text in self._desk.fetch_notices():
            self._reporter.notice(text)
        if self._desk.changed:
            self._desk.changed = False
            self.decide_soon(now)
        if self._wants_disk() and self._is_disk_due(now) and self._preemption.look_at_disk(now):
            self.decide_soon(now)
        prefork.keep_time(now, self._cycle.following if self.asked is StopLevel.GO_ON else (), self._launcher.threads)

    def _ends_recorded(self, now: float) -> None:
        self.decide_soon(now)

    def _due(self) -> Sequence[float | None]:
        may_start = self.asked is StopLevel.GO_ON
        times = [
            self._supervisor.next_deadline(),
            self._orphans.due_at,
            self._desk.next_at(may_start=may_start),
            self._launcher.prefork.due_at,
        ]
        if may_start:
            # Otherwise no decision is made any more, and one that is due would keep the loop spinning.
            times += [self._cycle.due_at, self._launcher.again_at]
        if self._wants_disk():
            times.append(self._disk.due_at)
        return times

    def _wants_disk(self) -> bool:
        return bool(self._supervisor.running) or self._disk.low is not None  # else before the next start

    def _is_disk_due(self, now: float) -> bool:
        return self._disk.due_at is not None and now >= self._disk.due_at

    # --- decisions ----------------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        starter, now = self._launcher, clock.mono()
        if starter.again_at is not None and now >= starter.again_at:
            starter.again_at, self._cycle.due_at = None, now
        due_at = self._cycle.due_at
        if due_at is None or now < due_at or self.asked is not StopLevel.GO_ON:
            return
        if self._is_disk_due(now):
            self._preemption.look_at_disk(now)
        self._cycle.start_what_can(starter, self._watch_for_end)
        self._state_file.touch()

    def _watch_for_end(self, attempt: Attempt) -> None:
        self._selector.register(attempt.process.pidfd, selectors.EVENT_READ)

    def _closed(self) -> str | None:
        if self._completion.again_at is not None:
            return self._completion.trouble
        return self._disk.low

    # --- ends ---------------------------------------------------------------------------------------------------

    def _readable(self, descriptors: Sequence[int]) -> None:
        """The pidfds of jobs that have ended."""
        ends = []
        now, at = clock.mono(), clock.wall()
        for pidfd in descriptors:
            self._selector.unregister(pidfd)
            attempt, found = self._supervisor.collect(pidfd)
            problem = self._desk.problem_of(attempt.record) if found.code != 0 else None
            observed = self._desk.observed(attempt, disk_low=found.code != 0 and self._is_disk_low(attempt, now))
            ends.append(attempt.ended(found, at=at, now=now, gpu_problem=problem, observed=observed))
            self._launcher.prefork.ended(now - attempt.record.started_mono, now)
            self._orphans.expect(now, attempt.process.traces)
            self._desk.released(attempt.record, now)
        self._completion.machine = [gpu.uuid for gpu in self._desk.watch.gpus]
        self._completion.in_use = self._supervisor.gpus
        self._completion.complete(ends, now)
        for label, sentence in self._desk.fetch_left_out(at):
            self._reporter.notice(f"GPU {label} is {sentence}")
        self.decide_soon(now)

    def _is_disk_low(self, attempt: Attempt, now: float) -> bool:
        """Whether there is too little space now, for the run or where a job that has failed works and writes."""
        self._preemption.look_at_disk(now)
        low = self._disk.low or self._disk.lacking_for(attempt.record.queued.job)
        return low is not None

    # --- begin and end of the run -------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Takes over the attempts that an earlier dispatcher left running; completes those that have ended since."""
        now, at = clock.mono(), clock.wall()
        ends = []
        for record in self._queue.running():
            found = self._supervisor.take_over(record, now, at, copied=not self._queue.owns(record))
            if isinstance(found, Attempt):
                self._watch_for_end(found)
                self._reporter.about(EventKind.ADOPTED, record, "left running by an earlier gpuherd; taken over")
            else:
                ends.append(found)
        if self._supervisor.gpus:
            self._desk.watch.open()
            self._desk.started(now)
        if ends:
            self._completion.complete(ends, now)
        self._preemption.taken_over(now)
        running = {attempt.record.id for attempt in self._supervisor.running.values()}
        self._run.remove_stray_attempt_files(running | self._completion.unrecorded)
        self._orphans.expect(clock.mono() - 1)

    def _end_words(self, *, drains: bool) -> tuple[str, str]:
        running = len(self._supervisor.running)
        if drains:
            text = f"nothing new is started; what runs goes on to its end ({running} running)"
            return text, "stops them and puts them back in the queue"
        return f"stopping what runs and putting it back in the queue ({running} running)", ""

    def _end_work(self, asked: StopLevel) -> None:
        # No job waits for a GPU any more: leases of ours must not keep others from theirs.
        self._desk.wanted(False, clock.mono())
        if asked is not StopLevel.DRAIN:
            self._supervisor.stop_all(clock.mono(), 0.0 if asked is StopLevel.STOP_NOW else None)

    def retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Other options and settings from now on. Raises NoSuchGpu; then nothing is changed."""
        self._desk.retune(options, settings)
        self.options = options
        self._cycle.retune(options, settings)
        self._disk.change(options.min_disk)
        self._supervisor.retune(options)
        self.decide_soon(clock.mono())

    def enforce_marks(self) -> None:
        """Cancels, pauses or resumes running jobs as marked in the queue."""
        now = clock.mono()
        records = {record.id: record for record in self._queue.running()}
        for attempt in tuple(self._supervisor.running.values()):
            record = records.get(attempt.record.id)
            if record is not None:
                self._supervisor.enforce(attempt, record, now)
        self.decide_soon(now)

    # --- state --------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        attempts = tuple(self._supervisor.running.values())
        deciding = self._cycle
        self._reporter.show(attempts, deciding.waiting_for, deciding.at_once(), back_in_s=deciding.back_in_s())

    def _state(self) -> DispatcherState:
        views = self._desk.views(clock.mono(), clock.wall()) if self._desk.watch.is_open else ()
        return replace(
            super()._state(),
            closed=self._closed(),
            gpus=tuple(GpuState.of(view) for view in views),
            at_once=self._cycle.at_once(),
        )
