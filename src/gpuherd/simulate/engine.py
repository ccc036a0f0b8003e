"""The simulation: events in virtual time over GPUs, waiting jobs and strangers.

What starts where is asked of the same ``policy.decide_with`` as on a real run, what becomes of a job that failed of the
same ``retry.next_try``, and which GPUs are left out of the same ``quarantine``. Here is only what a dispatcher's loop
and the world around it do: jobs come, attempts end, strangers come and go, GPUs become free. The same input gives the
same history. The machines of a cluster take their jobs from one common queue; a job gets GPUs of one machine.
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
from gpuherd.jobs.attempts.retry import next_try
from gpuherd.jobs.completion import Observed
from gpuherd.jobs.gpu import health as quarantine
from gpuherd.jobs.gpu.usage import PRESENCE_S
from gpuherd.jobs.scheduler.limits import allowance
from gpuherd.jobs.scheduler.ordering import BEYOND, SEARCHED, Reach
from gpuherd.jobs.scheduler.policy import Decision, Limits, Start, Wait, WaitingJob, decide_with
from gpuherd.simulate.cluster import MONDAY, Machine
from gpuherd.simulate.external_users import Strangers, Visitors
from gpuherd.simulate.options import Rules
from gpuherd.simulate.queue import Backlog
from gpuherd.simulate.results import Ending, History, Ran
from gpuherd.simulate.state import Agenda, Attempt, Floor, Quiet, Slot
from gpuherd.simulate.workload import Work, diagnosis

# What a limit is where there is none.
_NO_LIMIT = 1_000_000
# When for so long nothing of ours has run although jobs wait, none of them ever will.
_HOPELESS_S = 366 * 86400.0
_TELL_EVERY = 256


class Simulation:
    """One run of the works on the machines by the rules. Use: ``run`` once.

    Args:
        machines: the GPUs of each machine.
        works: the jobs, in the order in which they come: the earlier is the older.
        rules: the rules of the run; ``policy`` is not looked at.
        background: strangers, None for none.
        seed: of the strangers.
        begin: local time of second 0, for quiet hours.

    Raises ValueError for works that are not in order.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        works: Sequence[Work],
        rules: Rules,
        background: Strangers | None = None,
        seed: int = 0,
        begin: datetime = MONDAY,
    ):
        if any(one.arrives_s > after.arrives_s for one, after in pairwise(works)):
            raise ValueError("works are given in the order in which they come")
        self._machines = machines
        self._works = works
        self._rules = rules
        checks = rules.max_checks or (MAX_CHECKS if background is not None else CHECKS_ALONE)
        self._quiet = Quiet(IdleRule(max_checks=checks, check_interval_s=rules.check_interval))
        self._floor = Floor(machines, self._quiet)
        self._limits = Limits(
            rules.max_gpus or _NO_LIMIT,
            rules.cpu_jobs,
            max_concurrent=rules.max_concurrent,
            longest_first=rules.order == "longest",
        )
        self._timed = rules.timeout is not None or any(work.job.timeout_s is not None for work in works)
        self._backlog = Backlog(works, self._limits, share=rules.share, timeout=rules.timeout)
        self._settings = rules.settings()
        self._begin = begin
        self._healths: dict[str, quarantine.Health] = {}
        self._left_out: set[str] = set()
        self._uuids = tuple(slot.gpu.uuid for slot in self._floor.slots)
        self._largest_mb = max(slot.gpu.total_mb for slot in self._floor.slots)
        self._agenda = Agenda()
        self._running = self._on_cpu = 0
        self._idle_since = 0.0
        # Looks are made while a job waits for a GPU: since when, and until when if none waits now.
        self._looking_since: float | None = None
        self._looked_until: float | None = None
        self._attempts: list[Ran] = []
        self._never: dict[int, str] = {}
        self._decisions = 0
        self._reach = Reach()
        # Where nothing but GPUs stands in the way of a start: what the last decision knew of.
        self._only_gpus = background is None and not self._timed and not self._settings.hours.quiet
        self._only_gpus = self._only_gpus and rules.max_gpus is None and rules.max_concurrent is None
        self._known: tuple[int, int, int] | None = None
        self._visitors = Visitors(self._agenda, self._floor, self._stranger_has_come, self._stranger_has_gone)
        if background is not None:
            self._visitors.begin(background, seed)

    def run(self, progress: Callable[[int, int], None] | None = None) -> History:
        """Runs to the end. ``progress`` is told now and then how many of how many jobs have ended."""
        self._submit()
        total, steps = len(self._works), 0
        while self._backlog.unfinished and self._agenda and not self._is_hopeless():
            self._agenda.step()
            self._start_what_can()
            steps += 1
            if progress is not None and steps % _TELL_EVERY == 0:
                progress(total - self._backlog.unfinished, total)
        if progress is not None:
            progress(total - self._backlog.unfinished, total)
        return self._history()

    @property
    def _now(self) -> float:
        return self._agenda.now

    def _submit(self) -> None:
        together: dict[float, list[int]] = defaultdict(list)
        for number, work in enumerate(self._works):
            together[work.arrives_s].append(number)
        for time, numbers in together.items():
            self._agenda.at(time, self._backlog.arrive, numbers, time)
        if self._settings.hours.quiet:
            self._agenda.at(0.0, self._hours_change)

    def _is_hopeless(self) -> bool:
        return not self._running and self._backlog.waiting > 0 and self._now - self._idle_since > _HOPELESS_S

    # --- strangers ---------------------------------------------------------------------------------------------

    def _stranger_has_come(self, slot: Slot) -> None:
        if slot.attempts and self._rules.yield_to_others != "ignore":
            self._agenda.at(self._now + PRESENCE_S, self._give_way, slot)

    def _stranger_has_gone(self, slot: Slot) -> None:
        for attempt in slot.attempts:
            if attempt.ends_at is None:
                self._agenda.at(self._now + self._quiet.rule.quiet_s, self._go_on, attempt)

    def _give_way(self, slot: Slot) -> None:
        """A stranger on GPUs of ours has been noticed: who runs there is paused, or goes back into the queue."""
        if not slot.stranger:
            return
        for attempt in tuple(slot.attempts):
            if self._rules.yield_to_others == "pause":
                attempt.pause(self._now)
                self._floor.show(attempt.slots)
            else:
                self._finish(attempt, Ending.GAVE_WAY)
                self._backlog.back(attempt.standing.ready(self._now))

    def _go_on(self, attempt: Attempt) -> None:
        """A paused attempt goes on when no stranger has been on any of its GPUs for the quiet time."""
        slots = attempt.slots
        if attempt.ends_at is not None or any(self._visitors.are_on(slot) for slot in slots):
            return
        self._agenda.at(attempt.resume(self._now), self._ends, attempt, attempt.ends_at)
        self._floor.show(slots)

    # --- what starts now ---------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        """Starts all that can start now, as a dispatcher does after each event."""
        backlog = self._backlog
        if not backlog.waiting:
            self._stop_looking()
            return
        if len(backlog.on_gpus):
            self._keep_looking()
        while self._has_room() and not self._nothing_is_new():
            on_gpus = self._head()
            on_cpu = backlog.on_cpu.head(self._limits.cpu_slots - self._on_cpu)
            decision = decide_with(
                self._floor.pool,
                on_gpus + on_cpu,
                self._limits_now(),
                _choose,
                cpu_running=self._on_cpu,
                explain=False,
            )
            self._decisions += 1
            self._refuse(decision.refused)
            for start in decision.starts:
                self._start(start)
            searches = self._looks_further(decision)
            if not (decision.refused or searches) and (not decision.starts or self._has_seen_all()):
                self._known = self._news()
                break
        if not len(backlog.on_gpus):
            self._stop_looking()

    def _nothing_is_new(self) -> bool:
        """Whether a decision could only say what the last one has: no GPU has become free since, and nobody has come. A
        job's end alone frees none: its GPU is looked at first."""
        return self._only_gpus and not self._floor.pool.open_count and self._known == self._news()

    def _news(self) -> tuple[int, int, int]:
        return (self._floor.news, self._backlog.news, self._on_cpu)

    def _has_room(self) -> bool:
        """Whether anything could start at all."""
        pool, backlog = self._floor.pool, self._backlog
        if len(backlog.on_gpus) and (pool.free or pool.open_count):
            return True
        return len(backlog.on_cpu) > 0 and self._limits.cpu_slots > self._on_cpu

    def _head(self) -> list[WaitingJob]:
        """The waiting jobs on GPUs that a decision looks at.

        On one machine as far as a dispatcher looks. In a cluster the first of each kind, as many as could start: behind
        those that wait for a machine there is always somebody who fits.
        """
        pool, line = self._floor.pool, self._backlog.on_gpus
        if len(self._machines) == 1:
            foremost = line.head(self._reach.foremost(pool.free))
            if not self._reach.by_kind:
                return foremost
            both = {job.id: job for job in (*foremost, *line.head_of_kinds(pool.free, 1, sharing=BEYOND))}
            return list(both.values())
        beyond = SEARCHED if self._reach.lends else 0
        return line.head_of_kinds(pool.free, beyond + (BEYOND if pool.open_count else self._limits.keep_for))

    def _looks_further(self, decision: Decision) -> bool:
        """Whether another decision should see more of the queue than this one did."""
        unseen = len(self._machines) == 1 and len(self._backlog.on_gpus) > self._reach.foremost(0)
        before, self._reach = self._reach, self._reach.after(decision, unseen=unseen)
        return self._reach.is_beyond(before)

    def _has_seen_all(self) -> bool:
        """Whether nobody who was not looked at could start: where nothing is shared, of each kind were enough."""
        cpu_free = self._limits.cpu_slots - self._on_cpu
        return len(self._machines) > 1 and not self._floor.pool.open_count and not (cpu_free and self._backlog.on_cpu)

    def _limits_now(self) -> Limits:
        """The limits of this moment. With quiet hours, an event comes when they next change."""
        if self._limits.max_concurrent is None and not self._settings.hours.quiet and not self._timed:
            return self._limits
        allowed = allowance(self._settings, "", self._begin + timedelta(seconds=self._now))
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
        """Quiet hours have begun or ended."""
        local = self._begin + timedelta(seconds=self._now)
        change = settings.next_change(self._settings.hours.quiet, local)
        if change is not None:
            self._agenda.at((change - self._begin).total_seconds(), self._hours_change)

    # --- our attempts ------------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        standing = self._backlog.started(start.job)
        trial = self._works[start.job].trial(standing.attempts - 1)
        seconds, failure = trial.seconds, trial.failure
        limit_s = standing.job.timeout_s or self._rules.timeout
        if limit_s is not None and seconds > limit_s:
            seconds, failure = limit_s, FailureClass.TIMEOUT
        slots = tuple(self._floor.slot(gpu.uuid) for gpu in start.gpus)
        attempt = Attempt(standing, slots, self._now, seconds, failure, shared=start.shared, limit_s=limit_s)
        for slot in slots:
            self._floor.take(slot, attempt)
        self._running += 1
        self._on_cpu += not slots
        self._agenda.at(self._now + seconds, self._ends, attempt, attempt.ends_at)

    def _ends(self, attempt: Attempt, expected: float) -> None:
        # One that was paused or stopped meanwhile does not end now.
        if attempt.ends_at != expected or attempt.over:
            return
        if attempt.failure is not None:
            self._fails(attempt, attempt.failure)
            return
        self._finish(attempt, Ending.DONE)
        uuids, job = [slot.gpu.uuid for slot in attempt.slots], attempt.standing.job
        self._note_health(
            quarantine.after_success(
                self._healths, uuids, job.name, job.family, started_at=attempt.started, now=self._now
            )
        )
        self._backlog.succeeded(attempt.standing.number, self._now)

    def _fails(self, attempt: Attempt, failure: FailureClass) -> None:
        told, standing = diagnosis(failure), attempt.standing
        uuids = tuple(slot.gpu.uuid for slot in attempt.slots)
        total_mb = min((slot.gpu.total_mb for slot in attempt.slots), default=None)
        larger = total_mb is not None and total_mb < self._largest_mb
        on_trial = any(self._healths[uuid].is_on_trial(self._now) for uuid in uuids if uuid in self._healths)
        seen = Observed(gpus=uuids, gpu_total_mb=total_mb, larger_exists=larger, on_trial=on_trial)
        again = next_try(standing, told, seen, self._now)
        self._finish(attempt, Ending.FAILED, failure)
        self._note_health(
            quarantine.after_failure(
                self._healths,
                uuids,
                standing.job.name,
                standing.job.family,
                failure,
                told.reason,
                now=self._now,
                machine=self._uuids,
                in_use=lambda uuid: bool(self._floor.slot(uuid).attempts),
            )
        )
        if again is None:
            self._backlog.gave_up(standing.number, self._now)
        else:
            self._agenda.at(again.not_before, self._backlog.back, standing.for_next(again))

    def _note_health(self, changed: Mapping[str, quarantine.Health]) -> None:
        """Nothing is started on the GPUs that are left out now, and again on those that were."""
        self._healths.update(changed)
        for uuid, health in changed.items():
            out = health.is_out(self._now)
            self._leave_out(uuid, out)
            if out and health.until is not None:
                self._agenda.at(health.until, self._comes_back, uuid)

    def _comes_back(self, uuid: str) -> None:
        self._leave_out(uuid, self._healths[uuid].is_out(self._now))

    def _leave_out(self, uuid: str, out: bool) -> None:
        if out is not (uuid in self._left_out):
            self._floor.leave_out(self._floor.slot(uuid), out)
            self._left_out ^= {uuid}

    def _finish(self, attempt: Attempt, ending: Ending, failure: FailureClass | None = None) -> None:
        attempt.over = True
        for slot in attempt.slots:
            self._agenda.wake(self._floor.leave(slot, attempt, self._now))
        self._running -= 1
        self._on_cpu -= not attempt.slots
        self._idle_since = self._now
        self._attempts.append(
            Ran(
                job=attempt.standing.number,
                gpus=tuple(slot.number for slot in attempt.slots),
                start=attempt.started,
                end=self._now,
                wait_s=attempt.started - attempt.standing.ready_at,
                ending=ending,
                failure=failure,
                shared=attempt.shared,
            )
        )

    def _refuse(self, refused: Sequence[Wait]) -> None:
        for wait in refused:
            self._backlog.started(wait.job)
            self._never[wait.job] = wait.reason
            self._backlog.gave_up(wait.job, self._now)

    # --- looking -----------------------------------------------------------------------------------------------

    def _keep_looking(self) -> None:
        """A job waits for a GPU, so that looks are made."""
        since, until = self._looking_since, self._looked_until
        if since is None or (until is not None and self._now - until > self._quiet.rule.hole_s):
            since = self._now
            self._agenda.wake(since + self._quiet.rule.quiet_s)
        self._looking_since, self._looked_until = since, None
        self._floor.look(self._now, since)

    def _stop_looking(self) -> None:
        if self._looking_since is not None and self._looked_until is None:
            self._looked_until = self._now

    def _history(self) -> History:
        return History(
            machines=tuple(len(gpus) for gpus in self._machines),
            attempts=tuple(self._attempts),
            visits=self._visitors.visits(),
            done=self._backlog.done,
            failed=self._backlog.failed,
            cancelled=self._backlog.cancelled,
            never=self._never,
            stuck=self._backlog.unfinished,
            decisions=self._decisions,
        )


def _choose(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, count, memory_mb=memory_mb)
