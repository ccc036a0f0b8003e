"""The state of a simulation: events in virtual time, the jobs that have not ended, and the run. It knows no GPUs."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from gpuherd.jobs.attempts.complete import next_try
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.completion import Observed
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.scheduler.memory import could_share
from gpuherd.jobs.scheduler.ordering import order_key, rank
from gpuherd.jobs.scheduler.types import Limits, WaitingJob
from gpuherd.simulate.results import Ending, FinishedAttempt, History, Visit
from gpuherd.simulate.workload import Machine, Trial, Work, diagnosis


class EventQueue:
    """Events to come, by their second, then by the order in which they were added. ``now``: second of the last event.

    >>> events = EventQueue()
    >>> events.at(2.0, print, "two")
    >>> events.at(1.0, print, "one")
    >>> events.step()
    one
    >>> events.now
    1.0
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._counter = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    def at(self, time: float, event: Callable[..., None], *arguments: Any) -> None:
        """Calls ``event`` at this second."""
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, event, arguments))

    def wake_at(self, time: float | None) -> None:
        """Adds an event that does nothing, so that a decision follows at this second; None adds none."""
        if time is not None:
            self.at(time, lambda: None)

    def step(self) -> None:
        """Handles all events of the next second that has any. Raises IndexError without events."""
        self.now = self._events[0][0]
        while self._events and self._events[0][0] <= self.now:
            _, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)


# The negated key of policy.order_key: the larger goes first.
_Place = tuple[int, float, int]
# Jobs with the same requests: when the first of them can't start, the others can't either, unless a short one may
# backfill.
_Kind = tuple[int, int | None, bool, frozenset[str]]


class WaitingJobs:
    """Waiting jobs in the order of ``policy.order_key``; of ``limits`` only the order is read.

    A real queue uses an index of its database. This one is a sorted list for each kind of job with the first job at
    its end, where adding and removing is cheap.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places: dict[_Kind, list[_Place]] = {}
        self._jobs: dict[int, WaitingJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, number: int) -> bool:
        return number in self._jobs

    def add(self, jobs: Sequence[WaitingJob]) -> None:
        """Adds jobs. Many at once are sorted once."""
        changed = set()
        for job in jobs:
            kind = _kind(job)
            places = self._places.setdefault(kind, [])
            self._jobs[job.id] = job
            if len(jobs) == 1:
                insort(places, self._place(job))
                return
            places.append(self._place(job))
            changed.add(kind)
        for kind in changed:
            self._places[kind].sort()

    def remove(self, number: int) -> None:
        """Removes the job with this id. Raises KeyError when it does not wait."""
        job = self._jobs.pop(number)
        kind = _kind(job)
        places = self._places[kind]
        del places[bisect_left(places, self._place(job))]
        if not places:
            del self._places[kind]

    def head(self, count: int) -> list[WaitingJob]:
        """The first ``count`` jobs."""
        if len(self._places) == 1:
            ordered = reversed(next(iter(self._places.values())))
        else:
            ordered = heapq.merge(*(reversed(places) for places in self._places.values()), reverse=True)
        return [self._jobs[-place[2]] for place in islice(ordered, max(0, count))]

    def first_of_kinds(self, gpus: int, beyond: int, sharing: int | None = None) -> list[WaitingJob]:
        """The first jobs of each kind, in no order: as many as could start on ``gpus`` GPUs, and ``beyond`` more.

        ``sharing``: in place of ``beyond`` for jobs that share.
        """
        found = []
        for kind, places in self._places.items():
            more = beyond if sharing is None or not kind[2] else sharing
            found += [self._jobs[-place[2]] for place in places[-(gpus // kind[0] + more) :]]
        return found

    def kinds(self) -> list[tuple[int, int | None, int]]:
        """GPUs and memory of each kind of job, and how many of it wait."""
        return [(kind[0], kind[1], len(places)) for kind, places in self._places.items()]

    def _place(self, job: WaitingJob) -> _Place:
        priority, cost, number = order_key(job, self._limits)
        return (-priority, -cost, -number)


def _kind(job: WaitingJob) -> _Kind:
    return (job.gpus, job.memory_mb, job.share, job.avoid)


class JobQueue:
    """All jobs, by number from 0, with their needs, rounds, retries and back-off: ``jobs.queue`` in memory.

    Args:
        share: all jobs that could share a GPU do; else only those that request it.
        timeout_s: time limit of jobs that have none of their own.

    Attributes:
        on_gpus, on_cpu: the jobs that could start now.
        done, failed, cancelled, unfinished: numbers of jobs.
        additions: how often jobs have been added to ``on_gpus`` or ``on_cpu``.
    """

    def __init__(self, works: Sequence[Work], limits: Limits, *, share: bool, timeout_s: float | None = None):
        self.on_gpus = WaitingJobs(limits)
        self.on_cpu = WaitingJobs(limits)
        self.done = self.failed = self.cancelled = 0
        self.unfinished = len(works)
        self.additions = 0
        self._works = works
        self._timeout_s = timeout_s
        self._arrived = [False] * len(works)
        self._ended = [False] * len(works)
        self._starts = [0] * len(works)
        self._jobs: list[QueuedJob] = []
        for number, work in enumerate(works):
            job = replace(work.job, share=True) if share and could_share(work.job) else work.job
            place = rank(job.cost, work.arrives_s)
            self._jobs.append(QueuedJob(number, job, 0, 0, 0.0, frozenset(), work.arrives_s, rank=place))
        by_name = {work.job.name: number for number, work in enumerate(works)}
        self._blocked = [len(set(work.job.needs)) for work in works]
        self._dependents: dict[int, list[int]] = defaultdict(list)
        # How many jobs of each round have not ended, and the jobs that wait for the end of an earlier round.
        self._rounds: dict[int, int] = defaultdict(int)
        self._later: dict[int, list[int]] = defaultdict(list)
        for number, work in enumerate(works):
            self._rounds[work.job.round] += 1
            for need in set(work.job.needs):
                self._dependents[by_name[need]].append(number)
        self._round = min(self._rounds, default=0)

    @property
    def waiting(self) -> int:
        """How many jobs could start now if there were room."""
        return len(self.on_gpus) + len(self.on_cpu)

    def arrive(self, numbers: Sequence[int], now: float) -> None:
        """These jobs are submitted."""
        for number in numbers:
            self._arrived[number] = True
        self._admit([number for number in numbers if not self._ended[number]], now)

    def start(self, number: int) -> QueuedJob:
        """The job waits no more. Returns it as it runs."""
        (self.on_gpus if number in self.on_gpus else self.on_cpu).remove(number)
        self._starts[number] += 1
        return self._jobs[number]

    def limit_s(self, queued: QueuedJob) -> float | None:
        """The job's time limit, None without one."""
        return queued.job.timeout_s or self._timeout_s

    def trial(self, queued: QueuedJob) -> Trial:
        """The attempt that ``start`` started, cut off by the job's time limit."""
        trial, limit_s = self._works[queued.id].trial(self._starts[queued.id] - 1), self.limit_s(queued)
        if limit_s is not None and trial.seconds > limit_s:
            return Trial(limit_s, FailureClass.TIMEOUT)
        return trial

    def put_back(self, queued: QueuedJob) -> None:
        """The job waits again, from its ``ready_at`` on."""
        self._jobs[queued.id] = queued
        self._admit((queued.id,), queued.ready_at)

    def requeue(self, queued: QueuedJob, now: float) -> None:
        """The job waits again at once, without losing a try."""
        self.put_back(replace(queued, ready_at=now))

    def succeed(self, number: int, now: float) -> None:
        """The job is done; jobs that needed it may now wait."""
        self.done += 1
        self._end(number, now)
        freed = []
        for dependent in self._dependents[number]:
            self._blocked[dependent] -= 1
            if not self._blocked[dependent] and self._arrived[dependent]:
                freed.append(dependent)
        self._admit(freed, now)

    def fail(self, queued: QueuedJob, failure: FailureClass, seen: Observed, now: float) -> QueuedJob | None:
        """The job as it will wait for its next try, to be ``put_back`` at its ``ready_at``; None when it has failed for
        good."""
        again = next_try(queued, diagnosis(failure), seen, now)
        if again is None:
            self.give_up(queued.id, now)
            return None
        return replace(
            queued,
            tries=queued.tries + again.costs_try,
            avoid=again.avoid,
            ready_at=again.not_before,
            adapted=again.request,
        )

    def give_up(self, number: int, now: float) -> None:
        """The job has failed for good; jobs that need it are cancelled."""
        self.failed += 1
        self._end(number, now)
        orphaned = list(self._dependents[number])
        while orphaned:
            dependent = orphaned.pop()
            if not self._ended[dependent]:
                self.cancelled += 1
                self._end(dependent, now)
                orphaned += self._dependents[dependent]

    def _end(self, number: int, now: float) -> None:
        self._ended[number] = True
        self.unfinished -= 1
        self._rounds[self._works[number].job.round] -= 1
        while not self._rounds[self._round] and self.unfinished:
            del self._rounds[self._round]
            self._round = min(self._rounds)
            self._admit([each for each in self._later.pop(self._round, []) if not self._ended[each]], now)

    def _admit(self, numbers: Sequence[int], now: float) -> None:
        """Adds those of the jobs to the waiting ones that no need and no earlier round holds up."""
        on_gpus: list[WaitingJob] = []
        on_cpu: list[WaitingJob] = []
        for number in numbers:
            queued = self._jobs[number]
            if self._blocked[number]:
                continue
            if queued.job.round > self._round:
                self._later[queued.job.round].append(number)
                continue
            if queued.ready_at < now:
                self._jobs[number] = queued = replace(queued, ready_at=now)
            job = self._waiting(queued)
            (on_gpus if job.gpus else on_cpu).append(job)
        self.additions += bool(on_gpus or on_cpu)
        self.on_gpus.add(on_gpus)
        self.on_cpu.add(on_cpu)

    def _waiting(self, queued: QueuedJob) -> WaitingJob:
        request, job = queued.request, queued.job
        return WaitingJob(
            queued.id,
            request.gpus,
            request.memory_mb,
            job.priority,
            queued.avoid,
            request.share,
            queued.rank,
            self.limit_s(queued),
            job.nodes,
        )


_PROGRESS_EVERY_STEPS = 256


class VirtualRun:
    """One run of the works in virtual time, which subclasses complete. Use: ``run`` once."""

    def __init__(
        self, machines: Sequence[Machine], works: Sequence[Work], jobs: JobQueue, events: EventQueue | None = None
    ):
        self._machines = machines
        self._works = works
        self._jobs = jobs
        self._events = EventQueue() if events is None else events
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
        return self._history()

    def _history(self) -> History:
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
            self._events.at(time, self._arrive, numbers)

    def _arrive(self, numbers: Sequence[int]) -> None:
        self._jobs.arrive(numbers, self._now)

    def _record(
        self,
        queued: QueuedJob,
        gpus: tuple[int, ...],
        start: float,
        ending: Ending,
        failure: FailureClass | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """Records an attempt that ends now."""
        wait_s = start - queued.ready_at
        self._attempts.append(FinishedAttempt(queued.id, gpus, start, self._now, wait_s, ending, failure, shared))

    def _refuse(self, queued: QueuedJob, reason: str) -> None:
        """The job could never run."""
        self._refused[queued.id] = reason
        self._jobs.give_up(queued.id, self._now)

    def _after_step(self) -> None:
        """Follows the events of each second."""

    def _is_stuck(self) -> bool:
        """Whether no waiting job will ever start."""
        return False

    def _visits(self) -> tuple[Visit, ...]:
        return ()
