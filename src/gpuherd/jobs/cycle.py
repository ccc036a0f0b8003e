"""When the dispatcher decides, and the inputs of the decision: the queue's head, the state of the GPUs, and the limits.

``scheduler.policy.decide`` decides, and ``attempts.launch`` carries it out. This module keeps why the first job waits
and when the decision can change (the end of a back-off, of a GPU's time out, of quiet hours).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpuherd.engines import host
from gpuherd.gpus.lease_files import user_name
from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import FailureClass, clean
from gpuherd.jobs.attempts.launch import Launcher
from gpuherd.jobs.attempts.supervise import Attempt, Supervisor
from gpuherd.jobs.attempts.time_limits import TimeLimits
from gpuherd.jobs.gpu.health import GpuHealth
from gpuherd.jobs.gpu.manager import GpuManager
from gpuherd.jobs.job import Job
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.scheduler.limits import limits, most_at_once, most_ever, refuse_if_none_fits
from gpuherd.jobs.scheduler.memory import FamilyMemory, asks_for
from gpuherd.jobs.scheduler.ordering import Lookahead
from gpuherd.jobs.scheduler.policy import decide
from gpuherd.jobs.scheduler.types import Limits, Wait, WaitingJob
from gpuherd.jobs.settings import NO_SETTINGS, Settings

# After so long without a start a run reports what it waits for.
_REPORT_WAIT_AFTER_S = 1.5
# How often a reason that counts time down is renewed.
_COUNT_DOWN_S = 5.0
# Number of jobs that a dispatcher expects that serves a queue.
_MANY = 1_000_000
# A job whose disk was full is considered again after so long.
_SPACE_AGAIN_S = 5.0


class Decisions:
    """When a dispatcher decides what starts, and what its last decision was.

    Attributes:
        options: as they are now.
        due_at: earliest time (by ``clock.mono``) at which the decision can change, None if only an event can change it.
        waits: every job that the last decision let wait.
        waiting_for: a sentence on which job is next and why it waits, None when none does.
    """

    def __init__(self, options: DispatchOptions):
        self.options = options
        self.due_at: float | None = 0.0
        self.waits: Sequence[Wait] = ()
        self.waiting_for: str | None = None

    def soon(self, when: float) -> None:
        """The decision can change at this time (by ``clock.mono``)."""
        self.due_at = when if self.due_at is None else min(when, self.due_at)

    def _note(self, waits: Sequence[Wait], jobs: Mapping[int, QueuedJob]) -> None:
        self.waits, self.waiting_for = waits, None
        if waits:
            job = jobs[waits[0].job].job
            self.waiting_for = clean(f"{job.title or job.name} waits: {waits[0].reason}")


class Cycle(Decisions):
    """Decides what starts on this machine.

    Args:
        jobs: what was submitted, where the caller knows it.
        serve: jobs may come later.
        closed: returns a sentence on why nothing at all may start now, or None.
        lacks_space: returns a sentence when there is too little space where a job works and writes, else None.

    Attributes:
        following: the first of the jobs that wait, in order: those that could be next.

    Raises NoSuchGpu for an unknown GPU id, and JobCannotFit when none of the jobs could ever run here.
    """

    def __init__(
        self,
        queue: Queue,
        supervisor: Supervisor,
        desk: GpuManager,
        health: GpuHealth,
        reporter: Reporter,
        options: DispatchOptions,
        jobs: Sequence[Job],
        *,
        serve: bool,
        closed: Callable[[], str | None],
        lacks_space: Callable[[Job], str | None],
        settings: Settings = NO_SETTINGS,
    ):
        self._queue = queue
        self._supervisor = supervisor
        self._desk = desk
        self._health = health
        self._reporter = reporter
        self._serve = serve
        self._closed = closed
        self._lacks_space = lacks_space
        super().__init__(options)
        self._at_start = options
        self._user = user_name(os.geteuid())
        self._most_ever = most_ever(settings, self._user)
        self._kept_from_us = self._kept_at_start = frozenset(settings.policy.exclude_gpus)
        self.following: tuple[QueuedJob, ...] = ()
        self._changes_at: float | None = None
        self._waits_since: float | None = None
        self._has_reported_wait = False
        self._lookahead = Lookahead()
        self._cores, self._host_mb = host.cores(), host.memory_mb()
        self._sizes, self._jobs = {job.gpus for job in jobs}, len(jobs)
        if any(self._sizes) or options.gpu_ids:
            # GPUs that are named are looked up at once, also when the jobs are not known yet.
            desk.open()
        if jobs and not desk.awaits_driver:
            refuse_if_none_fits(jobs, desk.gpus, self.limits())

    def look_at_queue(self) -> None:
        """Reads from the queue what the jobs need, unless the caller has named the jobs."""
        if not self._jobs:
            kinds = self._queue.kinds()
            self._sizes = {gpus for gpus, _ in kinds} | ({1} if self._serve else set())
            self._jobs = _MANY
        if self._desk.awaits_driver:
            self._reporter.notice(
                f"no GPUs yet: {self._desk.problem}; jobs that need a GPU wait until the driver answers"
                f" (with {self._desk.hiding_variable}= they run on the CPU)"
            )
        elif self._desk.problem is not None:
            slots = self.limits().cpu_slots
            self._reporter.notice(f"no GPUs: {self._desk.problem}; jobs run on the CPU, {slots} at once")

    def retune(self, options: DispatchOptions, settings: Settings) -> None:
        """Sets options and settings from now on."""
        self.options = options
        self._most_ever = most_ever(settings, self._user)
        self._kept_from_us = frozenset(settings.policy.exclude_gpus)

    def start_what_can(self, starter: Launcher, started: Callable[[Attempt], None]) -> None:
        """Starts all jobs that can start now. Repeats when a lease, or the check of the GPUs under it, has changed the
        inputs."""
        self.due_at = None
        while self._decide_and_start(starter, started):
            pass
        self._wait_for_later()

    def at_once(self) -> int:
        """How many jobs can run side by side now, without the GPUs that are left out."""
        left_out = self._health.returns(clock.wall())
        usable = [gpu for gpu in self._desk.gpus if gpu.uuid not in left_out]
        if left_out and not usable and 0 not in self._sizes:
            return 0
        return most_at_once(self._sizes, self._jobs, usable, self.limits())

    def back_in_s(self) -> tuple[float, ...]:
        """Seconds until each of the GPUs that are left out comes back."""
        wall = clock.wall()
        return tuple(until - wall for until in self._health.returns(wall).values())

    def limits(self) -> Limits:
        """The limits on what runs at once, now."""
        gpus = self._desk.gpus if self._desk.is_open else None
        most, why = self._gpus_now()
        bounds = limits(self.options, gpus, self._cores, self._most_ever, self._host_mb)
        return replace(
            bounds,
            # Jobs on GPUs wait for a late driver, and for GPUs that were taken away from the run; none runs on the CPU
            # instead.
            cpu_only=bounds.cpu_only and not (self._is_narrowed or self._desk.awaits_driver),
            running=len(self._supervisor.running),
            closed=self._closed(),
            gpus_now=most,
            gpus_now_why=why,
            now=clock.mono(),
        )

    def _gpus_now(self) -> tuple[int | None, str | None]:
        """The settings' limit on GPUs, and what jobs on GPUs that were taken away from the run still use."""
        allowed, elsewhere = self._desk.allowance(), self._desk.count_elsewhere()
        self._changes_at = allowed.changes_at
        most, why = allowed.max_gpus, allowed.sentence
        limits = [limit for limit in (self.options.max_gpus, most) if limit is not None]
        if elsewhere and limits:
            most = max(0, min(limits) - elsewhere)
            why = f"{elsewhere} more are still in use by jobs on GPUs that were taken away"
        return most, why

    def _at_once(self, bounds: Limits) -> int:
        return most_at_once(self._sizes, self._jobs, self._desk.gpus, bounds)

    # --- one decision -----------------------------------------------------------------------------------------

    def _decide_and_start(self, starter: Launcher, started: Callable[[Attempt], None]) -> bool:
        """Makes one decision and carries it out; whether to decide again: more jobs may start, or other jobs."""
        wall, now = clock.wall(), clock.mono()
        views = self._desk.views(now, wall)
        bounds = self.limits()
        gpus = sum(view.is_free for view in views)
        slots = max(0, bounds.cpu_slots - self._supervisor.on_cpu)
        limit = self._lookahead.foremost(gpus + slots)
        head = {queued.id: queued for queued in self._queue.head(limit, wall, self.options.order)}
        on_gpus = sum(queued.gpus > 0 for queued in head.values())
        on_cpu = len(head) - on_gpus
        if self._lookahead.by_kind:
            first = self._queue.first_of_kinds(gpus, wall, self.options.order)
            head |= {queued.id: queued for queued in first}
        if not self._desk.is_open and any(queued.gpus for queued in head.values()):
            self._desk.open()
            self.look_at_queue()
            return True
        if bounds.closed is None and self._postpone_for_space(tuple(head.values()), wall):
            return True
        waiting = self._waiting(tuple(head.values()))
        decision = decide(waiting, views, bounds, self._desk.choose, cpu_running=self._supervisor.on_cpu)
        # An option changed during the run may be changed back, so that a temporary limit refuses no job for good.
        for_now = [wait for wait in decision.refused if self._may_be_had_later(head[wait.job])]
        refused = [wait for wait in decision.refused if wait not in for_now]
        waits = (*self._for_now(for_now), *decision.waits)
        for wait in refused:
            starter.give_up(head[wait.job], FailureClass.BAD_INPUT, wait.reason)
        running: tuple[Attempt, ...] = ()
        if decision.starts:
            starter.threads = max(1, self._cores // self._at_once(bounds))
            running = starter.start_all(decision.starts, head, {job.id: job.memory_mb for job in waiting})
            for attempt in running:
                started(attempt)
            self._desk.started(now)
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
            if (reason := self._lacks_space(queued.job)) is not None
            and self._queue.last_failure(queued.id) == FailureClass.DISK_FULL
        }
        if lacking:
            self._queue.postpone(lacking, wall + _SPACE_AGAIN_S)
        return bool(lacking)

    @property
    def _is_narrowed(self) -> bool:
        now, start = self.options, self._at_start
        fewer = now.max_gpus is not None and (start.max_gpus is None or now.max_gpus < start.max_gpus)
        fewer = fewer or now.gpu_ids != start.gpu_ids
        return fewer or not self._kept_from_us <= self._kept_at_start

    def _may_be_had_later(self, queued: QueuedJob) -> bool:
        return self._is_narrowed or (self._desk.awaits_driver and queued.gpus > 0)

    def _for_now(self, refused: Sequence[Wait]) -> Sequence[Wait]:
        problem = None if self._desk.gpus else self._desk.problem
        return refused if problem is None else [Wait(wait.job, problem) for wait in refused]

    def _waiting(self, head: Sequence[QueuedJob]) -> list[WaitingJob]:
        named = {queued.family for queued in head if queued.family and queued.memory_mb is not None}
        families = self._queue.families(named) if named else {}
        return [self._waiting_job(queued, families.get(queued.family or "")) for queued in head]

    def _waiting_job(self, queued: QueuedJob, family: FamilyMemory | None) -> WaitingJob:
        request, job = queued.request, queued.job
        share = request.share and self.options.share and request.memory_mb is not None
        memory_mb = request.memory_mb
        most_mb = self._desk.most_mb(request.gpus)
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
        )

    def _note_waits(self, waits: Sequence[Wait], head: dict[int, QueuedJob], bounds: Limits, now: float) -> None:
        self._note(waits, head)
        self.following = () if bounds.closed else tuple(head[wait.job] for wait in waits)
        wanted = not bounds.cpu_only and any(head[wait.job].gpus for wait in waits)
        self._desk.wanted(wanted, now)
        self._report_first_wait(wanted, now)

    def _report_first_wait(self, wanted: bool, now: float) -> None:
        """Reports once what a run waits for while none of its jobs runs: without a terminal no status line shows it."""
        if self._has_reported_wait or not wanted or self._supervisor.running or self._desk.awaits_driver:
            self._waits_since = None
            return
        self._waits_since = now if self._waits_since is None else self._waits_since
        if now < self._waits_since + _REPORT_WAIT_AFTER_S:
            self.soon(self._waits_since + _REPORT_WAIT_AFTER_S)
            return
        self._has_reported_wait = True
        self._reporter.notice(f"waiting for GPUs: {self.waiting_for}")

    def _wait_for_later(self) -> None:
        """Schedules the decision at the end of a back-off or of a GPU's time out."""
        wall = clock.wall()
        later = self._queue.next_not_before(wall)
        if later is not None:
            self.waiting_for = self.waiting_for or "a job that has failed waits a moment for its next try"
        back = self._next_count_down(wall) if self.waiting_for else None
        change = self._changes_at if self.waiting_for else None
        for at in (later, back, change):
            if at is not None:
                self.soon(clock.mono() + max(0.0, at - wall))
        if self.waiting_for is None and self._queue.held():
            self.waiting_for = "what still waits is paused"

    def _next_count_down(self, wall: float) -> float | None:
        """When the next GPU comes back, or sooner: the reason why a job waits contains a countdown."""
        back = self._health.next_return(wall)
        return None if back is None else min(back, wall + _COUNT_DOWN_S)
