"""A job as the user means it, the jobs that it needs, and its round. Pure: no database, no processes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any

from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.options import did_you_mean

# A job as the user means it, and how it stands: plain frozen data, no database, no processes.


class JobState(StrEnum):
    """How a job stands in the queue."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A command to run on some GPUs.

    Attributes:
        name: unique within a queue; submitting the same name again goes on with the job that is there.
        argv: the command as an argument list; never seen by a shell.
        gpus: how many GPUs it needs; 0 for a job that runs on the CPU.
        nodes: how many machines it spans; it gets ``gpus`` GPUs on each. More than 1 is for a cluster's engine.
        cpus: CPU cores that it gets on each node, None for the engine's default (on this machine: its share).
        host_memory_mb: main memory that it gets on each node of a cluster, None for the engine's default.
        gpus_at_most: when it runs out of memory it is tried on more GPUs, up to so many; None for never more.
        memory_mb: free memory that it needs on each GPU, None if unknown.
        share: it may share its GPU with other jobs of this queue that say so too; ``memory_mb`` must be given.
        priority: higher runs first; equal priorities run in the order of submission.
        needs: names of jobs that must have succeeded before.
        round: jobs of a round start when none of an earlier round waits or runs any more, however those ended.
        cost: how long it is expected to take, in any unit that is the same for the whole queue (bytes of the model,
            say); None if unknown. With ``order="longest"`` the costly ones start first.
        family: jobs of one family are alike: the memory that one was seen to use is expected of the others.
        retries: how many further tries a failure that may pass (a crash, out of memory) gets.
        timeout_s: seconds after which the job is stopped; None for no limit.
        stage_timeout_s: seconds that it may stay in one stage of its progress; None for no limit.
        heartbeat_s: seconds that it may go without telling its progress (``engines.progress``); None for no limit.
        env: variables added to the job's environment.
        cwd: working directory, None for the dispatcher's.
        result: a file that exists when the job has succeeded; a job is done only while it is there. A relative path is
            one in ``cwd``.
        title: what progress lines call it, when that is not the name.
        identity: what its result depends on: a job that is done is done again when this changes. None: its command, the
            additions to its environment, and its working directory.
    """

    name: str
    argv: tuple[str, ...]
    gpus: int = 1
    nodes: int = 1
    cpus: int | None = None
    host_memory_mb: int | None = None
    gpus_at_most: int | None = None
    memory_mb: int | None = None
    share: bool = False
    priority: int = 0
    needs: tuple[str, ...] = ()
    round: int = 0
    cost: float | None = None
    family: str | None = None
    retries: int = 1
    timeout_s: float | None = None
    stage_timeout_s: float | None = None
    heartbeat_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    result: str | None = None
    title: str | None = None
    identity: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a job needs a name")
        if not self.name.isascii() and any("\ud800" <= character <= "\udfff" for character in self.name):
            raise UsageError(f"job name {self.name!r} is no UTF-8 text; give it another")
        if not self.argv:
            raise UsageError(f"job {self.name!r} has no command")
        if any("\0" in word for word in self.argv):
            raise UsageError(f"job {self.name!r}: an argument contains a NUL byte, which no program can be given")
        if self.gpus < 0:
            raise JobCannotFit(f"job {self.name!r} asks for {self.gpus} GPUs; the least is 0")
        for least in ("nodes", "cpus", "host_memory_mb"):
            value = getattr(self, least)
            if value is not None and value < 1:
                raise JobCannotFit(f"job {self.name!r} asks for {least}={value}; the least is 1")
        if self.gpus_at_most is not None and self.gpus_at_most < max(1, self.gpus):
            raise JobCannotFit(f"job {self.name!r} asks for {self.gpus} GPUs and at most {self.gpus_at_most}")
        if self.memory_mb is not None and self.memory_mb < 1:
            raise JobCannotFit(f"job {self.name!r} asks for {self.memory_mb} MB; the least is 1")
        if self.share and (self.gpus != 1 or self.memory_mb is None):
            raise UsageError(f"job {self.name!r}: share is for jobs on 1 GPU that say how much memory they need")
        if self.cost is not None and not 0 <= self.cost < math.inf:
            raise UsageError(f"job {self.name!r}: cost={self.cost}; it must be a finite number of 0 or more")
        if self.retries < 0:
            raise UsageError(f"job {self.name!r}: retries={self.retries}; the least is 0")
        for limit in ("timeout_s", "stage_timeout_s", "heartbeat_s"):
            value = getattr(self, limit)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"job {self.name!r}: {limit.removesuffix('_s')}={value} s; it must be above 0")


# name and default of each field; a spec holds the fields that differ.
_DEFAULTS = tuple(
    (each.name, each.default if each.default_factory is MISSING else each.default_factory()) for each in fields(Job)
)
_encode = json.JSONEncoder(separators=(",", ":")).encode


def spec_of(job: Job) -> str:
    """The job as JSON, without the fields that have their defaults: in the queue, and in a manifest for nodes."""
    values = {name: value for name, default in _DEFAULTS if (value := getattr(job, name)) != default}
    if job.env:
        values["env"] = dict(job.env)
    return _encode(values)


@lru_cache(maxsize=1024)
def job_of(spec: str) -> Job:
    """The job that ``spec_of`` was given."""
    values: dict[str, Any] = json.loads(spec)
    return Job(**{**values, "argv": tuple(values["argv"]), "needs": tuple(values.get("needs", ()))})


# Which jobs need which, and which round each is of: checks of a list of jobs, and what may run when. Pure.
#
# A job may run when all that it needs have succeeded, and when no job of an earlier round waits or runs any more,
# however those ended. One that needs a job that failed can't run any more. The queue keeps the same rules in its
# tables; ``Readiness`` keeps them in memory, for a replay in virtual time.

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
    hint = did_you_mean(need, itertools.islice(names, 1000), show=repr)
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
