"""Estimates of remaining time, in seconds. Pure.

A running job that reports its progress is expected to go on at its pace so far: elapsed * (total - done) / done.
Another job is expected to take as long per unit of its cost as the jobs that are done; without a cost, their mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuherd.engines.progress import Progress


def job_eta_s(progress: Progress | None, elapsed_s: float) -> float | None:
    """Seconds until a running job is done, by its own progress; None while it has reported nothing to go by.

    >>> job_eta_s(Progress(25, 100), 10.0)
    30.0
    """
    if progress is None or not progress.total or not 0 < progress.done <= progress.total:
        return None
    return elapsed_s * (progress.total - progress.done) / progress.done


@dataclass(frozen=True, slots=True)
class Pace:
    """Run times of jobs that are done: ``done`` jobs took ``total_s``; of these the ones with a cost took ``costed_s``
    for ``cost``."""

    done: int = 0
    total_s: float = 0.0
    costed_s: float = 0.0
    cost: float = 0.0

    def after(self, run_s: float, cost: float | None) -> Pace:
        """With one more job that is done."""
        if not cost:
            return Pace(self.done + 1, self.total_s + run_s, self.costed_s, self.cost)
        return Pace(self.done + 1, self.total_s + run_s, self.costed_s + run_s, self.cost + cost)

    def expected_s(self, cost: float | None, jobs: int = 1) -> float:
        """Run time of ``jobs`` jobs, of this cost together; 0 while no job is done."""
        if cost is not None and self.cost > 0:
            return cost * self.costed_s / self.cost
        return jobs * self.total_s / self.done if self.done else 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting jobs: how many, how many of them with a known cost, and the sum of these costs."""

    jobs: int
    costed: int = 0
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Running:
    """A running job. ``eta_s``: by its own progress, None where it reports none."""

    elapsed_s: float
    cost: float | None = None
    eta_s: float | None = None


def run_eta_s(
    pace: Pace, waiting: Waiting, running: Iterable[Running], at_once: int, back_in_s: Iterable[float] = ()
) -> float | None:
    """Seconds until all jobs are done with ``at_once`` of them at a time; None while none is done.

    ``back_in_s``: after how many seconds each GPU that is left out for now comes back and takes one more job.

    >>> run_eta_s(Pace().after(10.0, 5.0), Waiting(2, costed=1, cost=50.0), [Running(4.0, cost=3.0)], at_once=1)
    112.0
    >>> run_eta_s(Pace(done=1, total_s=10.0), Waiting(10), (), at_once=1, back_in_s=[40.0])
    70.0
    """
    if not pace.done:
        return None
    there = tuple(running)
    work_s = pace.expected_s(None, waiting.jobs - waiting.costed)
    if waiting.costed:
        work_s += pace.expected_s(waiting.cost, waiting.costed)
    for job in there:
        work_s += max(0.0, pace.expected_s(job.cost) - job.elapsed_s) if job.eta_s is None else job.eta_s
    later = sorted(back_in_s)
    places = min(max(at_once, 0 if later else 1), waiting.jobs + len(there))
    begins = [*[0.0] * places, *later]
    ends = work_s + begins[0] if begins else work_s
    for number, begin in enumerate(begins):
        # All places that exist by then end together.
        if number and begin >= ends:
            break
        ends = (work_s + sum(begins[: number + 1])) / (number + 1)
    return ends
