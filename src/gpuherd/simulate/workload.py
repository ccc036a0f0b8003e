"""What is to be done in a simulation: jobs, when each comes, how long each of its attempts runs, and how that ends.

Pure. All chance is used up here, before the simulation begins: every variant that is compared gets the very same work.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

from gpuherd.errors import UsageError
from gpuherd.jobs.failures import FailureClass
from gpuherd.jobs.job import Job
from gpuherd.jobs.needs import check_needs
from gpuherd.simulate.lengths import Spread

MOST_JOBS = 2_000_000
# Attempts beyond the retries of a job: out of memory is tried on more GPUs, which costs a job more attempts.
_MORE_TRIALS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """How long an attempt runs, and how it fails, None for a success."""

    seconds: float
    failure: FailureClass | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A job, the second in which it is submitted, and its attempts in order; the last stands for all later ones."""

    job: Job
    trials: tuple[Trial, ...]
    arrives_s: float = 0.0

    def trial(self, number: int) -> Trial:
        """The attempt with this number, from 0."""
        return self.trials[min(number, len(self.trials) - 1)]


@dataclass(frozen=True, slots=True)
class Mix(Generic[T]):
    """Several values with their weights: ``1:8,4:2`` for one GPU in eight cases of ten, four in two."""

    values: tuple[T, ...]
    weights: tuple[float, ...]

    def draw(self, chance: Random) -> T:
        """One of the values."""
        return self.values[0] if len(self.values) == 1 else chance.choices(self.values, self.weights)[0]


def mix(word: str, parse: Callable[[str], T]) -> Mix[T]:
    """What the word describes; ``parse`` reads one value. Raises ValueError with a sentence.

    >>> mix("1:8,4:2", int)
    Mix(values=(1, 4), weights=(8.0, 2.0))
    """
    values, weights = [], []
    for part in word.split(","):
        value, colon, weight = part.partition(":")
        values.append(parse(value.strip()))
        try:
            weights.append(float(weight) if colon else 1.0)
        except ValueError:
            weights.append(-1.0)
        if not 0 < weights[-1] < math.inf:
            raise ValueError(f"{word!r}: the weight {weight!r} is not a number above 0; write 1:8,4:2")
    return Mix(tuple(values), tuple(weights))


def failure_shares(word: str) -> Mapping[FailureClass, float]:
    """How often attempts fail: ``crash=0.02,gpu-fault=0.001``. Raises ValueError with a sentence.

    >>> dict(failure_shares("out-of-memory=0.1"))
    {<FailureClass.OUT_OF_MEMORY: 'out of memory'>: 0.1}
    """
    known = {each.value.lower().replace(" ", "-"): each for each in FailureClass}
    shares: dict[FailureClass, float] = {}
    for part in word.split(","):
        name, _, value = part.partition("=")
        name = name.strip().lower().replace(" ", "-").replace("_", "-")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"{name!r} is no class of failure"
                + (f"; did you mean {nearest[0]}?" if nearest else f": {', '.join(known)}")
            )
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise ValueError(f"{part!r}: the share of attempts that fail so is a number from 0 to 1")
        shares[known[name]] = share
    if sum(shares.values()) > 1:
        raise ValueError(f"{word!r}: the shares come to more than 1")
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How jobs are drawn.

    Attributes:
        seconds: how long a job runs; a number stands for so many seconds for each unit of the job's own ``cost``.
        gpus, memory_mb: GPUs that a job asks for, and MB on each; None for a job that does not say.
        nodes: nodes that it spans, with so many GPUs on each.
        every: time from one job's coming to the next; None when all are there from the start.
        failures: share of attempts that fail in each way, somewhere in the middle.
        retries: further tries of a job.
        limits: time limit of a job as a multiple of its length; None for no limit.
        guess: error of what a job says of its length (its ``cost``): sigma of the logarithm; 0 when it knows.
    """

    seconds: Spread | float
    gpus: Mix[int] = field(default_factory=lambda: Mix((1,), (1.0,)))
    nodes: Mix[int] = field(default_factory=lambda: Mix((1,), (1.0,)))
    memory_mb: Mix[int] | None = None
    every: Spread | None = None
    failures: Mapping[FailureClass, float] = field(default_factory=dict)
    retries: int = 1
    guess: float = 0.0
    limits: float | None = None


def drawn(count: int, recipe: Recipe, chance: Random) -> tuple[Work, ...]:
    """``count`` jobs after the recipe, in the order in which they come."""
    if not 1 <= count <= MOST_JOBS:
        raise UsageError(f"{count} jobs; 1 to {MOST_JOBS} can be simulated")
    if not isinstance(recipe.seconds, Spread):
        raise UsageError("drawn jobs have no cost of their own; say how long they run: --seconds lognormal:300,1")
    works, arrives_s = [], 0.0
    for number in range(count):
        length = recipe.seconds.draw(chance)
        gpus = recipe.gpus.draw(chance)
        nodes = recipe.nodes.draw(chance)
        memory_mb = None if recipe.memory_mb is None or not gpus else recipe.memory_mb.draw(chance)
        job = Job(
            name=f"job-{number + 1}",
            argv=("simulated",),
            gpus=gpus,
            nodes=nodes,
            memory_mb=memory_mb,
            retries=recipe.retries,
            timeout_s=None if recipe.limits is None else length * recipe.limits,
            cost=length * math.exp(chance.gauss(0, recipe.guess)) if recipe.guess else length,
        )
        works.append(Work(job, _trials(length, recipe.retries, recipe.failures, chance), arrives_s))
        if recipe.every is not None:
            arrives_s += recipe.every.draw(chance)
    return tuple(works)


def listed(jobs: Sequence[Job], recipe: Recipe, chance: Random) -> tuple[Work, ...]:
    """Works for the jobs of a list. How long they run, come and fail is the recipe's to say; what they ask for, theirs.

    Raises UsageError when a length can't be told, and for needs that name no job or go in a circle.
    """
    check_needs(jobs)
    works, arrives_s = [], 0.0
    for job in jobs:
        if isinstance(recipe.seconds, Spread):
            length = recipe.seconds.draw(chance)
        elif job.cost is not None:
            length = job.cost * recipe.seconds
        else:
            raise UsageError(f"job {job.name!r} has no cost to take its length from; give it one, or say --seconds 10m")
        works.append(Work(job, _trials(length, job.retries, recipe.failures, chance), arrives_s))
        if recipe.every is not None:
            arrives_s += recipe.every.draw(chance)
    return tuple(works)


def _trials(length: float, retries: int, failures: Mapping[FailureClass, float], chance: Random) -> tuple[Trial, ...]:
    """As many attempts as a job may need, each failing by chance. Without failures one stands for all."""
    if not failures:
        return (Trial(length),)
    classes, shares = tuple(failures), tuple(failures.values())
    trials = []
    for _ in range(retries + 1 + _MORE_TRIALS):
        found = chance.choices((None, *classes), (1 - sum(shares), *shares))[0]
        trials.append(Trial(length if found is None else length * chance.random(), found))
    return tuple(trials)
