"""A run whose jobs are handed to a cluster's own scheduler, in virtual time: what the hand-over costs.

Here it is not our policy that decides what runs where, but ``scheduler``, a simple model of what SLURM or Ray do. Our
part is only what ``jobs/remote`` does: no more than ``at_most`` jobs are in the cluster's hands, an array at a time;
what has ended is seen at the next look, and then others are handed over. What this costs is GPU time that nobody uses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.attempts.retry import next_try
from gpuherd.jobs.completion import Observed
from gpuherd.jobs.remote.batches import stepped
from gpuherd.jobs.scheduler.policy import Limits
from gpuherd.simulate.cluster import Machine
from gpuherd.simulate.options import Rules
from gpuherd.simulate.queue import Backlog
from gpuherd.simulate.results import Ending, History, Ran
from gpuherd.simulate.scheduler import Nodes, Parcel, Running, Scheduler
from gpuherd.simulate.state import Agenda, Standing
from gpuherd.simulate.workload import Work, diagnosis

# What SLURM takes as one array where nobody has said otherwise.
_LARGEST_ARRAY = 1000
_TELL_EVERY = 256


class HandedOver:
    """One run of the works on the nodes of a cluster. Use: ``run`` once.

    Args:
        machines: the GPUs of each node.
        works: the jobs, in the order in which they come.
        rules: ``at_most``, ``array_limit``, ``look``, ``engine_cycle``, ``engine_rate``, ``start_up``, ``order`` and
            ``timeout`` are looked at.
    """

    def __init__(self, machines: Sequence[Machine], works: Sequence[Work], rules: Rules):
        self._machines = machines
        self._works = works
        self._rules = rules
        limits = Limits(rules.at_most, 1, longest_first=rules.order == "longest")
        self._backlog = Backlog(works, limits, share=False, timeout=rules.timeout)
        self._nodes = Nodes(machines)
        self._scheduler = Scheduler(self._nodes, rules.array_limit)
        self._agenda = Agenda()
        # In the cluster's hands as far as we know, and those of them that have ended unseen.
        self._open = 0
        self._ended: list[tuple[Running, FailureClass | None]] = []
        self._arrays = 0
        self._look_at: float | None = None
        self._pass_at: float | None = None
        self._passed_at = -math.inf
        self._passes = 0
        # Starts that the cluster's rate still allows, and when that was last reckoned.
        self._credit, self._credited_at = 0.0, 0.0
        self._attempts: list[Ran] = []
        self._could: dict[tuple[int, int, int | None], bool] = {}
        self._never: dict[int, str] = {}

    def run(self, progress: Callable[[int, int], None] | None = None) -> History:
        """Runs to the end. ``progress`` is told now and then how many of how many jobs have ended."""
        together: dict[float, list[int]] = defaultdict(list)
        for number, work in enumerate(self._works):
            together[work.arrives_s].append(number)
        for time, numbers in together.items():
            self._agenda.at(time, self._arrive, numbers, time)
        total, steps = len(self._works), 0
        while self._backlog.unfinished and self._agenda:
            self._agenda.step()
            steps += 1
            if progress is not None and steps % _TELL_EVERY == 0:
                progress(total - self._backlog.unfinished, total)
        if progress is not None:
            progress(total - self._backlog.unfinished, total)
        return History(
            machines=tuple(len(gpus) for gpus in self._machines),
            attempts=tuple(self._attempts),
            visits=(),
            done=self._backlog.done,
            failed=self._backlog.failed,
            cancelled=self._backlog.cancelled,
            never=self._never,
            stuck=self._backlog.unfinished,
            decisions=self._passes,
        )

    def _arrive(self, numbers: Sequence[int], now: float) -> None:
        self._backlog.arrive(numbers, now)
        self._look_soon()

    # --- our part -----------------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        """At the next look, of which there is one every ``look`` seconds, what is new is seen."""
        if self._look_at is None:
            now, every = self._agenda.now, self._rules.look
            self._look_at = max(now, math.ceil(now / every) * every)
            self._agenda.at(self._look_at, self._look)

    def _look(self) -> None:
        self._look_at = None
        ended, self._ended = self._ended, []
        self._open -= len(ended)
        for running, failure in ended:
            self._settle(running, failure)
        self._hand_over()

    def _settle(self, running: Running, failure: FailureClass | None) -> None:
        standing, now = running.parcel.standing, self._agenda.now
        if failure is None:
            self._backlog.succeeded(standing.number, now)
            return
        again = next_try(standing, diagnosis(failure), Observed(), now)
        if again is None:
            self._backlog.gave_up(standing.number, now)
        else:
            self._agenda.at(again.not_before, self._back, standing.for_next(again))

    def _back(self, standing: Standing) -> None:
        self._backlog.back(standing)
        self._look_soon()

    def _hand_over(self) -> None:
        """As many as may be in the cluster's hands, an array for those that ask for the same."""
        places = self._rules.at_most - self._open
        backlog, groups = self._backlog, _Groups()
        for line in (backlog.on_gpus, backlog.on_cpu):
            for job in line.head(places):
                standing = backlog.started(job.id)
                if self._could_ever_run(standing):
                    places -= 1
                    groups.add(standing, job.limit_s)
        for group in groups.found:
            self._arrays += 1
            self._open += len(group)
            self._scheduler.submit([Parcel(standing, self._arrays, limit_s) for standing, limit_s in group])
        if groups.found:
            self._pass_soon()

    def _could_ever_run(self, standing: Standing) -> bool:
        """False for a job that is refused, since the cluster could never run it; it is given up then."""
        kind = (standing.job.nodes, standing.gpus, standing.memory_mb)
        if kind not in self._could:
            self._could[kind] = self._nodes.could_hold(*kind)
        if not self._could[kind]:
            nodes, gpus, memory_mb = kind
            each = f"{gpus} GPUs" if memory_mb is None else f"{gpus} GPUs of {memory_mb} MB"
            where = "a node" if nodes == 1 else f"each of {nodes} nodes"
            self._never[standing.number] = f"asks for {each} on {where}; the cluster has none such"
            self._backlog.gave_up(standing.number, self._agenda.now)
            self._look_soon()
        return self._could[kind]

    # --- the cluster's part -------------------------------------------------------------------------------------

    def _pass_soon(self) -> None:
        """Something has come or ended: its scheduler goes over its queue, at most every ``engine_cycle``."""
        if self._pass_at is None:
            self._pass_at = max(self._agenda.now, self._passed_at + self._rules.engine_cycle)
            self._agenda.at(self._pass_at, self._pass)

    def _pass(self) -> None:
        self._pass_at, self._passed_at = None, self._agenda.now
        self._passes += 1
        rate = self._rules.engine_rate
        most = math.inf if rate is None else self._allowed(rate)
        if self._scheduler.start_what_can(self._agenda.now, most, self._begin):
            self._pass_soon()

    def _allowed(self, rate: float) -> float:
        """How many may start now, at so many a second; what a pass did not need is not saved up for long."""
        now, cycle = self._agenda.now, max(self._rules.engine_cycle, 1 / rate)
        self._credit = min(self._credit + rate * (now - self._credited_at), rate * cycle)
        self._credited_at = now
        return self._credit

    def _begin(self, running: Running) -> None:
        standing = running.parcel.standing
        trial = self._works[standing.number].trial(standing.attempts - 1)
        seconds, failure, limit_s = trial.seconds, trial.failure, running.parcel.limit_s
        if limit_s is not None and seconds > limit_s:
            seconds, failure = limit_s, FailureClass.TIMEOUT
        self._credit -= 1
        start = self._agenda.now + self._rules.start_up
        self._agenda.at(start + seconds, self._ends, running, start, failure)

    def _ends(self, running: Running, start: float, failure: FailureClass | None) -> None:
        standing, now = running.parcel.standing, self._agenda.now
        self._scheduler.over(running)
        self._attempts.append(
            Ran(
                job=standing.number,
                gpus=running.gpus,
                start=start,
                end=now,
                wait_s=start - standing.ready_at,
                ending=Ending.DONE if failure is None else Ending.FAILED,
                failure=failure,
            )
        )
        self._ended.append((running, failure))
        self._look_soon()
        if self._scheduler:
            self._pass_soon()


class _Groups:
    """Jobs that go together: those that ask for the same, for the same time, an array each. ``found``: in the
    order of their first jobs."""

    def __init__(self) -> None:
        self.found: list[list[tuple[Standing, float | None]]] = []
        self._last: dict[tuple[object, ...], list[tuple[Standing, float | None]]] = {}

    def add(self, standing: Standing, limit_s: float | None) -> None:
        asked_s = None if limit_s is None else stepped(limit_s)
        kind = (standing.job.nodes, standing.gpus, standing.memory_mb, asked_s)
        group = self._last.get(kind)
        if group is None or len(group) == _LARGEST_ARRAY:
            group = self._last[kind] = []
            self.found.append(group)
        group.append((standing, limit_s))
