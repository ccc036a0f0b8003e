"""A run by our own policy, in virtual time, over GPUs with attempts and external users.

The decisions are those of a real run, by the same code: ``policy.decide_with`` decides what starts where,
``complete.next_try`` what becomes of a failed job, ``jobs.gpu.health`` which GPUs are left out, ``gpus.idle`` when a
GPU counts as free. This module adds what a dispatcher's loop and its surroundings do: attempts start and end, external
users come and go, GPUs become free. The same input gives the same history. The machines of a cluster share one queue; a
job gets GPUs of one machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

from gpuherd.gpus.choose import choose
from gpuherd.gpus.idle import CHECKS_ALONE, MAX_CHECKS, IdleRule
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import settings
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.completion import Observed
from gpuherd.jobs.gpu import health
from gpuherd.jobs.scheduler.limits import allowance
from gpuherd.jobs.scheduler.ordering import BEYOND, SEARCHED, Lookahead
from gpuherd.jobs.scheduler.policy import decide_with
from gpuherd.jobs.scheduler.types import Decision, Limits, Start, WaitingJob
from gpuherd.simulate.devices import RunningAttempt, SimulatedGpu, SimulatedGpus
from gpuherd.simulate.external import ExternalUse
from gpuherd.simulate.options import STUCK_AFTER_S, Rules
from gpuherd.simulate.results import Ending, Visit
from gpuherd.simulate.state import EventQueue, JobQueue, VirtualRun
from gpuherd.simulate.workload import MONDAY, ExternalUsers, Machine, Work, diagnosis

# The limit on GPUs where there is none.
_NO_LIMIT = 1_000_000


def idle_rule(rules: Rules, background: ExternalUsers | None) -> IdleRule:
    """When a GPU counts as free: with external users after more checks, unless the rules say otherwise."""
    checks = rules.max_checks or (MAX_CHECKS if background is not None else CHECKS_ALONE)
    return IdleRule(max_checks=checks, check_interval_s=rules.check_interval)


class Simulation(VirtualRun):
    """One run by our own policy.

    Args:
        machines: the GPUs of each machine.
        works: the jobs in the order of their arrival: the earlier is the older.
        rules: the rules of the run; ``policy`` is not read.
        background: external users, None for none.
        seed: of the external users.
        starts_at: local time of second 0, for quiet hours.
        gpus: those of a machine that several users share. External users come by the caller's ``ExternalUse`` then.

    Raises ValueError for works that are not in order.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        works: Sequence[Work],
        rules: Rules,
        background: ExternalUsers | None = None,
        seed: int = 0,
        starts_at: datetime = MONDAY,
        gpus: SimulatedGpus | None = None,
    ):
        if any(one.arrives_s > after.arrives_s for one, after in pairwise(works)):
            raise ValueError("works must be in the order of their arrival")
        self._limits = Limits(
            rules.max_gpus or _NO_LIMIT,
            rules.cpu_jobs,
            max_concurrent=rules.max_concurrent,
            longest_first=rules.order == "longest",
        )
        self._idle_rule = idle_rule(rules, background)
        events = EventQueue() if gpus is None else gpus.events
        queue = JobQueue(works, self._limits, share=rules.share, timeout_s=rules.timeout)
        super().__init__(machines, works, queue, events)
        self._rules = rules
        self.gpus = gpus or SimulatedGpus(machines, self._idle_rule, events)
        self.gives_way = rules.yield_to_others != "ignore"
        self._timed = rules.timeout is not None or any(work.job.timeout_s is not None for work in works)
        self._settings = rules.settings()
        self._starts_at = starts_at
        self._health: dict[str, health.Health] = {}
        self._uuids = tuple(each.gpu.uuid for each in self.gpus.all)
        self._largest_mb = max(each.gpu.total_mb for each in self.gpus.all)
        self._running = self._on_cpu = 0
        self._idle_since = 0.0
        # GPUs are polled while a job waits for one: since when, and until when if none waits now.
        self._polling_since: float | None = None
        self._polled_until: float | None = None
        self._lookahead = Lookahead()
        # Nothing but GPUs can hold up a start: then a decision is worth while only after a change of GPUs or jobs.
        self._only_gpus = background is None and not self._timed and not self._settings.hours.quiet
        self._only_gpus = self._only_gpus and rules.max_gpus is None and rules.max_concurrent is None
        self._decided_on: tuple[int, int, int] | None = None
        self._external: ExternalUse | None = None
        if background is not None and gpus is None:
            self._external = ExternalUse(background, seed, events, (self,))

    def _submit(self) -> None:
        super()._submit()
        if self._settings.hours.quiet:
            self._events.at(0.0, self._hours_change)

    def _is_stuck(self) -> bool:
        return not self._running and self._jobs.waiting > 0 and self._now - self._idle_since > STUCK_AFTER_S

    # --- external users ----------------------------------------------------------------------------------------

    def _visits(self) -> tuple[Visit, ...]:
        return () if self._external is None else self._external.visits()

    def give_way(self, gpu: SimulatedGpu) -> None:
        """Pauses or requeues our attempts on a GPU on which an external user was noticed."""
        if gpu.external_since is None:
            return
        for attempt in tuple(gpu.attempts):
            if self._rules.yield_to_others == "pause":
                attempt.pause(self._now)
                for each in attempt.gpus:
                    self.gpus.update(each)
            else:
                self._finish(attempt, Ending.GAVE_WAY)
                self._jobs.requeue(attempt.queued, self._now)

    def resume_on(self, gpu: SimulatedGpu) -> None:
        """An external user has left the GPU: attempts that were paused go on when it has been quiet."""
        for attempt in gpu.attempts:
            if attempt.ends_at is None:
                self._events.at(self._now + self._idle_rule.quiet_s, self._resume, attempt)

    def _resume(self, attempt: RunningAttempt) -> None:
        """Resumes a paused attempt if none of its GPUs has an external user."""
        if attempt.ends_at is not None or any(gpu.external_since is not None for gpu in attempt.gpus):
            return
        self._events.at(attempt.resume(self._now), self._end, attempt, attempt.ends_at)
        for gpu in attempt.gpus:
            self.gpus.update(gpu)

    # --- what starts now ---------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        """Starts all jobs that can start now, as a dispatcher does after each event."""
        jobs = self._jobs
        if not jobs.waiting:
            self._stop_polling()
            return
        if len(jobs.on_gpus):
            self._poll()
            self._keep_for_others()
        while self._can_start_any() and not self._nothing_is_new():
            decision = decide_with(
                self.gpus.pool,
                self._head() + jobs.on_cpu.head(self._limits.cpu_slots - self._on_cpu),
                self._limits_now(),
                _choose,
                cpu_running=self._on_cpu,
                explain=False,
            )
            self._decisions += 1
            for refused in decision.refused:
                self._refuse(self._jobs.start(refused.job), refused.reason)
            for start in decision.starts:
                self._start(start)
            searches = self._looks_further(decision)
            if not (decision.refused or searches) and (not decision.starts or self._has_seen_all()):
                self._decided_on = self._changes()
                break
        if not len(jobs.on_gpus):
            self._stop_polling()

    def _keep_for_others(self) -> None:
        """Marks the free GPUs that are meant for other users; there are none here."""

    def _nothing_is_new(self) -> bool:
        """Whether a decision could only repeat the last one: since then no GPU became free and no job was added. The
        end of a job alone frees no GPU: it is polled first."""
        return self._only_gpus and not self.gpus.pool.open_count and self._decided_on == self._changes()

    def _changes(self) -> tuple[int, int, int]:
        return (self.gpus.changes, self._jobs.additions, self._on_cpu)

    def _can_start_any(self) -> bool:
        """Whether any job could start at all."""
        pool, jobs = self.gpus.pool, self._jobs
        if len(jobs.on_gpus) and (pool.free or pool.open_count):
            return True
        return len(jobs.on_cpu) > 0 and self._limits.cpu_slots > self._on_cpu

    def _head(self) -> list[WaitingJob]:
        """The waiting jobs on GPUs that a decision looks at.

        On one machine those that a dispatcher looks at. In a cluster the first of each kind, as many as could start:
        behind the jobs that wait for a whole machine there is always one that fits.
        """
        pool, waiting = self.gpus.pool, self._jobs.on_gpus
        if len(self._machines) == 1:
            foremost = waiting.head(self._lookahead.foremost(pool.free))
            if not self._lookahead.by_kind:
                return foremost
            both = {job.id: job for job in (*foremost, *waiting.first_of_kinds(pool.free, 1, sharing=BEYOND))}
            return list(both.values())
        beyond = SEARCHED if self._lookahead.backfills else 0
        return waiting.first_of_kinds(pool.free, beyond + (BEYOND if pool.open_count else self._limits.reservations))

    def _looks_further(self, decision: Decision) -> bool:
        """Whether another decision should see more of the queue than this one did."""
        unseen = len(self._machines) == 1 and len(self._jobs.on_gpus) > self._lookahead.foremost(0)
        before, self._lookahead = self._lookahead, self._lookahead.after(decision, unseen=unseen)
        return self._lookahead.is_beyond(before)

    def _has_seen_all(self) -> bool:
        """Whether no job that was not looked at could start: true where no GPU is shared and enough of each kind were
        seen."""
        cpu_free = self._limits.cpu_slots - self._on_cpu
        return len(self._machines) > 1 and not self.gpus.pool.open_count and not (cpu_free and self._jobs.on_cpu)

    def _limits_now(self) -> Limits:
        """The limits at this second. An event comes when quiet hours next change them."""
        if self._limits.max_concurrent is None and not self._settings.hours.quiet and not self._timed:
            return self._limits
        allowed = allowance(self._settings, "", self._starts_at + timedelta(seconds=self._now))
        return replace(
            self._limits,
            running=self._running,
            gpus_now=allowed.max_gpus,
            gpus_now_why=allowed.sentence,
            now=self._now,
        )

    def _hours_change(self) -> None:
        """Quiet hours have begun or ended: plans the next change."""
        local = self._starts_at + timedelta(seconds=self._now)
        change = settings.next_change(self._settings.hours.quiet, local)
        if change is not None:
            self._events.at((change - self._starts_at).total_seconds(), self._hours_change)

    def _poll(self) -> None:
        """Polls the GPUs, since a job waits for one."""
        since, until = self._polling_since, self._polled_until
        if since is None or (until is not None and self._now - until > self._idle_rule.hole_s):
            since = self._now
            self._events.wake_at(since + self._idle_rule.quiet_s)
        self._polling_since, self._polled_until = since, None
        self.gpus.poll(self._now, since)

    def _stop_polling(self) -> None:
        if self._polling_since is not None and self._polled_until is None:
            self._polled_until = self._now

    # --- attempts ----------------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        queued = self._jobs.start(start.job)
        trial = self._jobs.trial(queued)
        gpus = tuple(self.gpus.get(gpu.uuid) for gpu in start.gpus)
        limit_s = self._jobs.limit_s(queued)
        attempt = RunningAttempt(queued, gpus, self._now, trial.seconds, trial.failure, start.shared, limit_s)
        ends_at = attempt.resume(self._now)
        for gpu in gpus:
            self.gpus.add_attempt(gpu, attempt)
        self._running += 1
        self._on_cpu += not gpus
        self._events.at(ends_at, self._end, attempt, ends_at)

    def _end(self, attempt: RunningAttempt, expected: float) -> None:
        # An attempt that was paused or requeued meanwhile does not end now.
        if attempt.ends_at != expected or attempt.over:
            return
        if attempt.failure is not None:
            self._fail(attempt, attempt.failure)
            return
        self._finish(attempt, Ending.DONE)
        uuids, job = [each.gpu.uuid for each in attempt.gpus], attempt.queued.job
        self._update_health(
            health.after_success(self._health, uuids, job.name, job.family, started_at=attempt.started, now=self._now)
        )
        self._jobs.succeed(attempt.queued.id, self._now)

    def _fail(self, attempt: RunningAttempt, failure: FailureClass) -> None:
        job = attempt.queued.job
        uuids = tuple(each.gpu.uuid for each in attempt.gpus)
        total_mb = min((each.gpu.total_mb for each in attempt.gpus), default=None)
        larger = total_mb is not None and total_mb < self._largest_mb
        on_trial = any(self._health[uuid].is_on_trial(self._now) for uuid in uuids if uuid in self._health)
        seen = Observed(gpus=uuids, gpu_total_mb=total_mb, larger_exists=larger, on_trial=on_trial)
        self._finish(attempt, Ending.FAILED, failure)
        self._update_health(
            health.after_failure(
                self._health,
                uuids,
                job.name,
                job.family,
                failure,
                diagnosis(failure).reason,
                now=self._now,
                machine=self._uuids,
                in_use=lambda uuid: bool(self.gpus.get(uuid).attempts),
            )
        )
        again = self._jobs.fail(attempt.queued, failure, seen, self._now)
        if again is not None:
            self._events.at(again.ready_at, self._jobs.put_back, again)

    def _update_health(self, changed: Mapping[str, health.Health]) -> None:
        """Excludes GPUs that are left out now, and readmits others."""
        self._health.update(changed)
        for uuid, state in changed.items():
            self._update_excluded(uuid)
            if state.is_out(self._now) and state.until is not None:
                self._events.at(state.until, self._update_excluded, uuid)

    def _update_excluded(self, uuid: str) -> None:
        self.gpus.set_excluded(uuid, self._health[uuid].is_out(self._now))

    def _finish(self, attempt: RunningAttempt, ending: Ending, failure: FailureClass | None = None) -> None:
        attempt.over = True
        for gpu in attempt.gpus:
            self.gpus.remove_attempt(gpu, attempt)
        self._running -= 1
        self._on_cpu -= not attempt.gpus
        self._idle_since = self._now
        numbers = tuple(gpu.number for gpu in attempt.gpus)
        self._record(attempt.queued, numbers, attempt.started, ending, failure, shared=attempt.shared)


def _choose(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, count, memory_mb=memory_mb)
