"""The waiting jobs of a simulation in the order in which the queue hands them out.

A real queue asks an index of its database; this one is a sorted list with its head at the end, where taking and putting
back is cheap. What comes first is ``policy.order_key``'s to say.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from gpuherd.jobs.policy import Limits, WaitingJob, order_key

# The key of policy.order_key turned round: the larger is the earlier.
_Place = tuple[int, float, int]


class Line:
    """Waiting jobs in order. ``limits`` says by which order; nothing else of it is read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places: list[_Place] = []
        self._jobs: dict[int, WaitingJob] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, job: WaitingJob) -> None:
        """Puts one job in."""
        insort(self._places, self._place(job))
        self._jobs[job.id] = job

    def add_all(self, jobs: Iterable[WaitingJob]) -> None:
        """Puts many in, which is faster than one at a time."""
        for job in jobs:
            self._places.append(self._place(job))
            self._jobs[job.id] = job
        self._places.sort()

    def remove(self, number: int) -> WaitingJob:
        """Takes out the job with this id. Raises KeyError when it does not wait."""
        job = self._jobs.pop(number)
        del self._places[bisect_left(self._places, self._place(job))]
        return job

    def head(self, count: int) -> list[WaitingJob]:
        """The first ``count`` of them."""
        if count <= 0:
            return []
        return [self._jobs[-place[2]] for place in reversed(self._places[-count:])]

    def __contains__(self, number: int) -> bool:
        return number in self._jobs

    def _place(self, job: WaitingJob) -> _Place:
        priority, cost, number = order_key(job, self._limits)
        return (-priority, -cost, -number)
