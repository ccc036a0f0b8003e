"""The simulation: events in virtual time over GPUs, waiting jobs and strangers.

What starts where is asked of the same ``policy.decide_with``, what an end means of the same ``settle``. Here is only what
a dispatcher's loop and the world around it do: jobs come, attempts end, strangers come and go, GPUs become free. The
same input gives the same history. The machines of a cluster take their jobs from one common queue; a job gets GPUs of
one machine.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpuherd.gpus.choose import choose
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.failures import FailureClass
from gpuherd.jobs.job import JobState
from gpuherd.jobs.policy import Limits, Start, Wait, decide_with
from gpuherd.jobs.settle import Settlement
from gpuherd.simulate.attempt import Attempt
from gpuherd.simulate.backlog import Backlog
from gpuherd.simulate.background import Background, Session
from gpuherd.simulate.cluster import Machine
from gpuherd.simulate.ends import given_way, settled
from gpuherd.simulate.floor import Floor, Slot
from gpuherd.simulate.history import Ending, History, Ran, Visit
from gpuherd.simulate.quiet import Quiet
from gpuherd.simulate.rules import Rules
from gpuherd.simulate.workload import Work

# How many jobs more than there are places one decision looks at: as in jobs.dispatcher.
_BEYOND = 8
# A stranger on a GPU of ours is noticed after so long: as in jobs.yielding.
_NOTICE_S = 2.0
# When for so long nothing of ours has run although jobs wait, none of them ever will.
_HOPELESS_S = 366 * 86400.0
_TELL_EVERY = 256


class Simulation:
    """One run of the works on the machines by the rules. Use: ``run`` once.

    Args:
        machines: the GPUs of each machine.
        works: the jobs.
        rules: the rules of the run; ``policy`` is not looked at.
        background: strangers, None for none.
        seed: of the strangers.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        works: Sequence[Work],
        rules: Rules,
        background: Background | None = None,
        seed: int = 0,
    ):
        self._machines = machines
        self._works = works
        self._rules = rules
        self._quiet = Quiet(rules.max_checks, max(rules.check_interval, 0.01))
        self._floor = Floor(machines, self._quiet)
        gpus = len(self._floor.slots)
        self._limits = Limits(
            rules.max_gpus or gpus,
            rules.cpu_jobs,
            max_concurrent=rules.max_concurrent,
            longest_first=rules.order == "longest",
        )
        self._backlog = Backlog(works, self._limits)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._counter = 0
        self._running = self._on_cpu = 0
        self._idle_since = 0.0
        # Looks are made while a job waits for a GPU: since when, and until when if none waits now.
        self._looking_since: float | None = None
        self._looked_until: float | None = None
        self._attempts: list[Ran] = []
        self._visits: list[Visit] = []
        self._visiting: dict[int, float] = {}
        self._never: dict[int, str] = {}
        self._decisions = 0
        self._plans: list[Iterator[Session]] = []
        if background is not None:
            for slot in self._floor.slots:
                self._plans.append(background.sessions(seed, slot.gpu.uuid))
                self._plan_next(slot)

    def run(self, progress: Callable[[int, int], None] | None = None) -> History:
        """Runs to the end. ``progress`` is told now and then how many of how many jobs have ended."""
        self._submit()
        total, steps = len(self._works), 0
        while self._backlog.unfinished and self._events and not self._is_hopeless():
            self._now = self._events[0][0]
            while self._events and self._events[0][0] <= self._now:
                _, _, happen, details = heapq.heappop(self._events)
                happen(*details)
            self._start_what_can()
            steps += 1
            if progress is not None and steps % _TELL_EVERY == 0:
                progress(total - self._backlog.unfinished, total)
        if progress is not None:
            progress(total - self._backlog.unfinished, total)
        return self._history()

    def _at(self, time: float, happen: Callable[..., None], *details: Any) -> None:
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, happen, details))

    def _submit(self) -> None:
        together: dict[float, list[int]] = defaultdict(list)
        for number, work in enumerate(self._works):
            together[work.arrives_s].append(number)
        for time, numbers in together.items():
            self._at(time, self._backlog.arrive, numbers, time)

    def _is_hopeless(self) -> bool:
        return not self._running and self._backlog.waiting > 0 and self._now - self._idle_since > _HOPELESS_S

    # --- strangers ---------------------------------------------------------------------------------------------

    def _plan_next(self, slot: Slot) -> None:
        session = next(self._plans[slot.number], None)
        if session is not None:
            self._at(session.start, self._stranger_comes, slot, session)

    def _stranger_comes(self, slot: Slot, session: Session) -> None:
        if slot.attempts and not session.barges:
            self._plan_next(slot)
            return
        self._visiting[slot.number] = self._now
        self._floor.come(slot)
        self._at(session.end, self._stranger_goes, slot)
        if slot.attempts and self._rules.yield_to_others != "ignore":
            self._at(self._now + _NOTICE_S, self._give_way, slot)

    def _stranger_goes(self, slot: Slot) -> None:
        self._visits.append(Visit(slot.number, self._visiting.pop(slot.number), self._now))
        self._wake(self._floor.go(slot, self._now))
        for attempt in slot.attempts:
            if attempt.ends_at is None:
                self._at(self._now + self._quiet.quiet_s, self._go_on, attempt)
        self._plan_next(slot)

    def _give_way(self, slot: Slot) -> None:
        """A stranger on GPUs of ours has been noticed: who runs there is paused, or goes back into the queue."""
        if not slot.stranger:
            return
        for attempt in tuple(slot.attempts):
            if self._rules.yield_to_others == "pause":
                attempt.pause(self._now)
            else:
                self._end(attempt, given_way(attempt.queued, self._now))

    def _go_on(self, attempt: Attempt) -> None:
        """A paused attempt goes on when no stranger has been on any of its GPUs for the quiet time."""
        slots = attempt.slots
        if attempt.ends_at is not None or any(slot.number in self._visiting for slot in slots):
            return
        self._at(attempt.resume(self._now), self._ends, attempt, attempt.ends_at)

    # --- our attempts ------------------------------------------------------------------------------------------

    def _start_what_can(self) -> None:
        """Starts all that can start now, as a dispatcher does after each event."""
        backlog = self._backlog
        if not backlog.waiting:
            self._stop_looking()
            return
        if len(backlog.on_gpus):
            self._keep_looking()
        look_at = 0
        while True:
            on_gpus = backlog.on_gpus.head(look_at + self._floor.pool.free) if self._can_take() else []
            on_cpu = backlog.on_cpu.head(self._limits.cpu_slots - self._on_cpu)
            if not on_gpus and not on_cpu:
                break
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
            if not decision.starts and not decision.refused:
                # Those at the head can't start. Small ones behind them may, as far as a dispatcher looks.
                if look_at:
                    break
                look_at = _BEYOND
        if not len(backlog.on_gpus):
            self._stop_looking()

    def _can_take(self) -> bool:
        return self._floor.pool.free > 0 or self._floor.pool.open_count > 0

    def _limits_now(self) -> Limits:
        if self._limits.max_concurrent is None:
            return self._limits
        return Limits(
            self._limits.max_gpus,
            self._limits.cpu_slots,
            max_concurrent=self._limits.max_concurrent,
            running=self._running,
            longest_first=self._limits.longest_first,
        )

    def _start(self, start: Start) -> None:
        number, now = start.job, self._now
        queued = self._backlog.started(number)
        trial = self._works[number].trial(queued.attempts - 1)
        seconds, failure = trial.seconds, trial.failure
        limit_s = queued.job.timeout_s or self._rules.timeout
        if limit_s is not None and seconds > limit_s:
            seconds, failure = limit_s, FailureClass.TIMEOUT
        slots = tuple(self._floor.slot(gpu.uuid) for gpu in start.gpus)
        attempt = Attempt(queued, slots, now, seconds, failure)
        for slot in slots:
            self._floor.take(slot, attempt)
        self._running += 1
        self._on_cpu += not slots
        self._at(now + seconds, self._ends, attempt, attempt.ends_at)

    def _ends(self, attempt: Attempt, expected: float) -> None:
        # One that was paused or stopped meanwhile does not end now.
        if attempt.ends_at == expected and not attempt.over:
            gpus = tuple(slot.gpu.uuid for slot in attempt.slots)
            self._end(attempt, settled(attempt.queued, attempt.failure, gpus, self._now))

    def _end(self, attempt: Attempt, settlement: Settlement) -> None:
        attempt.over = True
        number = attempt.queued.id
        for slot in attempt.slots:
            self._wake(self._floor.leave(slot, attempt, self._now))
        self._running -= 1
        self._on_cpu -= not attempt.slots
        self._idle_since = self._now
        self._record(attempt, settlement)
        if settlement.job is JobState.DONE:
            self._backlog.succeeded(number, self._now)
        elif settlement.job is JobState.WAITING:
            self._backlog.again(number, settlement, self._now, costs_try=settlement.diagnosis is not None)
            self._at(max(self._now, settlement.not_before), self._backlog.back, number)
        else:
            self._backlog.gave_up(number, self._now)

    def _record(self, attempt: Attempt, settlement: Settlement) -> None:
        ending = Ending.DONE if settlement.job is JobState.DONE else Ending.FAILED
        if settlement.diagnosis is None and ending is Ending.FAILED:
            ending = Ending.GAVE_WAY
        queued = attempt.queued
        self._attempts.append(
            Ran(
                job=queued.id,
                gpus=tuple(slot.number for slot in attempt.slots),
                start=attempt.started,
                end=self._now,
                wait_s=attempt.started - queued.ready_at,
                ending=ending,
                failure=None if settlement.diagnosis is None else settlement.diagnosis.failure,
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
        if since is None or (until is not None and self._now - until > self._quiet.hole_s):
            since = self._now
            self._at(since + self._quiet.row_s, _nothing)
        self._looking_since, self._looked_until = since, None
        self._floor.look(self._now, since)

    def _stop_looking(self) -> None:
        if self._looking_since is not None and self._looked_until is None:
            self._looked_until = self._now

    def _wake(self, time: float | None) -> None:
        """Something may start at this time, because a GPU has then been free for long enough."""
        if time is not None:
            self._at(time, _nothing)

    def _history(self) -> History:
        visits = [*self._visits, *(Visit(number, begun, self._now) for number, begun in self._visiting.items())]
        return History(
            machines=tuple(len(gpus) for gpus in self._machines),
            attempts=tuple(self._attempts),
            visits=tuple(visits),
            done=self._backlog.done,
            failed=self._backlog.failed,
            cancelled=self._backlog.cancelled,
            never=self._never,
            stuck=self._backlog.unfinished,
            decisions=self._decisions,
        )


def _nothing() -> None:
    """An event that is there for the decision after it."""


def _choose(candidates: Sequence[Gpu], count: int, memory_mb: int | None) -> tuple[Gpu, ...] | None:
    return choose(candidates, count, memory_mb=memory_mb)
