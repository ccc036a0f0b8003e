"""The jobs of a simulation that have not ended: which wait, which are not yet ready to, and what an end sets free.

It does in memory what ``jobs.queue`` does in its database: needs, rounds, back-off. It knows neither GPUs nor events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gpuherd.jobs.policy import Limits, WaitingJob
from gpuherd.simulate.line import Line
from gpuherd.simulate.standing import Standing
from gpuherd.simulate.workload import Work


class Backlog:
    """All jobs, by number from 0. ``on_gpus`` and ``on_cpu`` are the lines of those that wait to start.

    Attributes:
        done, failed, cancelled, unfinished: how many.
        news: how often jobs have come into a line.
    """

    def __init__(self, works: Sequence[Work], limits: Limits, *, share: bool, timeout: float | None = None):
        self.on_gpus = Line(limits)
        self.on_cpu = Line(limits)
        self.done = self.failed = self.cancelled = 0
        self.unfinished = len(works)
        self.news = 0
        self._works = works
        self._timeout = timeout
        self._arrived = [False] * len(works)
        self._standings = [Standing.of(number, work.job, share=share) for number, work in enumerate(works)]
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

    def arrive(self, numbers: Sequence[int], now: float) -> None:
        """These jobs are submitted."""
        for number in numbers:
            self._arrived[number] = True
        self._admit([number for number in numbers if not self._ended[number]], now)

    def started(self, number: int) -> Standing:
        """The job leaves the line. Returns it as it runs."""
        line = self.on_gpus if number in self.on_gpus else self.on_cpu
        line.remove(number)
        self._standings[number] = self._standings[number].started()
        return self._standings[number]

    def back(self, standing: Standing) -> None:
        """The job waits again, as said here."""
        self._standings[standing.number] = standing
        self._admit((standing.number,), standing.ready_at)

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

    def _admit(self, numbers: Sequence[int], now: float) -> None:
        """Puts those into their line that nothing else keeps from it."""
        on_gpus: list[WaitingJob] = []
        on_cpu: list[WaitingJob] = []
        for number in numbers:
            standing = self._standings[number]
            if self._blocked[number]:
                continue
            if standing.job.round > self._round:
                self._later[standing.job.round].append(number)
                continue
            if standing.ready_at < now:
                self._standings[number] = standing = standing.ready(now)
            (on_gpus if standing.gpus else on_cpu).append(
                standing.waiting(self._timeout, self._works[number].arrives_s)
            )
        self.news += bool(on_gpus or on_cpu)
        for line, jobs in ((self.on_gpus, on_gpus), (self.on_cpu, on_cpu)):
            if len(jobs) > 1:
                line.add_all(jobs)
            elif jobs:
                line.add(jobs[0])
