"""The jobs of a simulation that have not ended: which wait, which are not yet ready to, and what an end sets free.

It does in memory what ``jobs.queue`` does in its database: needs, rounds, back-off. It knows neither GPUs nor events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpuherd.jobs.policy import Limits, WaitingJob
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.settle import Settlement
from gpuherd.simulate.line import Line
from gpuherd.simulate.workload import Work


class Backlog:
    """All jobs, by number from 0. ``on_gpus`` and ``on_cpu`` are the lines of those that wait to start.

    Attributes:
        done, failed, cancelled, unfinished: how many.
    """

    def __init__(self, works: Sequence[Work], limits: Limits):
        self.on_gpus = Line(limits)
        self.on_cpu = Line(limits)
        self.done = self.failed = self.cancelled = 0
        self.unfinished = len(works)
        self._works = works
        self._arrived = [False] * len(works)
        self._queued = [QueuedJob(number, work.job, 0, 0, 0.0, frozenset(), 0.0) for number, work in enumerate(works)]
        self._ended = [False] * len(works)
        by_name = {work.job.name: number for number, work in enumerate(works)}
        self._blocked = [len(set(work.job.needs)) for work in works]
        self._dependents: dict[int, list[int]] = defaultdict(list)
        for number, work in enumerate(works):
            for need in set(work.job.needs):
                self._dependents[by_name[need]].append(number)
        # How many jobs of each round have not ended, and those that wait for an earlier round's last.
        self._rounds: dict[int, int] = defaultdict(int)
        for work in works:
            self._rounds[work.job.round] += 1
        self._round = min(self._rounds, default=0)
        self._later: dict[int, list[int]] = defaultdict(list)

    @property
    def waiting(self) -> int:
        """How many could start now if there were room."""
        return len(self.on_gpus) + len(self.on_cpu)

    def job(self, number: int) -> QueuedJob:
        """The job as it stands."""
        return self._queued[number]

    def arrive(self, numbers: Sequence[int], now: float) -> None:
        """These jobs are submitted."""
        for number in numbers:
            self._arrived[number] = True
        self._admit((number for number in numbers if not self._ended[number]), now)

    def started(self, number: int) -> QueuedJob:
        """The job leaves the line. Returns it as it runs."""
        line = self.on_gpus if number in self.on_gpus else self.on_cpu
        line.remove(number)
        old = self._queued[number]
        self._queued[number] = _changed(old, attempts=old.attempts + 1)
        return self._queued[number]

    def again(self, number: int, settlement: Settlement, now: float, *, costs_try: bool) -> None:
        """An attempt has ended and the job is to be tried again. It waits from ``settlement.not_before`` on: then call
        ``back``.
        """
        old = self._queued[number]
        self._queued[number] = _changed(
            old,
            tries=old.tries + costs_try,
            not_before=settlement.not_before,
            avoid=settlement.avoid,
            ready_at=max(now, settlement.not_before),
        )

    def back(self, number: int) -> None:
        """The job waits again."""
        self._admit((number,), self._queued[number].ready_at)

    def succeeded(self, number: int, now: float) -> None:
        """The job is done. Jobs that needed it may now wait."""
        self.done += 1
        self._end(number, now)
        freed = []
        for dependent in self._dependents[number]:
            self._blocked[dependent] -= 1
            if not self._blocked[dependent] and self._arrived[dependent]:
                freed.append(dependent)
        self._admit(freed, now)

    def gave_up(self, number: int, now: float) -> None:
        """The job has failed for good, and with it all that need it."""
        self.failed += 1
        self._end(number, now)
        doomed = list(self._dependents[number])
        while doomed:
            dependent = doomed.pop()
            if not self._ended[dependent]:
                self.cancelled += 1
                self._end(dependent, now)
                doomed += self._dependents[dependent]

    def _end(self, number: int, now: float) -> None:
        self._ended[number] = True
        self.unfinished -= 1
        its_round = self._works[number].job.round
        self._rounds[its_round] -= 1
        while not self._rounds[self._round] and self.unfinished:
            del self._rounds[self._round]
            self._round = min(self._rounds)
            self._admit([each for each in self._later.pop(self._round, []) if not self._ended[each]], now)

    def _admit(self, numbers: Sequence[int] | Iterator[int], now: float) -> None:
        """Puts those into their line that nothing else keeps from it."""
        on_gpus, on_cpu = [], []
        for number in numbers:
            queued = self._queued[number]
            job = queued.job
            if self._blocked[number]:
                continue
            if job.round > self._round:
                self._later[job.round].append(number)
                continue
            if queued.ready_at < now:
                self._queued[number] = queued = _changed(queued, ready_at=now)
            (on_gpus if job.gpus else on_cpu).append(_waiting(queued))
        for line, jobs in ((self.on_gpus, on_gpus), (self.on_cpu, on_cpu)):
            if len(jobs) > 1:
                line.add_all(jobs)
            elif jobs:
                line.add(jobs[0])


def _changed(
    old: QueuedJob,
    *,
    tries: int | None = None,
    attempts: int | None = None,
    not_before: float | None = None,
    avoid: frozenset[str] | None = None,
    ready_at: float | None = None,
) -> QueuedJob:
    # Not dataclasses.replace, which costs as much as all else that is done for a start.
    return QueuedJob(
        old.id,
        old.job,
        old.tries if tries is None else tries,
        old.attempts if attempts is None else attempts,
        old.not_before if not_before is None else not_before,
        old.avoid if avoid is None else avoid,
        old.ready_at if ready_at is None else ready_at,
    )


def _waiting(queued: QueuedJob) -> WaitingJob:
    job = queued.job
    return WaitingJob(queued.id, job.gpus, job.memory_mb, job.priority, queued.avoid, job.share, job.cost)
