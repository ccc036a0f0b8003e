"""Which jobs need which, and which round each is of: checks of a list of jobs, and what may run when. Pure.

A job may run when all that it needs have succeeded, and when no job of an earlier round waits or runs any more, however
those ended. One that needs a job that failed can't run any more. The queue keeps the same rules in its tables;
``Readiness`` keeps them in memory, for a replay in virtual time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job

_MOST_CIRCLES = 100


class BadNeeds(UsageError):
    """Jobs whose names, needs or rounds don't go together. ``faults``: each a sentence and the names of the jobs at
    fault, in the order in which the sentence names them.
    """

    def __init__(self, *faults: tuple[str, Sequence[str]]):
        super().__init__("; ".join(text for text, _ in faults))
        self.faults = tuple((text, tuple(jobs)) for text, jobs in faults)


def check_needs(jobs: Sequence[Job], known: Mapping[str, int] | None = None) -> None:
    """Checks needs and rounds of jobs that come together.

    Args:
        jobs: the newcomers.
        known: the round of each job that is there already, by name; newcomers may need those.

    Raises BadNeeds for a name given twice, a need that names no job (with the nearest name) or one of a later round,
    and circles (each named in full, up to ``_MOST_CIRCLES``).
    """
    there = known or {}
    by_name: dict[str, Job] = {}
    for job in jobs:
        if job.name in by_name:
            raise BadNeeds((f"two jobs are named {job.name!r}; a name is given once", [job.name]))
        by_name[job.name] = job
    for job in jobs:
        for need in job.needs:
            its_round = by_name[need].round if need in by_name else there.get(need)
            if its_round is None:
                raise BadNeeds((_no_such(job.name, need, (*by_name, *there)), [job.name]))
            if its_round > job.round:
                told = (
                    f"job {job.name!r} of round {job.round} needs {need!r} of round {its_round}, which starts only when"
                    f" round {job.round} has ended; give it the same round or a later one"
                )
                raise BadNeeds((told, [job.name]))
    circles = list(itertools.islice(_circles(by_name), _MOST_CIRCLES))
    if circles:
        raise BadNeeds(*((_in_a_circle(circle), circle[:-1]) for circle in circles))


def _in_a_circle(circle: Sequence[str]) -> str:
    return f"jobs need each other in a circle: {' needs '.join(repr(name) for name in circle)}"


def _no_such(job: str, need: str, names: Iterable[str]) -> str:
    import difflib  # slow to import, and seldom needed

    nearest = difflib.get_close_matches(need, list(names)[:1000], n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"job {job!r} needs {need!r}, and there is no such job{hint}"


def _circles(by_name: Mapping[str, Job]) -> Iterator[tuple[str, ...]]:
    """Circles of needs, the first name of each repeated at its end: so many that without one need of each there are
    none. Depth-first without recursion: chains may be long."""
    finished: set[str] = set()
    for root in (name for name, job in by_name.items() if job.needs):
        path: dict[str, None] = {}
        stack = [(root, iter(by_name[root].needs))] if root not in finished else []
        path[root] = None
        while stack:
            name, rest = stack[-1]
            need = next(rest, None)
            if need is None:
                stack.pop()
                del path[name]
                finished.add(name)
            elif need in path:
                names = list(path)
                yield (*names[names.index(need) :], need)
            elif need in by_name and need not in finished:
                path[need] = None
                stack.append((need, iter(by_name[need].needs)))


class Readiness:
    """Which jobs may run, as jobs end. ``ready``: those that may at the beginning.

    >>> jobs = [Job(name="a", argv=("x",)), Job(name="b", argv=("x",), needs=("a",)),
    ...         Job(name="c", argv=("x",), round=1)]
    >>> readiness = Readiness(jobs)
    >>> readiness.ready
    ('a',)
    >>> readiness.ended("a", succeeded=True)
    (('b',), ())
    >>> readiness.ended("b", succeeded=False)
    (('c',), ())
    """

    def __init__(self, jobs: Sequence[Job]):
        check_needs(jobs)
        self._jobs = {job.name: job for job in jobs}
        self._blocked = {job.name: len(set(job.needs)) for job in jobs}
        self._needed_by: dict[str, list[str]] = {}
        self._left: dict[int, int] = {}
        # Jobs of later rounds that need nothing any more, in order.
        self._later: dict[int, list[str]] = {}
        for job in jobs:
            self._left[job.round] = self._left.get(job.round, 0) + 1
            for need in set(job.needs):
                self._needed_by.setdefault(need, []).append(job.name)
        self._rounds = sorted(self._left)
        self._round = 0
        self.ready: tuple[str, ...] = self._admit([job.name for job in jobs if not job.needs])

    def ended(self, name: str, *, succeeded: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A job has ended for good.

        Returns the jobs that may run now and could not before, in order, and those that can't run any more.
        """
        freed: list[str] = []
        doomed: list[str] = []
        self._left[self._jobs[name].round] -= 1
        if succeeded:
            for dependent in self._needed_by.pop(name, ()):
                self._blocked[dependent] -= 1
                if self._blocked[dependent] == 0:
                    freed.append(dependent)
        else:
            doomed = self._doom(name)
        ready = self._admit(freed)
        return (*ready, *self._next_rounds()), tuple(doomed)

    def _doom(self, name: str) -> list[str]:
        doomed: list[str] = []
        stack = [name]
        while stack:
            for dependent in self._needed_by.pop(stack.pop(), ()):
                if self._blocked[dependent] > 0:
                    self._blocked[dependent] = -1  # never reaches 0 again: what else it needs no longer counts
                    self._left[self._jobs[dependent].round] -= 1
                    doomed.append(dependent)
                    stack.append(dependent)
        return doomed

    def _admit(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of these jobs, which need nothing any more, that are of the round that runs; the others are kept."""
        now = [name for name in names if self._jobs[name].round == self._current]
        for name in names:
            if self._jobs[name].round != self._current:
                self._later.setdefault(self._jobs[name].round, []).append(name)
        return tuple(now)

    def _next_rounds(self) -> tuple[str, ...]:
        before = self._current
        while self._round < len(self._rounds) - 1 and self._left[self._current] == 0:
            self._round += 1
        return () if self._current == before else tuple(self._later.pop(self._current, ()))

    @property
    def _current(self) -> int:
        return self._rounds[self._round] if self._rounds else 0
