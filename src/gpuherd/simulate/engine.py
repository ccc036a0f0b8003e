"""A run by our own policy, in virtual time, over GPUs with attempts and external users.

The decisions are those of a real run, by the same code: ``policy.decide_with`` decides what starts where,
``complete.next_try`` what becomes of a failed job, ``jobs.gpu.health`` which GPUs are left out, ``gpus.idle`` when a
GPU counts as free. This module adds what a dispatcher's loop and its surroundings do: attempts start and end, external
users come and go, GPUs become free. The same input gives the same history. The machines of a cluster share one queue; a
job gets GPUs of one machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise

from gpuherd.gpus.choose import choose
from gpuherd.gpus.idle import CHECKS_ALONE, MAX_CHECKS, IdleRule
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import settings
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.completion import Observed
from gpuherd.jobs.gpu import health
from gpuherd.jobs.gpu.usage import PRESENCE_S
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.scheduler.limits import allowance
from gpuherd.jobs.scheduler.memory import Tenant, shareable_mb
from gpuherd.jobs.scheduler.ordering import BEYOND, SEARCHED, Lookahead
from gpuherd.jobs.scheduler.policy import decide_with
from gpuherd.jobs.scheduler.pool import Pool
from gpuherd.jobs.scheduler.types import Decision, GpuView, Limits, Start, WaitingJob
from gpuherd.simulate.options import STUCK_AFTER_S, TURNAROUND_S, Rules
from gpuherd.simulate.results import Ending, Visit
from gpuherd.simulate.state import EventQueue, JobQueue, VirtualRun
from gpuherd.simulate.workload import MONDAY, ExternalUsers, Machine, Session, Work, diagnosis

# Why a GPU is not free.
_EXTERNAL = "an external user is on it"
_SETTLING = "not yet free for long enough"
_OURS = "our own job runs on it"
_EXCLUDED = "left out for a while, because jobs failed on it"
# The limit on GPUs where there is none.
_NO_LIMIT = 1_000_000


@dataclass(slots=True, eq=False)
class SimulatedGpu:
    """A GPU and its users.

    Attributes:
        number: its number over all machines.
        machine: name of its machine, "" where there is only one.
        attempts: our attempts on it now; more than one where they share it.
        external_since: second since which an external user is on it; None without one.
        clean_since: second since which it has had no user.
        ours_left: its last user was a job of ours.
        excluded: no job is started on it for now.
    """

    number: int
    gpu: Gpu
    machine: str
    attempts: list[RunningAttempt] = field(default_factory=list)
    external_since: float | None = None
    clean_since: float = 0.0
    ours_left: bool = False
    excluded: bool = False

    @property
    def clean(self) -> bool:
        """Whether it has no user."""
        return not self.attempts and self.external_since is None

    @property
    def shareable_mb(self) -> int | None:
        """MB that may still be promised on it where only sharing jobs of ours run; None when no job may be added."""
        blocked = not self.attempts or self.external_since is not None or self.excluded
        if blocked or not all(attempt.shared for attempt in self.attempts):
            return None
        queued = [attempt.queued for attempt in self.attempts]
        return shareable_mb(self.gpu, [Tenant(each.job.name, each.memory_mb or 0) for each in queued])


@dataclass(slots=True, eq=False)
class RunningAttempt:
    """A running attempt; it may be paused for external users.

    Attributes:
        queued: the job as it was when it started.
        gpus: () on the CPU.
        started: second of its start.
        left_s, limit_left_s: time until its end and its time limit (None without one), from its start or last pause.
        failure: how it will fail, None for a success.
        shared: other attempts may be on its GPU.
        ends_at: second of its end; None while it is paused.
        over_at: second at which its time limit ends it; None without one, and while it is paused.
        over: it has ended.
    """

    queued: QueuedJob
    gpus: tuple[SimulatedGpu, ...]
    started: float
    left_s: float
    failure: FailureClass | None
    shared: bool
    limit_left_s: float | None = None
    ends_at: float | None = None
    over_at: float | None = None
    over: bool = False

    def pause(self, now: float) -> None:
        """Stops it until ``resume``."""
        if self.ends_at is not None:
            self.left_s = self.ends_at - now
            self.limit_left_s = None if self.over_at is None else self.over_at - now
            self.ends_at = self.over_at = None

    def resume(self, now: float) -> float:
        """Starts or continues it. Returns the second of its end."""
        if self.ends_at is None:
            self.ends_at = now + self.left_s
            self.over_at = None if self.limit_left_s is None else now + self.limit_left_s
        return self.ends_at


def free_at(rule: IdleRule, clean_since: float, ours_left: bool, polling_since: float) -> float:
    """The second at which a GPU is free for a job: the rule of ``gpus.idle`` and ``jobs.gpu.watch``, solved for time.

    A real dispatcher polls the GPUs while a job waits. A simulation knows when a GPU was left, so it computes which
    poll will be the one that finds it free. tests/simulate/test_idle.py steps through the real rule, poll by poll, and
    compares.

    Args:
        clean_since: it has had no user since then.
        ours_left: its last user was a job of ours.
        polling_since: polls have come every ``rule.look_s`` since then, without a gap.
    """
    late = polling_since - clean_since
    if ours_left and late <= max(rule.quiet_s, rule.hole_s):
        # One clean poll is enough. It comes at once after the end of our job, and at once when polling begins.
        return polling_since if late > 0 else clean_since + TURNAROUND_S
    polls = math.ceil(max(0.0, -late) / rule.look_s)
    return polling_since + polls * rule.look_s + rule.quiet_s


class SimulatedGpus:
    """All GPUs. It stands where a real dispatcher has its GPU manager; decisions are made elsewhere, over ``pool``.

    Attributes:
        all: the GPUs by number.
        pool: the GPUs as the policy sees them.
        changes: how often a GPU has become free, was excluded or came back.
    """

    def __init__(self, machines: Sequence[Machine], rule: IdleRule, events: EventQueue):
        names = [(gpu, f"machine {number}") for number, gpus in enumerate(machines) for gpu in gpus]
        self.all = [
            SimulatedGpu(number, gpu, name if len(machines) > 1 else "") for number, (gpu, name) in enumerate(names)
        ]
        self._rule = rule
        self._events = events
        self._by_uuid = {each.gpu.uuid: each for each in self.all}
        self.pool = Pool(GpuView(each.gpu, _SETTLING, node=each.machine) for each in self.all)
        self.changes = 0
        # Numbers of those that are clean, but not yet for long enough; and since when polls come.
        self._settling = set(range(len(self.all)))
        self._polling_since: float | None = None

    def get(self, uuid: str) -> SimulatedGpu:
        """The GPU with this UUID."""
        return self._by_uuid[uuid]

    def add_attempt(self, gpu: SimulatedGpu, attempt: RunningAttempt) -> None:
        """An attempt starts here."""
        gpu.attempts.append(attempt)
        self._settling.discard(gpu.number)
        self.update(gpu)

    def remove_attempt(self, gpu: SimulatedGpu, attempt: RunningAttempt) -> None:
        """An attempt has ended here."""
        gpu.attempts.remove(attempt)
        self._left(gpu, by_us=True)

    def add_external(self, gpu: SimulatedGpu) -> None:
        """An external user comes."""
        gpu.external_since = self._events.now
        self._settling.discard(gpu.number)
        self.update(gpu)

    def remove_external(self, gpu: SimulatedGpu) -> None:
        """An external user leaves."""
        gpu.external_since = None
        self._left(gpu, by_us=False)

    def set_excluded(self, uuid: str, excluded: bool) -> None:
        """Sets whether a GPU is left out: no job is started on it."""
        gpu = self._by_uuid[uuid]
        if gpu.excluded is not excluded:
            gpu.excluded = excluded
            self.changes += 1
            self.update(gpu)

    def poll(self, now: float, since: float) -> None:
        """Brings the pool up to date. ``since``: polls are made since then; earlier series don't count."""
        if since != self._polling_since:
            self._polling_since = since
            for gpu in self.all:
                if gpu.clean and gpu.number not in self._settling:
                    self._settling.add(gpu.number)
                    self.update(gpu)
        ready = [number for number in self._settling if self._free_at(self.all[number], since) <= now]
        for number in sorted(ready):
            self._settling.remove(number)
            self.update(self.all[number])
        self.changes += len(ready)
        if len(ready) > len(self._settling):
            # A set keeps the capacity that it ever had, and iterating over it takes as long.
            self._settling = set(self._settling)

    def update(self, gpu: SimulatedGpu) -> None:
        """Updates the GPU in the pool."""
        settling = gpu.number in self._settling
        busy = None
        if gpu.attempts:
            busy = _OURS
        elif gpu.excluded:
            busy = _EXCLUDED
        elif gpu.external_since is not None:
            busy = _EXTERNAL
        elif settling:
            busy = _SETTLING
        self.pool.update(
            GpuView(
                gpu.gpu,
                busy,
                ours=bool(gpu.attempts),
                shareable_mb=gpu.shareable_mb,
                returning=settling and gpu.ours_left and not gpu.excluded,
                node=gpu.machine,
                over_at=next((attempt.over_at for attempt in gpu.attempts if not attempt.shared), None),
            )
        )

    def _left(self, gpu: SimulatedGpu, *, by_us: bool) -> None:
        """A user has left the GPU: plans a decision for when it is free again, while polls are made."""
        if gpu.clean:
            gpu.clean_since, gpu.ours_left = self._events.now, by_us
            self._settling.add(gpu.number)
        self.update(gpu)
        if gpu.clean and self._polling_since is not None:
            self._events.wake_at(self._free_at(gpu, self._polling_since))

    def _free_at(self, gpu: SimulatedGpu, polling_since: float) -> float:
        return free_at(self._rule, gpu.clean_since, gpu.ours_left, polling_since)


class Simulation(VirtualRun):
    """One run by our own policy.

    Args:
        machines: the GPUs of each machine.
        works: the jobs in the order of their arrival: the earlier is the older.
        rules: the rules of the run; ``policy`` is not read.
        background: external users, None for none.
        seed: of the external users.
        starts_at: local time of second 0, for quiet hours.

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
    ):
        if any(one.arrives_s > after.arrives_s for one, after in pairwise(works)):
            raise ValueError("works must be in the order of their arrival")
        self._limits = Limits(
            rules.max_gpus or _NO_LIMIT,
            rules.cpu_jobs,
            max_concurrent=rules.max_concurrent,
            longest_first=rules.order == "longest",
        )
        super().__init__(machines, works, JobQueue(works, self._limits, share=rules.share, timeout_s=rules.timeout))
        self._rules = rules
        checks = rules.max_checks or (MAX_CHECKS if background is not None else CHECKS_ALONE)
        self._idle_rule = IdleRule(max_checks=checks, check_interval_s=rules.check_interval)
        self._gpus = SimulatedGpus(machines, self._idle_rule, self._events)
        self._timed = rules.timeout is not None or any(work.job.timeout_s is not None for work in works)
        self._settings = rules.settings()
        self._starts_at = starts_at
        self._health: dict[str, health.Health] = {}
        self._uuids = tuple(each.gpu.uuid for each in self._gpus.all)
        self._largest_mb = max(each.gpu.total_mb for each in self._gpus.all)
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
        # The sessions of external users to come on each GPU, and those that are over.
        self._sessions: list[Iterator[Session]] = []
        self._left_visits: list[Visit] = []
        if background is not None:
            for gpu in self._gpus.all:
                self._sessions.append(background.sessions(seed, gpu.gpu.uuid))
                self._plan_session(gpu)

    def _submit(self) -> None:
        super()._submit()
        if self._settings.hours.quiet:
            self._events.at(0.0, self._hours_change)

    def _is_stuck(self) -> bool:
        return not self._running and self._jobs.waiting > 0 and self._now - self._idle_since > STUCK_AFTER_S

    # --- external users ----------------------------------------------------------------------------------------

    def _visits(self) -> tuple[Visit, ...]:
        """Every visit so far; one that lasts ends now."""
        open_visits = ((gpu.external_since, gpu.number) for gpu in self._gpus.all if gpu.external_since is not None)
        return (*self._left_visits, *(Visit(number, since, self._now) for since, number in sorted(open_visits)))

    def _plan_session(self, gpu: SimulatedGpu) -> None:
        session = next(self._sessions[gpu.number], None)
        if session is not None:
            self._events.at(session.start, self._begin_session, gpu, session)

    def _begin_session(self, gpu: SimulatedGpu, session: Session) -> None:
        if gpu.attempts and not session.barges:
            self._plan_session(gpu)
            return
        self._gpus.add_external(gpu)
        self._events.at(session.end, self._end_session, gpu, self._now)
        if gpu.attempts and self._rules.yield_to_others != "ignore":
            self._events.at(self._now + PRESENCE_S, self._yield, gpu)

    def _end_session(self, gpu: SimulatedGpu, began: float) -> None:
        self._left_visits.append(Visit(gpu.number, began, self._now))
        self._gpus.remove_external(gpu)
        for attempt in gpu.attempts:
            if attempt.ends_at is None:
                self._events.at(self._now + self._idle_rule.quiet_s, self._resume, attempt)
        self._plan_session(gpu)

    def _yield(self, gpu: SimulatedGpu) -> None:
        """Pauses or requeues our attempts on a GPU on which an external user was noticed."""
        if gpu.external_since is None:
            return
        for attempt in tuple(gpu.attempts):
            if self._rules.yield_to_others == "pause":
                attempt.pause(self._now)
                for each in attempt.gpus:
                    self._gpus.update(each)
            else:
                self._finish(attempt, Ending.GAVE_WAY)
                self._jobs.requeue(attempt.queued, self._now)

    def _resume(self, attempt: RunningAttempt) -> None:
        """Resumes a paused attempt if none of its GPUs has an external user."""
        if attempt.ends_at is not None or any(gpu.external_since is not None for gpu in attempt.gpus):
            return
        self._events.at(attempt.resume(self._now), self._end, attempt, attempt.ends_at)
        for gpu in attempt.gpus:
            self._gpus.update(gpu)

    # --- what starts now ---------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        """Starts all jobs that can start now, as a dispatcher does after each event."""
        jobs = self._jobs
        if not jobs.waiting:
            self._stop_polling()
            return
        if len(jobs.on_gpus):
            self._poll()
        while self._can_start_any() and not self._nothing_is_new():
            decision = decide_with(
                self._gpus.pool,
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

    def _nothing_is_new(self) -> bool:
        """Whether a decision could only repeat the last one: since then no GPU became free and no job was added. The
        end of a job alone frees no GPU: it is polled first."""
        return self._only_gpus and not self._gpus.pool.open_count and self._decided_on == self._changes()

    def _changes(self) -> tuple[int, int, int]:
        return (self._gpus.changes, self._jobs.additions, self._on_cpu)

    def _can_start_any(self) -> bool:
        """Whether any job could start at all."""
        pool, jobs = self._gpus.pool, self._jobs
        if len(jobs.on_gpus) and (pool.free or pool.open_count):
            return True
        return len(jobs.on_cpu) > 0 and self._limits.cpu_slots > self._on_cpu

    def _head(self) -> list[WaitingJob]:
        """The waiting jobs on GPUs that a decision looks at.

        On one machine those that a dispatcher looks at. In a cluster the first of each kind, as many as could start:
        behind the jobs that wait for a whole machine there is always one that fits.
        """
        pool, waiting = self._gpus.pool, self._jobs.on_gpus
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
        return len(self._machines) > 1 and not self._gpus.pool.open_count and not (cpu_free and self._jobs.on_cpu)

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
        self._gpus.poll(self._now, since)

    def _stop_polling(self) -> None:
        if self._polling_since is not None and self._polled_until is None:
            self._polled_until = self._now

    # --- attempts ----------------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        queued = self._jobs.start(start.job)
        trial = self._jobs.trial(queued)
        gpus = tuple(self._gpus.get(gpu.uuid) for gpu in start.gpus)
        limit_s = self._jobs.limit_s(queued)
        attempt = RunningAttempt(queued, gpus, self._now, trial.seconds, trial.failure, start.shared, limit_s)
        ends_at = attempt.resume(self._now)
        for gpu in gpus:
            self._gpus.add_attempt(gpu, attempt)
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
                in_use=lambda uuid: bool(self._gpus.get(uuid).attempts),
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
        self._gpus.set_excluded(uuid, self._health[uuid].is_out(self._now))

    def _finish(self, attempt: RunningAttempt, ending: Ending, failure: FailureClass | None = None) -> None:
        attempt.over = True
        for gpu in attempt.gpus:
            self._gpus.remove_attempt(gpu, attempt)
        self._running -= 1
        self._on_cpu -= not attempt.gpus
        self._idle_since = self._now
        numbers = tuple(gpu.number for gpu in attempt.gpus)
        self._record(attempt.queued, numbers, attempt.started, ending, failure, shared=attempt.shared)


def _choose(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, count, memory_mb=memory_mb)
