"""The dispatcher: works a queue off with this machine's GPUs and CPUs.

An event loop that is woken by a job's end through its pidfd, and whose timers are checks of the GPUs while a job waits
for one, other users on our GPUs, time limits, back-offs, orphans and the disk. At each event
``scheduler.policy.decide`` decides what starts.

This module brings together the inputs of the decision (the queue's head, the state of the GPUs, the limits), and knows
when the decision can change: the end of a back-off, of a GPU's time out, of quiet hours. ``attempts.launch`` starts
jobs, ``attempts.complete`` records ends, ``attempts.preempt`` pauses, ``gpu.manager`` reads and leases the GPUs, and
``control.server`` carries out requests.
"""

from __future__ import annotations

import logging
import os
import selectors
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Unpack

from gpuherd.engines import host
from gpuherd.gpus.lease_files import user_name
from gpuherd.gpus.tickets import Need
from gpuherd.gpus.visible import variable_of
from gpuherd.jobs import clock
from gpuherd.jobs.attempts import START_AGAIN_S
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.attempts.launch import Launcher
from gpuherd.jobs.attempts.preempt import Preemption
from gpuherd.jobs.attempts.supervise import Attempt, Orphans, Supervisor
from gpuherd.jobs.attempts.time_limits import TimeLimits
from gpuherd.jobs.control.messages import StopLevel
from gpuherd.jobs.dispatcher_state import DispatcherState, GpuState
from gpuherd.jobs.event_loop import Decisions, Loop, Terms
from gpuherd.jobs.gpu.manager import GpuManager
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import EventKind, QueuedJob
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.scheduler.lengths import NO_LENGTHS, Lengths
from gpuherd.jobs.scheduler.limits import limits, most_at_once, most_ever, refuse_if_none_fits
from gpuherd.jobs.scheduler.memory import FamilyMemory, asks_for
from gpuherd.jobs.scheduler.ordering import Lookahead
from gpuherd.jobs.scheduler.policy import decide
from gpuherd.jobs.scheduler.types import Limits, Wait, WaitingJob
from gpuherd.jobs.settings import Settings

logger = logging.getLogger(__name__)

# After so long without a start a run reports what it waits for.
_REPORT_WAIT_AFTER_S = 1.5
# How often a reason that counts time down is renewed.
_COUNT_DOWN_S = 5.0
# Number of jobs that a dispatcher expects that serves a queue.
_MANY = 1_000_000
# How often the waiting jobs are counted for other users who wait.
_COUNT_EVERY_S = 10.0
# A job whose disk was full is considered again after so long.
_SPACE_AGAIN_S = 5.0


class Dispatcher(Loop):
    """Works a queue off on this machine. One use: ``run`` once.

    Args:
        queue, run, options, reporter, and by name serve, lock, settings, load_settings, on_ready, grace_s: as for
            ``Loop``; the options say also which GPUs, and when one is free.
        jobs: the submitted jobs, to check before the start that they can run here at all.

    Raises NoSuchGpu for an unknown GPU id, and JobCannotFit when none of the jobs could ever run here.
    """

    _launcher: Launcher  # from ``_begin`` on

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
        self._supervisor = Supervisor(run, queue.tag, options, self._grace_s)
        self._gpus = GpuManager(options, queue.tag, self._supervisor, self._health, self.settings)
        self._watch = self._gpus.watch
        self._orphans = Orphans(queue.tag)
        self._preemption = Preemption(queue, self._supervisor, self._reporter, self._disk)
        self._decisions = Decisions()
        # What decisions depend on, and what they leave for the next one. ``_following``: the first of the waiting jobs,
        # in order, which could be next.
        self._options_at_start = options
        self._user = user_name(os.geteuid())
        self._most_ever = most_ever(self.settings, self._user)
        self._kept_from_us = self._kept_at_start = frozenset(self.settings.policy.exclude_gpus)
        self._cores, self._host_mb = host.cores(), host.memory_mb()
        self._sizes, self._jobs = {job.gpus for job in jobs}, len(jobs)
        self._following: tuple[QueuedJob, ...] = ()
        self._lookahead = Lookahead()
        self._limits_change_at: float | None = None
        self._ledger_fd: int | None = None
        self._waits_since: float | None = None
        self._many_wait, self._count_at = 0, 0.0
        self._has_reported_wait = False
        if any(self._sizes) or options.gpu_ids:
            # GPUs that are named are looked up at once, also when the jobs are not known yet.
            self._watch.open()
        if jobs and not self._watch.awaits_driver:
            refuse_if_none_fits(jobs, self._watch.gpus, self._limits())

    def _begin(self, run_id: int, began_at: float, held: ExitStack) -> None:
        self._launcher = Launcher(self._queue, self._supervisor, self._gpus, self._reporter, run_id, began_at)
        held.callback(self._gpus.close)
        held.callback(self._launcher.prefork.close)
        self._look_at_queue()

    def _hold(self, problem: sqlite3.OperationalError) -> None:
        if self._launcher.again_at is None:
            logger.warning("can't use the queue now, trying again in %g s: %s", START_AGAIN_S, problem)
        self._launcher.again_at = clock.mono() + START_AGAIN_S
        self._decisions.due_at = None

    def _is_over(self) -> bool:
        if self._supervisor.running or self._completion.again_at is not None:
            if not self._supervisor.running and self.stop_level >= StopLevel.STOP:
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
        self._preemption.give_way(self._gpus.keep_time(now, may_start=self.stop_level is StopLevel.GO_ON), now)
        self._preemption.end_idleness(self._gpus.fetch_idle_actions(), now)
        if self._ledger_fd is None and (fd := self._gpus.ledger.ends_fd) is not None:
            self._ledger_fd = fd
            self._selector.register(fd, selectors.EVENT_READ)
        for text in self._gpus.fetch_notices():
            self._reporter.notice(text)
        if self._gpus.changed:
            self._gpus.changed = False
            self.decide_soon(now)
        if self._wants_disk() and self._is_disk_due(now) and self._preemption.look_at_disk(now):
            self.decide_soon(now)
        prefork.keep_time(now, self._following if self.stop_level is StopLevel.GO_ON else (), self._launcher.threads)

    def _ends_recorded(self, now: float) -> None:
        self.decide_soon(now)

    def _due(self) -> Sequence[float | None]:
        may_start = self.stop_level is StopLevel.GO_ON
        times = [
            self._supervisor.next_deadline(),
            self._orphans.due_at,
            self._gpus.next_at(may_start=may_start),
            self._launcher.prefork.due_at,
        ]
        if may_start:
            # Otherwise no decision is made any more, and one that is due would keep the loop spinning.
            times += [self._decisions.due_at, self._launcher.again_at]
        if self._wants_disk():
            times.append(self._disk.due_at)
        return times

    def _wants_disk(self) -> bool:
        return bool(self._supervisor.running) or self._disk.low is not None  # else before the next start

    def _is_disk_due(self, now: float) -> bool:
        return self._disk.due_at is not None and now >= self._disk.due_at

    # --- decisions ----------------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        """Starts all jobs that can start now, when a decision is due. Repeats when a lease, or the check of the GPUs
        under it, has changed the inputs."""
        starter, decisions, now = self._launcher, self._decisions, clock.mono()
        if starter.again_at is not None and now >= starter.again_at:
            starter.again_at, decisions.due_at = None, now
        if decisions.due_at is None or now < decisions.due_at or self.stop_level is not StopLevel.GO_ON:
            return
        if self._is_disk_due(now):
            self._preemption.look_at_disk(now)
        decisions.due_at = None
        while self._decide_and_start():
            pass
        self._wait_for_later()
        self._state_file.touch()

    def _decide_and_start(self) -> bool:
        """Makes one decision and carries it out; whether to decide again: more jobs may start, or other jobs."""
        starter, wall, now = self._launcher, clock.wall(), clock.mono()
        views = self._gpus.views(now, wall)
        bounds = self._limits()
        gpus = sum(view.is_free for view in views)
        slots = max(0, bounds.cpu_slots - self._supervisor.on_cpu)
        limit = self._lookahead.foremost(gpus + slots)
        head = {queued.id: queued for queued in self._queue.head(limit, wall, self.options.order)}
        on_gpus = sum(queued.gpus > 0 for queued in head.values())
        on_cpu = len(head) - on_gpus
        if self._lookahead.by_kind:
            first = self._queue.first_of_kinds(gpus, wall, self.options.order)
            head |= {queued.id: queued for queued in first}
        if not self._watch.is_open and any(queued.gpus for queued in head.values()):
            self._watch.open()
            self._look_at_queue()
            return True
        if bounds.closed is None and self._postpone_for_space(tuple(head.values()), wall):
            return True
        waiting = self._waiting(tuple(head.values()))
        decision = decide(waiting, views, bounds, self._watch.choose, cpu_running=self._supervisor.on_cpu)
        # An option changed during the run may be changed back, so that a temporary limit refuses no job for good.
        for_now = [wait for wait in decision.refused if self._may_be_had_later(head[wait.job])]
        refused = [wait for wait in decision.refused if wait not in for_now]
        waits = (*self._for_now(for_now), *decision.waits)
        for wait in refused:
            starter.give_up(head[wait.job], FailureClass.BAD_INPUT, wait.reason)
        running: tuple[Attempt, ...] = ()
        if decision.starts:
            starter.threads = max(1, self._cores // most_at_once(self._sizes, self._jobs, self._watch.gpus, bounds))
            running = starter.start_all(decision.starts, head, {job.id: job.memory_mb for job in waiting})
            for attempt in running:
                self._watch_for_end(attempt)
            self._gpus.started(now)
        self._note_waits(waits, head, bounds, now)
        if starter.again_at is not None:
            return False
        if len(running) < len(decision.starts) or refused:
            return True
        # Otherwise only jobs behind those that were considered could start, if there are places for their kind.
        gpus -= sum(len(start.gpus) for start in decision.starts)
        slots -= sum(not start.gpus for start in decision.starts)
        # More of the queue is searched once for each decision that leaves something over.
        before, self._lookahead = self._lookahead, self._lookahead.after(decision, unseen=on_gpus == limit)
        if self._lookahead.is_beyond(before) and on_gpus == limit:
            return True
        open_gpus = gpus > 0 or any(start.shared for start in decision.starts)
        unseen = (open_gpus and on_gpus == limit) or (slots > 0 and on_cpu == limit)
        return bool(decision.starts) and unseen

    def _postpone_for_space(self, head: Sequence[QueuedJob], wall: float) -> bool:
        """Postpones jobs that ran out of disk space while too little is free where they write; whether any is."""
        tried = [queued for queued in head if queued.attempts]
        lacking = {
            queued.id: reason
            for queued in tried
            if (reason := self._disk.lacking_for(queued.job)) is not None
            and self._queue.last_failure(queued.id) == FailureClass.DISK_FULL
        }
        if lacking:
            self._queue.postpone(lacking, wall + _SPACE_AGAIN_S)
        return bool(lacking)

    @property
    def _is_narrowed(self) -> bool:
        now, start = self.options, self._options_at_start
        fewer = now.max_gpus is not None and (start.max_gpus is None or now.max_gpus < start.max_gpus)
        fewer = fewer or now.gpu_ids != start.gpu_ids
        return fewer or not self._kept_from_us <= self._kept_at_start

    def _may_be_had_later(self, queued: QueuedJob) -> bool:
        return self._is_narrowed or (self._watch.awaits_driver and queued.gpus > 0)

    def _for_now(self, refused: Sequence[Wait]) -> Sequence[Wait]:
        problem = None if self._watch.gpus else self._watch.problem
        return refused if problem is None else [Wait(wait.job, problem) for wait in refused]

    def _waiting(self, head: Sequence[QueuedJob]) -> list[WaitingJob]:
        named = {queued.family for queued in head if queued.family and queued.memory_mb is not None}
        families = self._queue.families(named) if named else {}
        lengths = Lengths(self._queue.latest_lengths()) if head and self._gpus.reserved.any_of_others else NO_LENGTHS
        return [self._waiting_job(queued, families.get(queued.family or ""), lengths) for queued in head]

    def _waiting_job(self, queued: QueuedJob, family: FamilyMemory | None, lengths: Lengths) -> WaitingJob:
        request, job = queued.request, queued.job
        share = request.share and self.options.share and request.memory_mb is not None
        memory_mb = request.memory_mb
        most_mb = self._watch.most_mb(request.gpus)
        # Without so many GPUs at the moment the family's memory does not count, so that no job requests more than
        # exists.
        if family is not None and most_mb is not None:
            memory_mb = asks_for(memory_mb, family, most_mb, less=queued.may_ask_less).memory_mb
        whole_s = TimeLimits.of(job, self.options).whole_s
        return WaitingJob(
            queued.id,
            request.gpus,
            memory_mb,
            job.priority,
            queued.avoid,
            share=share,
            rank=queued.rank,
            limit_s=None if whole_s is None else whole_s + self._supervisor.grace_s,
            nodes=job.nodes,
            host_memory_mb=job.host_memory_mb,
            expected_s=lengths.expected_s(job.family, request.gpus),
        )

    def _note_waits(self, waits: Sequence[Wait], head: dict[int, QueuedJob], bounds: Limits, now: float) -> None:
        self._decisions.note(waits, head)
        self._following = () if bounds.closed else tuple(head[wait.job] for wait in waits)
        on_gpus = () if bounds.cpu_only else tuple(head[wait.job] for wait in waits if head[wait.job].gpus)
        wanted = bool(on_gpus)
        need = self._need(on_gpus, bounds, now) if on_gpus and self._watch.is_open else None
        self._gpus.set_waiting(wanted, now, need)
        self._report_first_wait(wanted, now)

    def _need(self, on_gpus: Sequence[QueuedJob], bounds: Limits, now: float) -> Need:
        """What the jobs that wait for GPUs need, for other users' gpuherds: nothing while none may start."""
        if bounds.closed is not None:
            return Need(gpus=0)
        if self._watch.leases.turns.others_wait and now >= self._count_at:
            # A long queue is counted seldom, and only where somebody wants to know.
            self._many_wait, self._count_at = self._queue.counts().waiting, now + _COUNT_EVERY_S
        jobs = max(len(on_gpus), self._many_wait) if self._watch.leases.turns.others_wait else len(on_gpus)
        return self._gpus.need(on_gpus, bounds.most_gpus, jobs, clock.wall())

    def _report_first_wait(self, wanted: bool, now: float) -> None:
        """Reports once what a run waits for while none of its jobs runs: without a terminal no status line shows it."""
        if self._has_reported_wait or not wanted or self._supervisor.running or self._watch.awaits_driver:
            self._waits_since = None
            return
        self._waits_since = now if self._waits_since is None else self._waits_since
        if now < self._waits_since + _REPORT_WAIT_AFTER_S:
            self._decisions.soon(self._waits_since + _REPORT_WAIT_AFTER_S)
            return
        self._has_reported_wait = True
        self._reporter.notice(f"waiting for GPUs: {self._decisions.waiting_for}")

    def _wait_for_later(self) -> None:
        """Schedules the decision at the end of a back-off or of a GPU's time out."""
        wall, decisions = clock.wall(), self._decisions
        later = self._queue.next_not_before(wall)
        if later is not None:
            decisions.waiting_for = decisions.waiting_for or "a job that has failed waits a moment for its next try"
        back = self._next_count_down(wall) if decisions.waiting_for else None
        change = self._limits_change_at if decisions.waiting_for else None
        for at in (later, back, change):
            if at is not None:
                decisions.soon(clock.mono() + max(0.0, at - wall))
        if decisions.waiting_for is None and self._queue.held():
            decisions.waiting_for = "what still waits is paused"

    def _next_count_down(self, wall: float) -> float | None:
        """When the next GPU comes back, or sooner: the reason why a job waits contains a countdown."""
        back = min(self._health.returns(wall).values(), default=None)
        return None if back is None else min(back, wall + _COUNT_DOWN_S)

    # --- inputs of a decision -----------------------------------------------------------------------------------

    def _look_at_queue(self) -> None:
        """Reads from the queue what the jobs need, unless the caller has named the jobs."""
        if not self._jobs:
            kinds = self._queue.kinds()
            self._sizes = {gpus for gpus, _ in kinds} | ({1} if self._serve else set())
            self._jobs = _MANY
        if self._watch.awaits_driver:
            self._reporter.notice(
                f"no GPUs yet: {self._watch.problem}; jobs that need a GPU wait until the driver answers"
                f" (with {variable_of(self._watch.maker)}= they run on the CPU)"
            )
        elif self._watch.problem is not None:
            slots = self._limits().cpu_slots
            self._reporter.notice(f"no GPUs: {self._watch.problem}; jobs run on the CPU, {slots} at once")

    def _concurrent_jobs(self) -> int:
        """How many jobs can run side by side now, without the GPUs that are left out."""
        left_out = self._health.returns(clock.wall())
        usable = [gpu for gpu in self._watch.gpus if gpu.uuid not in left_out]
        if left_out and not usable and 0 not in self._sizes:
            return 0
        return most_at_once(self._sizes, self._jobs, usable, self._limits())

    def _limits(self) -> Limits:
        """The limits on what runs at once, now."""
        gpus = self._watch.gpus if self._watch.is_open else None
        most, why = self._gpus_now()
        bounds = limits(self.options, gpus, self._cores, self._most_ever, self._host_mb)
        return replace(
            bounds,
            # Jobs on GPUs wait for a late driver, and for GPUs that were taken away from the run; none runs on the CPU
            # instead.
            cpu_only=bounds.cpu_only and not (self._is_narrowed or self._watch.awaits_driver),
            running=len(self._supervisor.running),
            closed=self._closed(),
            gpus_now=most,
            gpus_now_why=why,
            now=clock.mono(),
        )

    def _gpus_now(self) -> tuple[int | None, str | None]:
        """The settings' limit on GPUs, and what jobs on GPUs that were taken away from the run still use."""
        allowed, elsewhere = self._gpus.allowance(), self._gpus.count_elsewhere()
        self._limits_change_at = allowed.changes_at
        most, why = allowed.max_gpus, allowed.sentence
        limits = [limit for limit in (self.options.max_gpus, most) if limit is not None]
        if elsewhere and limits:
            most = max(0, min(limits) - elsewhere)
            why = f"{elsewhere} more are still in use by jobs on GPUs that were taken away"
        return most, why

    def _watch_for_end(self, attempt: Attempt) -> None:
        self._selector.register(attempt.process.pidfd, selectors.EVENT_READ)

    def _closed(self) -> str | None:
        if self._completion.again_at is not None:
            return self._completion.trouble
        return self._disk.low

    # --- ends ---------------------------------------------------------------------------------------------------

    def _readable(self, descriptors: Sequence[int]) -> None:
        """The pidfds of jobs that have ended; and the descriptor of the ledger."""
        ends = []
        now, at = clock.mono(), clock.wall()
        if self._ledger_fd in descriptors:
            self._gpus.ledger.note_ends(now, at)
            descriptors = [each for each in descriptors if each != self._ledger_fd]
            if not descriptors:
                return
        for pidfd in descriptors:
            self._selector.unregister(pidfd)
            attempt, found = self._supervisor.collect(pidfd)
            problem = self._gpus.problem_of(attempt.record) if found.code != 0 else None
            observed = self._gpus.observed(attempt, disk_low=found.code != 0 and self._is_disk_low(attempt, now))
            ends.append(attempt.ended(found, at=at, now=now, gpu_problem=problem, observed=observed))
            self._launcher.prefork.ended(now - attempt.record.started_mono, now)
            self._orphans.expect(now, attempt.process.traces)
            self._gpus.released(attempt.record, now)
        self._completion.machine = [gpu.uuid for gpu in self._watch.gpus]
        self._completion.in_use = self._supervisor.gpus
        self._gpus.ledger.ended(ends)
        self._completion.complete(ends, now)
        for label, sentence in self._gpus.fetch_left_out(at):
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
            self._watch.open()
            self._gpus.started(now)
        if ends:
            self._gpus.ledger.ended(ends)
            self._completion.complete(ends, now)
        self._gpus.ledger.catch_up(self._queue)
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

    def _end_work(self, level: StopLevel) -> None:
        # No job waits for a GPU any more: leases of ours must not keep others from theirs.
        self._gpus.set_waiting(False, clock.mono())
        if level is not StopLevel.DRAIN:
            self._supervisor.stop_all(clock.mono(), 0.0 if level is StopLevel.STOP_NOW else None)

    def _retune(self, options: DispatchOptions, settings: Settings) -> None:
        self._gpus.retune(options, settings)
        self._supervisor.retune(options)
        self._most_ever = most_ever(settings, self._user)
        self._kept_from_us = frozenset(settings.policy.exclude_gpus)

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

    def _state(self) -> DispatcherState:
        views = self._gpus.views(clock.mono(), clock.wall()) if self._watch.is_open else ()
        return replace(
            super()._state(),
            closed=self._closed(),
            gpus=tuple(GpuState.of(view) for view in views),
            at_once=self._concurrent_jobs(),
        )
