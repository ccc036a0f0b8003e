"""The simulation: events in virtual time over GPUs, waiting jobs and external users.

The decisions are those of a real run, by the same code: ``policy.decide_with`` says what starts where,
``complete.next_try`` what becomes of a failed job, ``jobs.gpu.health`` which GPUs are left out. This module adds what a
dispatcher's loop and its surroundings do: jobs arrive, attempts end, external users come and go, GPUs become free. The
same input gives the same history. The machines of a cluster share one queue; a job gets GPUs of one machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from gpuherd.jobs.scheduler.limits import allowance
from gpuherd.jobs.scheduler.ordering import BEYOND, SEARCHED, Lookahead
from gpuherd.jobs.scheduler.policy import Decision, Limits, Start, Wait, WaitingJob, decide_with
from gpuherd.simulate.cluster import MONDAY, ExternalUsers, Machine
from gpuherd.simulate.gpus import ExternalUse, IdleModel, RunningAttempt, SimulatedGpu, SimulatedGpus
from gpuherd.simulate.options import STUCK_AFTER_S, Rules
from gpuherd.simulate.queue import EventQueue, JobQueue
from gpuherd.simulate.results import Ending, FinishedAttempt, History, Visit
from gpuherd.simulate.workload import Work, diagnosis

# The limit where there is none.
_NO_LIMIT = 1_000_000
_PROGRESS_EVERY_STEPS = 256


class Run:
    """One run of the works in virtual time, which subclasses complete. Use: ``run`` once."""

    def __init__(self, machines: Sequence[Machine], works: Sequence[Work], jobs: JobQueue):
        self._machines = machines
        self._works = works
        self._jobs = jobs
        self._events = EventQueue()
        self._attempts: list[FinishedAttempt] = []
        self._refused: dict[int, str] = {}
        self._decisions = 0

    def run(self, progress: Callable[[int, int], None] | None = None) -> History:
        """Runs to the end. ``progress`` is called now and then with the numbers of ended jobs and of all jobs."""
        self._submit()
        total, steps = len(self._works), 0
        while self._jobs.unfinished and self._events and not self._is_stuck():
            self._events.step()
            self._after_step()
            steps += 1
            if progress is not None and steps % _PROGRESS_EVERY_STEPS == 0:
                progress(total - self._jobs.unfinished, total)
        if progress is not None:
            progress(total - self._jobs.unfinished, total)
        return History(
            machines=tuple(len(gpus) for gpus in self._machines),
            attempts=tuple(self._attempts),
            visits=self._visits(),
            done=self._jobs.done,
            failed=self._jobs.failed,
            cancelled=self._jobs.cancelled,
            refused=self._refused,
            stuck=self._jobs.unfinished,
            decisions=self._decisions,
        )

    @property
    def _now(self) -> float:
        return self._events.now

    def _submit(self) -> None:
        together: dict[float, list[int]] = defaultdict(list)
        for number, work in enumerate(self._works):
            together[work.arrives_s].append(number)
        for time, numbers in together.items():
            self._events.at(time, self._arrive, numbers, time)

    def _arrive(self, numbers: Sequence[int], now: float) -> None:
        self._jobs.arrive(numbers, now)

    def _after_step(self) -> None:
        """Follows the events of each second."""

    def _is_stuck(self) -> bool:
        """Whether no waiting job will ever start."""
        return False

    def _visits(self) -> tuple[Visit, ...]:
        return ()


class Simulation(Run):
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
        self._gpus = SimulatedGpus(machines, IdleModel(self._idle_rule))
        self._timed = rules.timeout is not None or any(work.job.timeout_s is not None for work in works)
        self._settings = rules.settings()
        self._starts_at = starts_at
        self._health: dict[str, health.Health] = {}
        self._excluded: set[str] = set()
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
        self._external = ExternalUse(self._events, self._gpus, self._external_came, self._external_left)
        if background is not None:
            self._external.begin(background, seed)

    def _submit(self) -> None:
        super()._submit()
        if self._settings.hours.quiet:
            self._events.at(0.0, self._hours_change)

    def _is_stuck(self) -> bool:
        return not self._running and self._jobs.waiting > 0 and self._now - self._idle_since > STUCK_AFTER_S

    def _visits(self) -> tuple[Visit, ...]:
        return self._external.visits()

    # --- external users ----------------------------------------------------------------------------------------

    def _external_came(self, gpu: SimulatedGpu) -> None:
        if gpu.attempts and self._rules.yield_to_others != "ignore":
            self._events.at(self._now + PRESENCE_S, self._yield, gpu)

    def _external_left(self, gpu: SimulatedGpu) -> None:
        for attempt in gpu.attempts:
            if attempt.ends_at is None:
                self._events.at(self._now + self._idle_rule.quiet_s, self._resume, attempt)

    def _yield(self, gpu: SimulatedGpu) -> None:
        """Pauses or requeues our attempts on a GPU on which an external user was noticed."""
        if not gpu.external:
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
        if attempt.ends_at is not None or any(gpu.external for gpu in attempt.gpus):
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
        while self._has_room() and not self._nothing_is_new():
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
                self._refuse(refused)
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

    def _has_room(self) -> bool:
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
        return Limits(
            self._limits.max_gpus,
            self._limits.cpu_slots,
            max_concurrent=self._limits.max_concurrent,
            running=self._running,
            gpus_now=allowed.max_gpus,
            gpus_now_why=allowed.sentence,
            longest_first=self._limits.longest_first,
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
            self._set_excluded(uuid)
            if state.is_out(self._now) and state.until is not None:
                self._events.at(state.until, self._set_excluded, uuid)

    def _set_excluded(self, uuid: str) -> None:
        excluded = self._health[uuid].is_out(self._now)
        if excluded is not (uuid in self._excluded):
            self._gpus.set_excluded(self._gpus.get(uuid), excluded)
            self._excluded ^= {uuid}

    def _finish(self, attempt: RunningAttempt, ending: Ending, failure: FailureClass | None = None) -> None:
        attempt.over = True
        for gpu in attempt.gpus:
            self._events.wake_at(self._gpus.remove_attempt(gpu, attempt, self._now))
        self._running -= 1
        self._on_cpu -= not attempt.gpus
        self._idle_since = self._now
        self._attempts.append(
            FinishedAttempt(
                job=attempt.queued.id,
                gpus=tuple(gpu.number for gpu in attempt.gpus),
                start=attempt.started,
                end=self._now,
                wait_s=attempt.started - attempt.queued.ready_at,
                ending=ending,
                failure=failure,
                shared=attempt.shared,
            )
        )

    def _refuse(self, refused: Wait) -> None:
        self._jobs.start(refused.job)
        self._refused[refused.job] = refused.reason
        self._jobs.give_up(refused.job, self._now)


def _choose(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, count, memory_mb=memory_mb)
