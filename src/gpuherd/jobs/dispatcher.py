"""The dispatcher: an event loop that runs a queue's jobs on this machine.

It waits for events, never in fixed steps: a job's end comes through its pidfd, Ctrl-C through a socket, and timers are
the next deadline of those who have one (checks of the GPUs while a job waits for one, time limits, back-offs,
leftovers, the display). At each event it asks ``policy.decide`` what to start and does it. All progress is in the queue
before it counts: the dispatcher may be killed at any instant, and the next one goes on from the queue's file.

The order of a start: leases, one more look at the GPUs under the leases, a shell that waits, the record in the queue,
the go-ahead. The order of an end: exit status, record in the queue, then the attempt's files go.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from gpuherd.engines.local import CannotStart, Exit
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import clock
from gpuherd.jobs.capacity import limits, most_at_once, refuse_if_none_fits
from gpuherd.jobs.events import EventKind
from gpuherd.jobs.failures import FailureClass, clean
from gpuherd.jobs.job import Job
from gpuherd.jobs.leftovers import Leftovers
from gpuherd.jobs.logtail import tail
from gpuherd.jobs.options import GpuOptions
from gpuherd.jobs.outcome import Failure, Outcome
from gpuherd.jobs.policy import GpuView, Start, Wait, WaitingJob, decide
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.records import AttemptEnd, AttemptRecord, QueuedJob
from gpuherd.jobs.reporter import Reporter
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.settle import Blameless, Facts, settle
from gpuherd.jobs.stopping import Ask, StopSignals
from gpuherd.jobs.supervisor import GRACE_S, Attempt, LostAttempt, Supervisor

if TYPE_CHECKING:
    from gpuherd.gpus.lease import Lease
    from gpuherd.jobs.gpuwatch import GpuWatch

# How many more jobs than there are free places one decision looks at: those to go past a job that can't start yet.
_BEYOND = 8
# After a start failed for want of processes, files or memory, which may pass.
_START_AGAIN_S = 1.0


class Dispatcher:
    """Works a queue off. One use: ``run`` once.

    Args:
        queue: open, and locked against other dispatchers by the caller (``DispatcherLock``).
        run: where attempts' folders and logs go.
        options: which GPUs, how many, and when one is free.
        reporter: who is told.
        jobs: what was submitted, to see before the start that it can run here at all.
        grace_s: seconds between SIGTERM and SIGKILL.

    Raises NoSuchGpu for an unknown GPU id, and JobCannotFit when none of the jobs could ever run here.
    """

    def __init__(
        self,
        queue: Queue,
        run: RunDirectory,
        options: GpuOptions,
        reporter: Reporter,
        jobs: Sequence[Job],
        *,
        grace_s: float = GRACE_S,
    ):
        self._queue = queue
        self._options = options
        self._tell = reporter
        self._supervisor = Supervisor(run, queue.tag, grace_s)
        self._run = run
        self._watch = self._open_watch() if any(job.gpus for job in jobs) else None
        gpus = None if self._watch is None else self._watch.gpus
        self._began_at = clock.wall()
        cores = len(os.sched_getaffinity(0))
        self._limits = limits(options, gpus, cores)
        refuse_if_none_fits(jobs, gpus or (), self._limits)
        self._at_once = most_at_once(jobs, gpus or (), self._limits)
        self._threads = max(1, cores // self._at_once)
        self._leftovers = Leftovers(queue.tag)
        self._selector = selectors.DefaultSelector()
        self._run_id = queue.begin_run(self._began_at, clock.mono())
        self._next_attempt = queue.last_attempt() + 1
        self._asked = Ask.GO_ON
        self._waits_for_gpu = False
        self._waiting_for: str | None = None
        self._check_at = 0.0
        self._haste_at: float | None = None
        self._decide_at: float | None = 0.0
        self._show_at = 0.0

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Runs until nothing is left to run or a signal ends it, and until no process of the run is left."""
        if self._watch is not None and self._watch.problem is not None:
            self._tell.notice(f"no GPUs: {self._watch.problem}; jobs run on the CPU, {self._limits.cpu_slots} at once")
        with StopSignals() as signals, self._selector:
            self._selector.register(signals, selectors.EVENT_READ)
            self._adopt()
            self._leftovers.expect(clock.mono() - 1)
            while True:
                self._obey(signals)
                self._keep_time()
                self._start_what_can()
                if self._is_over():
                    break
                for key, _ in self._selector.select(self._time_to_next()):
                    if key.fileobj is signals:
                        signals.drain_wakeups()
                    else:
                        self._ended(key.fd)
            outcome = self._outcome(signals)
        self._queue.end_run(self._run_id, clock.wall())
        return outcome

    def _is_over(self) -> bool:
        if self._supervisor.running:
            return False
        now = clock.wall()
        if self._asked is Ask.GO_ON and (self._queue.head(1, now) or self._queue.next_not_before(now) is not None):
            return False
        self._leftovers.hurry(clock.mono())
        return self._leftovers.due_at is None

    def _keep_time(self) -> None:
        now = clock.mono()
        self._supervisor.keep_time(now)
        if self._leftovers.due_at is not None and now >= self._leftovers.due_at:
            self._leftovers.sweep({attempt.record.id for attempt in self._supervisor.running.values()}, now)
        if self._watch is not None and self._waits_for_gpu and self._asked is Ask.GO_ON:
            self._check_gpus(self._watch, now)
        every = self._tell.every_s
        if every is not None and now >= self._show_at:
            self._show_at = now + every
            self._tell.show(tuple(self._supervisor.running.values()), self._waiting_for, self._at_once)

    def _check_gpus(self, watch: GpuWatch, now: float) -> None:
        ours = self._supervisor.gpus
        if now >= self._check_at:
            if watch.look(now, ours):
                self._decide_at = now
            self._check_at = now + watch.look_in_s(now)
        if self._haste_at is not None and now >= self._haste_at:
            watch.hasty_look(ours, now)
            wait = watch.haste_s
            self._haste_at = None if wait is None else now + wait
            self._decide_at = now

    def _time_to_next(self) -> float | None:
        times = [self._supervisor.next_deadline(), self._leftovers.due_at]
        if self._asked is Ask.GO_ON:
            # Else nothing is decided any more, and a decision that is due would keep the loop spinning.
            times.append(self._decide_at)
            if self._waits_for_gpu:
                times += [self._check_at, self._haste_at]
        if self._tell.every_s is not None:
            times.append(self._show_at)
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - clock.mono()) if known else None

    # --- starting ---------------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        """Starts all that can start now. Goes round again when a lease or a look under it has changed the picture."""
        if self._decide_at is None or clock.mono() < self._decide_at or self._asked is not Ask.GO_ON:
            return
        self._decide_at = None
        changed = True
        while changed:
            now = clock.wall()
            views = self._views()
            places = sum(view.busy is None for view in views) + max(0, self._limits.cpu_slots)
            head = {queued.id: queued for queued in self._queue.head(_BEYOND + places, now)}
            decision = decide(
                [_waiting(queued) for queued in head.values()],
                views,
                self._limits,
                self._choose,
                cpu_running=self._supervisor.on_cpu,
            )
            self._refuse(decision.refused, head)
            changed = self._start_all(decision.starts, head) or bool(decision.refused)
            self._note_waits(decision.waits, head)
        later = self._queue.next_not_before(clock.wall())
        if later is not None:
            self._decide_soon(clock.mono() + max(0.0, later - clock.wall()))
            self._waiting_for = self._waiting_for or "for its next try, a moment after it failed"

    def _start_all(self, starts: Sequence[Start], head: dict[int, QueuedJob]) -> bool:
        """Carries starts out. Returns whether to decide again: more may start, or something else instead."""
        with ExitStack() as held:
            # The job's processes hold the leases in the end. Our copies must go, or a lock would outlive its job.
            leased = [(start, self._lease(start, head[start.job], held)) for start in starts]
            leased_mono = clock.mono()
            uuids = {gpu.uuid for start, leases in leased if leases is not None for gpu in start.gpus}
            free = self._watch.still_free(uuids, leased_mono) if self._watch is not None and uuids else set()
            for start, leases in leased:
                if leases is not None and all(gpu.uuid in free for gpu in start.gpus):
                    self._start(head[start.job], start.gpus, leases, leased_mono)
        return bool(starts) and self._decide_at is None

    def _lease(self, start: Start, queued: QueuedJob, held: ExitStack) -> tuple[Lease, ...] | None:
        if self._watch is None or not start.gpus:
            return ()
        leases = self._watch.take(start.gpus, clean(queued.job.title or queued.job.name), clock.mono())
        for lease in leases or ():
            held.enter_context(lease)
        return leases

    def _start(self, queued: QueuedJob, gpus: tuple[Gpu, ...], leases: Sequence[Lease], leased_mono: float) -> None:
        at, mono = clock.wall(), clock.mono()
        try:
            attempt = self._supervisor.prepare(
                self._next_attempt, queued, gpus, [lease.fd for lease in leases], self._threads, at=at, mono=mono
            )
        except (CannotStart, OSError) as problem:
            self._cannot_start(queued, problem)
            return
        self._next_attempt += 1
        try:
            wait_s = max(0.0, at - max(queued.ready_at, self._began_at))
            self._queue.record_start(
                attempt.record, self._run_id, wait_s=wait_s, leased_mono=leased_mono if gpus else None
            )
        except BaseException:
            attempt.process.release()
            raise
        self._selector.register(attempt.process.pidfd, selectors.EVENT_READ)
        self._supervisor.let_go(attempt)
        self._tell.about(EventKind.STARTED, attempt.record, "started" + _place(attempt.record.labels))

    def _cannot_start(self, queued: QueuedJob, problem: CannotStart | OSError) -> None:
        if isinstance(problem, CannotStart) and not problem.may_pass:
            self._give_up(queued, FailureClass.NEVER_STARTED, str(problem))
            return
        self._tell.notice(f"can't start a job now, trying again in {_START_AGAIN_S:g} s: {problem}")
        self._decide_soon(clock.mono() + _START_AGAIN_S)

    def _refuse(self, refused: Sequence[Wait], head: dict[int, QueuedJob]) -> None:
        for wait in refused:
            self._give_up(head[wait.job], FailureClass.BAD_INPUT, wait.reason)

    def _give_up(self, queued: QueuedJob, failure: FailureClass, reason: str) -> None:
        """A job fails without an attempt."""
        job = queued.job
        cancelled = self._queue.fail_waiting(queued.id, reason)
        self._tell.given_up(Failure(job.name, job.title or job.name, failure, clean(reason), queued.attempts, None))
        self._tell.cancelled(cancelled, job.name)

    def _note_waits(self, waits: Sequence[Wait], head: dict[int, QueuedJob]) -> None:
        self._waiting_for = clean(waits[0].reason) if waits else None
        was = self._waits_for_gpu
        self._waits_for_gpu = not self._limits.cpu_only and any(head[wait.job].job.gpus for wait in waits)
        if self._waits_for_gpu and not was and self._watch is not None:
            now = clock.mono()
            self._check_at = max(self._check_at, now)
            self._haste_at = None if self._watch.haste_s is None else now + self._watch.haste_s
        elif was and not self._waits_for_gpu and self._watch is not None:
            self._watch.rest()

    # --- ending -----------------------------------------------------------------------------------------------

    def _ended(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        attempt, end = self._supervisor.collect(pidfd)
        at, mono = clock.wall(), clock.mono()
        blameless = Blameless.STOPPED if attempt.stopped else None
        if attempt.adopted and not end.started:
            blameless = Blameless.NEVER_WENT
        self._settle(attempt.record, end, blameless, at, mono, timed_out=attempt.timed_out)
        self._leftovers.expect(mono)
        if self._watch is not None and attempt.record.gpus:
            self._watch.released(attempt.record.gpus, mono)
            self._haste_at = mono
        self._decide_soon(mono)

    def _settle(
        self,
        attempt: AttemptRecord,
        end: Exit,
        blameless: Blameless | None,
        at: float,
        mono: float | None,
        *,
        timed_out: bool = False,
    ) -> None:
        """Records an end and what becomes of the job, and tells of it."""
        job = attempt.queued.job
        log_tail = "" if end.code == 0 else tail(Path(attempt.log))
        has_result = job.result is None or Path(job.result).exists()
        facts = Facts(
            exit=end,
            blameless=blameless,
            timed_out=timed_out,
            has_result=has_result,
            log_tail=log_tail,
            gpus=attempt.gpus,
        )
        settlement = settle(attempt.queued, facts, at)
        record = AttemptEnd(
            attempt=attempt.id,
            state=settlement.attempt,
            job_state=settlement.job,
            ended_at=at,
            ended_mono=mono,
            exit_code=end.code,
            signal=end.signal,
            failure_class=None if settlement.diagnosis is None else settlement.diagnosis.failure.value,
            reason=settlement.reason,
            not_before=settlement.not_before,
            avoid=settlement.avoid,
        )
        if settlement.diagnosis is not None:
            self._tell.write_failure(attempt, record, settlement.diagnosis, log_tail)
        cancelled = self._queue.record_end(record)
        self._run.remove_attempt_files(attempt.id)
        self._tell.ended(attempt, settlement, 0.0 if mono is None else mono - attempt.started_mono)
        self._tell.cancelled(cancelled, job.name)

    # --- coming and going -------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Takes over what an earlier dispatcher left running, and settles what has ended since."""
        for record in self._queue.running():
            found = self._supervisor.take_over(record, copied=self._queue.copied)
            if isinstance(found, Attempt):
                self._selector.register(found.process.pidfd, selectors.EVENT_READ)
                self._tell.about(EventKind.ADOPTED, record, "left running by an earlier gpuherd; taken over")
            else:
                self._settle_lost(found)
        self._run.remove_stray_attempt_files({attempt.record.id for attempt in self._supervisor.running.values()})

    def _settle_lost(self, lost: LostAttempt) -> None:
        at = clock.wall()
        mono = None if lost.blameless in (Blameless.REBOOT, Blameless.COPIED) else clock.mono()
        if lost.ended_at is not None and mono is not None:
            # By the status file's time, so that hours without a dispatcher don't count as the job's.
            mono = max(lost.record.started_mono, mono - max(0.0, at - lost.ended_at))
        self._settle(lost.record, lost.exit, lost.blameless, at, mono)

    def _obey(self, signals: StopSignals) -> None:
        """Does what a signal asked for since the last time."""
        if signals.asked == self._asked:
            return
        self._asked = signals.asked
        running = len(self._supervisor.running)
        if self._asked is Ask.DRAIN:
            self._tell.notice(
                f"Ctrl-C: nothing new is started; {running} running jobs go on to their end "
                "(Ctrl-C again stops them and puts them back in the queue)"
            )
        else:
            self._tell.notice(f"stopping {running} running jobs and putting them back in the queue")
            self._supervisor.stop_all(clock.mono(), 0.0 if self._asked is Ask.STOP_NOW else None)

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

    # --- what there is ----------------------------------------------------------------------------------------

    def _open_watch(self) -> GpuWatch:
        # Only now: a run of CPU jobs needs no driver.
        from gpuherd.jobs.gpuwatch import GpuWatch

        return GpuWatch(self._options, self._queue.tag)

    def _views(self) -> tuple[GpuView, ...]:
        return () if self._watch is None else self._watch.views(clock.mono(), self._supervisor.gpus)

    def _choose(self, candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
        return None if self._watch is None else self._watch.choose(candidates, count, memory_mb)

    def _decide_soon(self, when: float) -> None:
        self._decide_at = when if self._decide_at is None else min(when, self._decide_at)


def _waiting(queued: QueuedJob) -> WaitingJob:
    return WaitingJob(queued.id, queued.job.gpus, queued.job.memory_mb, queued.job.priority, queued.avoid)


def _place(labels: Sequence[str]) -> str:
    return f" on GPU {', '.join(labels)}" if labels else " on the CPU"
