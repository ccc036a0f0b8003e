"""When all will be done, by how long jobs took so far. Pure; seconds.

A job whose cost is known is expected to take as long for a unit of it as those that are done did; another one as long
as they took on average. What runs is expected to go on as it told, else for what its expected length leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """How long jobs took: ``done`` of them ``total_s`` in all, and those of known cost ``costed_s`` for ``cost``."""

    done: int = 0
    total_s: float = 0.0
    costed_s: float = 0.0
    cost: float = 0.0

    def after(self, run_s: float, cost: float | None) -> Pace:
        """When one more job is done."""
        if not cost:
            return Pace(self.done + 1, self.total_s + run_s, self.costed_s, self.cost)
        return Pace(self.done + 1, self.total_s + run_s, self.costed_s + run_s, self.cost + cost)

    def expected_s(self, cost: float | None, jobs: int = 1) -> float:
        """How long ``jobs`` jobs take, which cost so much together. 0 while none is done."""
        if cost is not None and self.cost > 0:
            return cost * self.costed_s / self.cost
        return jobs * self.total_s / self.done if self.done else 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many jobs wait, and how many of them are of known cost, which is ``cost`` in all."""

    jobs: int
    costed: int = 0
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A job that runs. ``left_s``: what follows from its own progress, None where it tells nothing."""

    elapsed_s: float
    cost: float | None = None
    left_s: float | None = None


def time_left(
    pace: Pace, waiting: Waiting, running: Iterable[Running], at_once: int, back_in_s: Iterable[float] = ()
) -> float | None:
    """Seconds until all is done with ``at_once`` jobs side by side; None while none is done.

    ``back_in_s``: after how many seconds each GPU that is left out for now comes back and takes one job more.

    >>> time_left(Pace().after(10.0, 5.0), Waiting(2, costed=1, cost=50.0), [Running(4.0, cost=3.0)], at_once=1)
    112.0
    >>> time_left(Pace(done=1, total_s=10.0), Waiting(10), (), at_once=1, back_in_s=[40.0])
    70.0
    """
    if not pace.done:
        return None
    there = tuple(running)
    ahead = pace.expected_s(None, waiting.jobs - waiting.costed)
    if waiting.costed:
        ahead += pace.expected_s(waiting.cost, waiting.costed)
    for job in there:
        left = max(0.0, pace.expected_s(job.cost) - job.elapsed_s)
        ahead += left if job.left_s is None else job.left_s
    later = sorted(back_in_s)
    places = min(max(at_once, 0 if later else 1), waiting.jobs + len(there))
    begins = [*[0.0] * places, *later]
    ends = ahead + begins[0] if begins else ahead
    for number, begin in enumerate(begins):
        # All places that are there by then end together.
        if number and begin >= ends:
            break
        ends = (ahead + sum(begins[: number + 1])) / (number + 1)
    return ends
