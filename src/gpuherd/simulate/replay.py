"""Makes work of a run folder's queue: the jobs that are there, with the lengths and failures that their attempts had.

Reads only, and may read while a dispatcher works on the folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from gpuherd.errors import UsageError
from gpuherd.jobs.failures import FailureClass
from gpuherd.jobs.job import Job
from gpuherd.jobs.reader import QueueReader
from gpuherd.jobs.rows import job_of
from gpuherd.simulate.workload import Recipe, Trial, Work, listed


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a queue tells: its jobs by age, and by a job's name those of its attempts that ended by themselves."""

    jobs: tuple[Job, ...]
    trials: Mapping[str, tuple[Trial, ...]]


def read_queue(path: Path) -> Recorded:
    """The jobs of the latest submission of a queue. Raises QueueUnreadable, UsageError where there is none."""
    with closing(QueueReader(path)) as reader, reader.snapshot():
        rows = reader.rows(
            "SELECT spec FROM jobs WHERE submission = (SELECT value FROM meta WHERE key = 'submission') ORDER BY id"
        )
        paused = "a.paused_s" if reader.has("attempts", "paused_s") else "0"
        attempts = reader.rows(
            f"SELECT j.name, a.state, a.class, a.ended_mono - a.started_mono - {paused}"  # noqa: S608
            " FROM attempts a JOIN jobs j ON j.id = a.job"
            " WHERE a.state IN ('done', 'failed') AND a.ended_mono IS NOT NULL ORDER BY a.id"
        )
    jobs = tuple(job_of(spec) for (spec,) in rows)
    names = {job.name for job in jobs}
    # What earlier submissions left is not part of this one, nor are needs that only they had.
    jobs = tuple(replace(job, needs=tuple(need for need in job.needs if need in names)) for job in jobs)
    trials: dict[str, list[Trial]] = defaultdict(list)
    for name, state, failure, seconds in attempts:
        trials[name].append(Trial(max(0.0, seconds), None if state == "done" else _class(failure)))
    return Recorded(jobs, {name: tuple(found) for name, found in trials.items()})


def replayed(recorded: Recorded, recipe: Recipe | None, chance: Random) -> tuple[Work, ...]:
    """Work for every job: what was recorded of it; else as the recipe says; else as long as jobs of its family took, or
    as jobs took in general. Raises UsageError when there is nothing to go by, and when there are no jobs.
    """
    if not recorded.jobs:
        raise UsageError("the queue holds no jobs")
    unknown = [job for job in recorded.jobs if job.name not in recorded.trials]
    drawn = {} if recipe is None else {work.job.name: work for work in _drawn(unknown, recipe, chance)}
    typical = _typical(recorded)
    works, arrives_s = [], 0.0
    for job in recorded.jobs:
        if job.name in recorded.trials:
            trials = recorded.trials[job.name]
        elif job.name in drawn:
            trials = drawn[job.name].trials
        else:
            length = typical.get(job.family, typical.get(None))
            if length is None:
                raise UsageError(
                    f"job {job.name!r} has not run yet, and no other has; say how long jobs run with --seconds 10m"
                )
            trials = (Trial(length),)
        works.append(Work(job, trials, arrives_s))
        if recipe is not None and recipe.every is not None:
            arrives_s += recipe.every.draw(chance)
    return tuple(works)


def _drawn(jobs: list[Job], recipe: Recipe, chance: Random) -> tuple[Work, ...]:
    # Needs may name jobs that have run, which are not among these; they are checked with all jobs together.
    return listed([replace(job, needs=()) for job in jobs], recipe, chance)


def _typical(recorded: Recorded) -> dict[str | None, float]:
    """Median length of successful attempts by family, and of all of them under None."""
    lengths: dict[str | None, list[float]] = defaultdict(list)
    for job in recorded.jobs:
        for trial in recorded.trials.get(job.name, ()):
            if trial.failure is None:
                lengths[None].append(trial.seconds)
                if job.family is not None:
                    lengths[job.family].append(trial.seconds)
    return {family: median(found) for family, found in lengths.items()}


def _class(word: str | None) -> FailureClass:
    """A class as the queue has it; one that this gpuherd does not know counts as a crash."""
    return next((each for each in FailureClass if each.value == word), FailureClass.CRASH)
