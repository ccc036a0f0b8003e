"""The waiting jobs of a simulation in the order in which the queue hands them out.

A real queue asks an index of its database; this one is a sorted list for each kind of job, with its head at the end,
where taking and putting back is cheap. What comes first is ``policy.order_key``'s to say.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import islice

from gpuherd.jobs.policy import Limits, WaitingJob, order_key

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
