"""The dispatcher: an event loop that runs a queue's jobs on this machine.

It waits for events, never in fixed steps: a job's end comes through its pidfd, Ctrl-C through a socket, what people ask
through a bell, and timers are the next deadline of those who have one (checks of the GPUs while a job waits for one,
strangers on ours, time limits, back-offs, leftovers, the disk, the display). At each event it asks ``policy.decide``
what to start and does it. All progress is in the queue before it counts: the dispatcher may be killed at any instant,
and the next one goes on from the queue's file.

How a start goes is ``starting``'s part, how an end goes ``ending``'s, what the GPUs say ``gpudesk``'s, and what people
ask ``obeying``'s; here is when.
"""

from __future__ import annotations

import logging
import os
import selectors
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from gpuherd.errors import CannotWrite
from gpuherd.jobs import clock, sharing
from gpuherd.jobs.capacity import limits, most_at_once, refuse_if_none_fits
from gpuherd.jobs.diskguard import DiskGuard
from gpuherd.jobs.ending import Ended, Endings, is_full, lost
from gpuherd.jobs.events import EventKind
from gpuherd.jobs.failures import FailureClass, clean
from gpuherd.jobs.gpudesk import GpuDesk
from gpuherd.jobs.health import HealthBook
from gpuherd.jobs.job import Job
from gpuherd.jobs.leftovers import Leftovers
from gpuherd.jobs.lock import DispatcherLock
from gpuherd.jobs.obeying import Obeying
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.outcome import Outcome
from gpuherd.jobs.policy import Limits, Wait, WaitingJob, decide
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.records import PauseReason, QueuedJob
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.retuning import SETTABLE
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settings import NO_SETTINGS, Settings
from gpuherd.jobs.settle import Blameless
from gpuherd.jobs.standing import GpuStanding, Standing, StandingFile
from gpuherd.jobs.starting import Starter
from gpuherd.jobs.stopping import Ask, StopSignals
from gpuherd.jobs.supervisor import GRACE_S, Attempt, Supervisor
from gpuherd.jobs.yielding import Action, ActionKind

logger = logging.getLogger(__name__)

# How many more jobs than there are free places one decision looks at: those to go past a job that can't start yet.
_BEYOND = 8
# A dispatcher that serves does not know how many jobs will come.
_MANY = 1_000_000


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
        self._disk = DiskGuard((run.root, run.logs), options.min_disk)
        self._obeying = Obeying(queue, run, self, settings, load_settings)
        self._cores = len(os.sched_getaffinity(0))
        self._sizes, self._jobs = {job.gpus for job in jobs}, len(jobs)
        if any(self._sizes):
            self._desk.open()
        if jobs:
            refuse_if_none_fits(jobs, self._desk.gpus, self._limits())
        self.asked = Ask.GO_ON
        self._changes_at: float | None = None
        self._starter: Starter | None = None
        self._waiting_for: str | None = None
        self._standing = StandingFile(run.standing)
        self._waits: Sequence[Wait] = ()
        self._decide_at: float | None = 0.0
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
            self._starter = Starter(self._queue, self._supervisor, self._desk, self._tell, run_id, began_at)
            self._prepare()
            with StopSignals() as signals, closing(self._obeying), closing(self._desk), self._selector:
                self._selector.register(signals, selectors.EVENT_READ)
                self._obeying.listen()
                if self._obeying.bell is not None:
                    self._selector.register(self._obeying.bell, selectors.EVENT_READ)
                self._adopt()
                self._obeying.begin()
                self._leftovers.expect(clock.mono() - 1)
                self._on_ready()
                self._loop(self._starter, signals)
                outcome = self._outcome(signals)
            self._run.remove_stray_attempt_files(())
            self._standing.remove()
            self._queue.end_run(run_id, clock.wall())
            return outcome

    def _loop(self, starter: Starter, signals: StopSignals) -> None:
        while True:
            self._obey(signals)
            self._keep_time()
            self._start_what_can(starter)
            if self._is_over():
                return
            ended = []
            for key, _ in self._selector.select(self._time_to_next(starter)):
                if key.fileobj is signals:
                    signals.drain_wakeups()
                elif key.fileobj is self._obeying.bell:
                    self._obeying.hear()
                else:
                    ended.append(key.fd)
            if ended:
                self._ended(ended)

    def _prepare(self) -> None:
        """Looks what the queue holds, where the caller has not said it."""
        if not self._jobs:
            kinds = self._queue.kinds()
            self._sizes = {gpus for gpus, _ in kinds} | ({1} if self._serve else set())
            self._jobs = _MANY
        if self._desk.problem is not None:
            slots = self._limits().cpu_slots
            self._tell.notice(f"no GPUs: {self._desk.problem}; jobs run on the CPU, {slots} at once")

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
            # Told to stop, and the disk is still full: what has ended meanwhile is found again by the next start.
            raise CannotWrite(f"can't write {self._run.queue}: the disk is full; free some and start again")
        return False

    def _is_work_left(self, wall: float) -> bool:
        queue = self._queue
        return bool(queue.head(1, wall)) or queue.next_not_before(wall) is not None or queue.held() > 0

    def _keep_time(self) -> None:
        now = clock.mono()
        self._supervisor.keep_time(now)
        if self._endings.again_at is not None and now >= self._endings.again_at and self._endings.record(now):
            self.decide_soon(now)
        if self._leftovers.due_at is not None and now >= self._leftovers.due_at:
            self._leftovers.sweep([attempt.process.traces for attempt in self._supervisor.running.values()], now)
        for action in self._desk.keep_time(now, may_start=self.asked is Ask.GO_ON):
            self._give_way(action, now)
        for text in self._desk.fetch_notices():
            self._tell.notice(text)
        if self._desk.changed:
            self._desk.changed = False
            self._decide_at = now
        if self._wants_disk():
            self._look_at_disk(now)
        self._obeying.keep_time(now)
        self._standing.keep_time(now, self._stands)
        every = self._tell.every_s
        if every is not None and now >= self._show_at:
            self._show_at = now + every
            running = tuple(self._supervisor.running.values())
            self._tell.show(running, self._waiting_for, self._at_once(self._limits()))

    def _time_to_next(self, starter: Starter) -> float | None:
        may_start = self.asked is Ask.GO_ON
        times = [
            self._supervisor.next_deadline(),
            self._leftovers.due_at,
            self._endings.again_at,
            self._desk.next_at(may_start=may_start),
            self._obeying.due_at,
            self._standing.due_at,
        ]
        if may_start:
            # Else nothing is decided any more, and a decision that is due would keep the loop spinning.
            times += [self._decide_at, starter.again_at]
        if self._wants_disk():
            times.append(self._disk.due_at)
        if self._tell.every_s is not None:
            times.append(self._show_at)
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - clock.mono()) if known else None

    # --- deciding and starting --------------------------------------------------------------------------------

    def decide_soon(self, when: float) -> None:
        """A decision may come out otherwise at this time (by ``clock.mono``)."""
        self._decide_at = when if self._decide_at is None else min(when, self._decide_at)

    def _start_what_can(self, starter: Starter) -> None:
        """Starts all that can start now. Goes round again when a lease or a look under it has changed the picture."""
        now = clock.mono()
        if starter.again_at is not None and now >= starter.again_at:
            starter.again_at, self._decide_at = None, now
        if self._decide_at is None or now < self._decide_at or self.asked is not Ask.GO_ON:
            return
        self._look_at_disk(now)
        self._decide_at = None
        while self._decide_and_start(starter):
            pass
        self._wait_for_later()

    def _decide_and_start(self, starter: Starter) -> bool:
        """One decision and what follows; whether to decide again: more may start, or something else instead."""
        wall, now = clock.wall(), clock.mono()
        views = self._desk.views(now, wall)
        bounds = self._limits()
        free = sum(view.busy is None and not view.ours for view in views)
        places = free + max(0, bounds.cpu_slots - self._supervisor.on_cpu)
        head = {queued.id: queued for queued in self._queue.head(_BEYOND + places, wall, self.options.order)}
        if not self._desk.is_open and any(queued.gpus for queued in head.values()):
            self._desk.open()
            self._prepare()
            return True
        waiting = self._waiting(tuple(head.values()))
        decision = decide(waiting, views, bounds, self._desk.choose, cpu_running=self._supervisor.on_cpu)
        for wait in decision.refused:
            starter.give_up(head[wait.job], FailureClass.BAD_INPUT, wait.reason)
        running: tuple[Attempt, ...] = ()
        if decision.starts:
            starter.threads = max(1, self._cores // self._at_once(bounds))
            running = starter.start_all(decision.starts, head, {job.id: job.memory_mb for job in waiting})
            for attempt in running:
                self._selector.register(attempt.process.pidfd, selectors.EVENT_READ)
            self._desk.started(now)
        self._note_waits(decision.waits, head, bounds, now)
        places -= sum(max(1, len(start.gpus)) for start in decision.starts)
        all_went = len(running) == len(decision.starts) and not decision.refused
        more = bool(decision.starts) and (places > 0 or any(job.share for job in waiting))
        return (more or not all_went) and starter.again_at is None

    def _waiting(self, head: Sequence[QueuedJob]) -> list[WaitingJob]:
        peaks = self._queue.families() if any(queued.share for queued in head) else {}
        return [self._waiting_job(queued, peaks) for queued in head]

    def _waiting_job(self, queued: QueuedJob, peaks: dict[str, int]) -> WaitingJob:
        request, job = queued.request, queued.job
        share = request.share and self.options.share and request.memory_mb is not None
        memory_mb = request.memory_mb
        if share and memory_mb is not None:
            memory_mb = sharing.expected_mb(memory_mb, peaks.get(job.family or ""))
        return WaitingJob(queued.id, request.gpus, memory_mb, job.priority, queued.avoid, share=share, cost=job.cost)

    def _limits(self) -> Limits:
        gpus = self._desk.gpus if self._desk.is_open else None
        return replace(
            limits(self.options, gpus, self._cores),
            running=len(self._supervisor.running),
            closed=self._closed(),
            **self._gpus_now(),
        )

    def _gpus_now(self) -> dict[str, Any]:
        """The settings' limit on GPUs, and what jobs on GPUs that were taken away from the run still use."""
        allowed, elsewhere = self._desk.allowance(), self._desk.count_elsewhere()
        self._changes_at = allowed.changes_at
        most, why = allowed.max_gpus, allowed.sentence
        if elsewhere:
            most = max(0, min(self.options.max_gpus, self.options.max_gpus if most is None else most) - elsewhere)
            why = f"{elsewhere} more are still in use by jobs on GPUs that were taken away"
        return {"gpus_now": most, "gpus_now_why": why}

    def _closed(self) -> str | None:
        if self._endings.again_at is not None:
            return "the disk is full"
        return self._disk.low

    def _at_once(self, bounds: Limits) -> int:
        return most_at_once(self._sizes, self._jobs, self._desk.gpus, bounds)

    def _note_waits(self, waits: Sequence[Wait], head: dict[int, QueuedJob], bounds: Limits, now: float) -> None:
        self._waiting_for = clean(waits[0].reason) if waits else None
        self._waits = waits
        self._standing.touch()
        wanted = not bounds.cpu_only and any(head[wait.job].gpus for wait in waits)
        self._desk.wanted(wanted, now)

    def _wait_for_later(self) -> None:
        """Notes when a back-off or a GPU's time out ends."""
        wall = clock.wall()
        later = self._queue.next_not_before(wall)
        if later is not None:
            self._waiting_for = self._waiting_for or "for its next try, a moment after it failed"
        back = self._health.next_return(wall) if self._waiting_for else None
        change = self._changes_at if self._waiting_for else None
        for at in (later, back, change):
            if at is not None:
                self.decide_soon(clock.mono() + max(0.0, at - wall))
        if self._waiting_for is None and self._queue.held():
            self._waiting_for = "paused"

    # --- ending -----------------------------------------------------------------------------------------------

    def _ended(self, pidfds: Sequence[int]) -> None:
        ends = []
        now, at = clock.mono(), clock.wall()
        for pidfd in pidfds:
            self._selector.unregister(pidfd)
            attempt, found = self._supervisor.collect(pidfd)
            if found.code != 0 and self._disk.look_for(attempt.record.queued.job, now):
                self._on_disk(now)
            blameless = attempt.blameless
            if attempt.adopted and not found.started:
                blameless = Blameless.NEVER_WENT
            ends.append(
                Ended(
                    record=attempt.record,
                    exit=found,
                    at=at,
                    mono=now,
                    blameless=blameless,
                    passed=attempt.passed,
                    cancelled_by=attempt.cancelled_by,
                    paused_s=attempt.timer.paused_s(now),
                    gpu_problem=self._desk.problem_of(attempt.record) if found.code != 0 else None,
                    seen=self._desk.seen(attempt, disk_low=self._disk.low is not None),
                )
            )
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
            found = self._supervisor.take_over(record, now, copied=self._queue.copied)
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
        self._run.remove_stray_attempt_files({attempt.record.id for attempt in self._supervisor.running.values()})

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
        running = len(self._supervisor.running)
        if asked is Ask.DRAIN:
            text = f"{why}nothing new is started; {running} running jobs go on to their end"
            hint = " (Ctrl-C again stops them and puts them back in the queue)" if why else ""
            self._tell.notice(text + hint)
        else:
            text = f"{why}stopping {running} running jobs and putting them back in the queue"
            self._tell.notice(text)
            self._supervisor.stop_all(clock.mono(), 0.0 if asked is Ask.STOP_NOW else None)
        return text

    def retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Other options and settings from now on. Raises NoSuchGpu; then nothing is changed."""
        self._desk.retune(options, settings)
        self.options = options
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
            waits={wait.job: clean(wait.reason) for wait in self._waits},
            gpus=tuple(
                GpuStanding(uuid=view.gpu.uuid, label=view.gpu.label, busy=view.busy, ours=view.ours) for view in views
            ),
            settings={name: getattr(self.options, name) for name in SETTABLE},
        )

    # --- giving way -------------------------------------------------------------------------------------------

    def _give_way(self, action: Action, now: float) -> None:
        """To a stranger on a GPU of ours, or back from that."""
        attempt = next((a for a in self._supervisor.running.values() if a.record.id == action.attempt), None)
        if attempt is None:
            return
        self._tell.notice(action.sentence)
        if action.kind is ActionKind.REQUEUE:
            attempt.blameless = Blameless.GAVE_WAY
            self._supervisor.stop(attempt, now)
        elif action.kind is ActionKind.PAUSE:
            self._pause(attempt, PauseReason.STRANGER, now)
        elif action.kind is ActionKind.RESUME:
            self._resume(attempt, PauseReason.STRANGER, now)

    def _wants_disk(self) -> bool:
        return bool(self._supervisor.running) or self._waiting_for is not None

    def _look_at_disk(self, now: float) -> None:
        if self._disk.due_at is not None and now >= self._disk.due_at and self._disk.look(now):
            self._on_disk(now)

    def _on_disk(self, now: float) -> None:
        """There is too little space, or there is enough again."""
        running = tuple(self._supervisor.running.values())
        if self._disk.low is not None:
            self._tell.notice(f"{self._disk.low}; {len(running)} running jobs are paused and none is started")
            for attempt in running:
                self._pause(attempt, PauseReason.DISK, now)
        else:
            self._tell.notice("there is space on the disk again; jobs go on")
            for attempt in running:
                self._resume(attempt, PauseReason.DISK, now)
        self.decide_soon(now)

    def _pause(self, attempt: Attempt, why: PauseReason, now: float) -> None:
        if attempt.kill_at is None:
            _although_full(lambda: self._queue.mark_paused(attempt.record.id, why, now))
            self._supervisor.set_paused(attempt, attempt.paused | {why}, now)

    def _resume(self, attempt: Attempt, why: PauseReason, now: float) -> None:
        _although_full(lambda: self._queue.mark_resumed(attempt.record.id, why, now))
        self._supervisor.set_paused(attempt, attempt.paused - {why}, now)


def _although_full(write: Callable[[], object]) -> None:
    """Writes a mark that the run can do without: a pause for want of space must not fail for want of space."""
    try:
        write()
    except sqlite3.OperationalError as problem:
        if not is_full(problem):
            raise
        logger.warning("can't write to the queue: %s", problem)
