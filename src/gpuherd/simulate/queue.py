"""The waiting jobs of a simulation, in the order in which a real queue hands them out."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

from gpuherd.jobs.scheduler.policy import Limits, WaitingJob, order_key
from gpuherd.simulate.state import Standing
from gpuherd.simulate.workload import Work

# The waiting jobs of a simulation in the order in which the queue hands them out.
#
# A real queue asks an index of its database; this one is a sorted list for each kind of job, with its head at the
# end, where taking and putting back is cheap. What comes first is ``policy.order_key``'s to say.

# The key of policy.order_key turned round: the larger is the earlier.
_Place = tuple[int, float, int]
# Jobs that ask for the same are alike: when the first of them can't start, neither can the others, unless a short one
# may borrow GPUs.
_Kind = tuple[int, int | None, bool, frozenset[str]]


class Line:
    """Waiting jobs in order. ``limits`` says by which order; nothing else of it is read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places: dict[_Kind, list[_Place]] = {}
        self._jobs: dict[int, WaitingJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: WaitingJob) -> None:
        """Puts one job in."""
        insort(self._places.setdefault(_kind(job), []), self._place(job))
        self._jobs[job.id] = job

    def add_all(self, jobs: Iterable[WaitingJob]) -> None:
        """Puts many in, which is faster than one at a time."""
        changed = set()
        for job in jobs:
            kind = _kind(job)
            self._places.setdefault(kind, []).append(self._place(job))
            self._jobs[job.id] = job
            changed.add(kind)
        for kind in changed:
            self._places[kind].sort()

    def remove(self, number: int) -> WaitingJob:
        """Takes out the job with this id. Raises KeyError when it does not wait."""
        job = self._jobs.pop(number)
        kind = _kind(job)
        places = self._places[kind]
        del places[bisect_left(places, self._place(job))]
        if not places:
            del self._places[kind]
        return job

    def head(self, count: int) -> list[WaitingJob]:
        """The first ``count`` of them."""
        if len(self._places) == 1:
            ordered = reversed(next(iter(self._places.values())))
        else:
            ordered = heapq.merge(*(reversed(places) for places in self._places.values()), reverse=True)
        return [self._jobs[-place[2]] for place in islice(ordered, max(0, count))]

    def head_of_kinds(self, gpus: int, beyond: int, sharing: int | None = None) -> list[WaitingJob]:
        """Of each kind the first: as many as could start on so many GPUs, and some beyond (``sharing``: of those that
        share). In no order."""
        found = []
        for kind, places in self._places.items():
            more = beyond if sharing is None or not kind[2] else sharing
            found += [self._jobs[-place[2]] for place in places[-(gpus // kind[0] + more) :]]
        return found

    def __contains__(self, number: int) -> bool:
        return number in self._jobs

    def _place(self, job: WaitingJob) -> _Place:
        priority, cost, number = order_key(job, self._limits)
        return (-priority, -cost, -number)


def _kind(job: WaitingJob) -> _Kind:
    return (job.gpus, job.memory_mb, job.share, job.avoid)


# The jobs of a simulation that have not ended: which wait, which are not yet ready to, and what an end sets free.
#
# It does in memory what ``jobs.queue`` does in its database: needs, rounds, back-off. It knows neither GPUs nor
# events.


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
