"""What a simulation is given: machines, external users and jobs, from words, a job file or an earlier run."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from gpuherd.engines.local.process import Exit
from gpuherd.errors import ExitCode, UsageError
from gpuherd.gpus.state import Gpu
from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass, classify
from gpuherd.jobs.attempts.time_limits import LimitKind, Passed
from gpuherd.jobs.job import Job, check_needs, job_of
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.options import did_you_mean
from gpuherd.simulate.options import LONGEST_ATTEMPT_S, number
from gpuherd.units import duration_s, size_mb

if TYPE_CHECKING:
    from gpuherd.simulate.people import User

# What surrounds the jobs of a simulation, from words: machines (``8x80GB``), external users, the start time. Pure.
#
# A simulated GPU is the same plain data as a real one. All links between the GPUs of one machine are alike, as behind
# an NVSwitch; MIG instances are not simulated.

MOST_GPUS = 100_000
MONDAY = datetime(2024, 1, 1)

_GROUP = re.compile(r"(?:(\d{1,9})x)?(?:(\d{1,9})x)?(\d{1,9}(?:\.\d{1,3})?[gmt]i?b)", re.ASCII | re.IGNORECASE)
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME_OF_WEEK = re.compile(r"([A-Za-z]{3,9})(?:\s+(\d{1,2}):(\d\d))?", re.ASCII)
_BACKGROUND = ("busy", "mean", "barge")

Machine = tuple[Gpu, ...]


def machine(word: str) -> tuple[Machine, ...]:
    """One machine: ``8x80GB``, or ``4x24GB+2x80GB`` for GPUs of several kinds. Raises ValueError with a sentence.

    >>> [[gpu.total_mb for gpu in each] for each in machine("24GB+2x80GB")]
    [[24576, 81920, 81920]]
    """
    groups = [_group(part, word) for part in word.split("+")]
    if any(found[2] is not None for found in groups):
        raise ValueError(f"{word!r} is more than one machine; write --machines for those")
    return _build([[mb for gpus, mb, _ in groups for _ in range(gpus)]], word)


def machines(word: str) -> tuple[Machine, ...]:
    """Machines of one or several kinds: ``125x8x80GB``, ``2x8x80GB,4x4x24GB``. Raises ValueError with a sentence.

    >>> [len(each) for each in machines("2x8x80GB,4x24GB")]
    [8, 8, 4]
    """
    sizes: list[list[int]] = []
    for part in word.split(","):
        gpus, mb, count = _group(part, word)
        sizes += [[mb] * gpus] * (1 if count is None else count)
    return _build(sizes, word)


def _group(part: str, word: str) -> tuple[int, int, int | None]:
    """GPUs of a machine, MB of each, and the number of such machines (None when the word does not give it)."""
    found = _GROUP.fullmatch(part.strip())
    if found is None:
        raise ValueError(f"{word!r} describes no machine; write 8x80GB, 4x24GB+2x80GB, or --machines 125x8x80GB")
    first, second, size = found.groups()
    gpus = int(second or first or 1)
    count = int(first) if second is not None else None
    if gpus * (1 if count is None else count) > MOST_GPUS:
        raise ValueError(f"{word!r}: at most {MOST_GPUS} GPUs can be simulated")
    return gpus, size_mb(size), count


def _build(sizes: list[list[int]], word: str) -> tuple[Machine, ...]:
    total = sum(len(each) for each in sizes)
    if not 1 <= total <= MOST_GPUS or not all(sizes):
        raise ValueError(f"{word!r} has {total} GPUs; 1 to {MOST_GPUS} can be simulated")
    return tuple(
        tuple(
            Gpu(
                index=index,
                uuid=f"GPU-simulated-{node}-{index}",
                name=f"Simulated {mb / 1024:g}GB GPU",
                total_mb=mb,
                used_mb=0,
                free_mb=mb,
            )
            for index, mb in enumerate(each)
        )
        for node, each in enumerate(sizes)
    )


def start_time(word: str) -> datetime:
    """A day of the week, and a time of day if not midnight: ``Mon 08:30``, ``fri``. Raises ValueError with a sentence.

    >>> start_time("Tue 08:30") - MONDAY
    datetime.timedelta(days=1, seconds=30600)
    """
    found = _TIME_OF_WEEK.fullmatch(word.strip())
    day = found[1].lower()[:3] if found else ""
    hour, minute = (int(found[2] or 0), int(found[3] or 0)) if found else (0, 0)
    if day not in _DAYS or hour > 23 or minute > 59:
        raise ValueError(f'{word!r} is no time of the week; write "Mon 08:30"')
    return MONDAY + timedelta(days=_DAYS.index(day), hours=hour, minutes=minute)


# External users: people on the GPUs who don't use gpuherd. Their sessions are fixed by the seed and do not depend on
# our jobs, so that all variants that are compared meet the same ones. A session that finds one of our jobs on its GPU
# does not take place, unless it belongs to the share that starts without looking.


@dataclass(frozen=True, slots=True)
class Session:
    """An external user's use of a GPU, in seconds from the start. ``barges``: it starts also on a GPU in use."""

    start: float
    end: float
    barges: bool


class ExternalUsers(Protocol):
    """All external users of the GPUs."""

    def sessions(self, seed: int, gpu: str) -> Iterator[Session]:
        """Their sessions on the GPU with this UUID, in order of time."""


@dataclass(frozen=True, slots=True)
class Background:
    """External users with exponential lengths of sessions and pauses: share of time in which they would use each GPU,
    mean length of a session in seconds, share of sessions that barge in."""

    busy: float
    mean_s: float = 7200.0
    barge: float = 0.0

    def sessions(self, seed: int, gpu: str) -> Iterator[Session]:
        """Endless sessions on this GPU. The share of time in use is the same from second 0 on."""
        if self.busy == 0:
            return
        chance = Random(f"{seed}/{gpu}")  # noqa: S311 - a simulation, no secret
        pause_s = self.mean_s * (1 - self.busy) / self.busy
        # Exponential times have no memory, so a session that has begun before second 0 is as long as any.
        start = 0.0 if chance.random() < self.busy else chance.expovariate(1 / pause_s)
        while True:
            end = start + chance.expovariate(1 / self.mean_s)
            yield Session(start, end, chance.random() < self.barge)
            start = end + chance.expovariate(1 / pause_s)


def background(word: str) -> Background:
    """External users from ``busy=0.3,mean=2h,barge=0.1``. Raises ValueError with a sentence.

    >>> background("busy=0.3,mean=2h")
    Background(busy=0.3, mean_s=7200.0, barge=0.0)
    """
    given: dict[str, str] = {}
    for part in word.split(","):
        name, equals, value = part.partition("=")
        name = name.strip()
        if name not in _BACKGROUND or not equals:
            hint = did_you_mean(name, _BACKGROUND, "write busy=0.3,mean=2h,barge=0.1", show="{}=".format)
            raise ValueError(f"{part!r} is no setting of external users{hint}")
        if name in given:
            raise ValueError(f"{word!r} gives {name} twice")
        given[name] = value
    if "busy" not in given:
        raise ValueError(f"{word!r} lacks the share of time in which they use a GPU; write busy=0.3")
    busy = _share("busy", given["busy"])
    if busy > 0.99:
        raise ValueError(f"busy={given['busy']}: above 0.99 external users leave no time for jobs")
    return Background(busy, duration_s(given.get("mean", "2h")), _share("barge", given.get("barge", "0")))


def _share(name: str, word: str) -> float:
    return number(word, lambda value: 0 <= value <= 1, f"{name}={word} is not a share from 0 to 1")


# The work of a simulation: jobs, arrivals, lengths and failures; drawn, listed, or replayed from a run's queue.

# Distributions of times, as people write them: ``5m``, ``uniform:1m,10m``, ``lognormal:300,1``. A spread is plain data;
# the caller brings the random source, so that the same seed gives the same lengths.

# Kind -> names of its figures. They are times, but for those of _PURE_NUMBERS.
_KINDS = {
    "fixed": ("time",),
    "uniform": ("least", "most"),
    "exponential": ("mean",),
    "lognormal": ("median", "sigma of the logarithm"),
    "pareto": ("least", "exponent"),
}
_PURE_NUMBERS = ("sigma of the logarithm", "exponent")


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of seconds: its kind, and its figures, times in seconds."""

    kind: str
    figures: tuple[float, ...]

    def draw(self, chance: Random) -> float:
        """A length in seconds, 0 or more."""
        first = self.figures[0]
        if self.kind == "fixed":
            return first
        second = self.figures[-1]
        if self.kind == "uniform":
            drawn = chance.uniform(first, second)
        elif self.kind == "exponential":
            drawn = chance.expovariate(1 / first)
        elif self.kind == "lognormal":
            drawn = chance.lognormvariate(math.log(first), second)
        else:
            drawn = first * chance.paretovariate(second)
        return min(drawn, LONGEST_ATTEMPT_S)


def spread(word: str) -> Spread:
    """The distribution in the word. Raises ValueError with a sentence.

    >>> spread("5m"), spread("lognormal:5m,1")
    (Spread(kind='fixed', figures=(300.0,)), Spread(kind='lognormal', figures=(300.0, 1.0)))
    """
    kind, colon, rest = word.partition(":")
    if not colon:
        return Spread("fixed", (duration_s(word),))
    if kind not in _KINDS:
        raise ValueError(
            f"{kind!r} is no kind of distribution" + did_you_mean(kind, _KINDS, f"possible: {', '.join(_KINDS)}")
        )
    names, parts = _KINDS[kind], rest.split(",")
    if len(parts) != len(names):
        raise ValueError(f"{word!r}: {kind} takes {' and '.join(names)}, separated by a comma")
    figures = tuple(_figure(name, part, word) for name, part in zip(names, parts, strict=True))
    if kind == "uniform" and figures[0] > figures[1]:
        raise ValueError(f"{word!r}: the least is above the most")
    return Spread(kind, figures)


def _figure(name: str, part: str, word: str) -> float:
    if name not in _PURE_NUMBERS:
        return duration_s(part)
    return number(part, lambda value: 0 < value <= 100, f"{word!r}: the {name} must be a number above 0, at most 100")


# The work: jobs, the arrival of each, the length and end of each of its attempts. All random draws are made here,
# before the simulation begins, so that every variant that is compared gets the same work.

MOST_JOBS = 2_000_000
# Attempts beyond the retries of a job: after running out of memory it is tried on more GPUs, which costs no retry.
_MORE_TRIALS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """How long an attempt runs, and how it fails; None for a success."""

    seconds: float
    failure: FailureClass | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A job, the second of its arrival, and its attempts in order; the last stands for all later ones.

    Attributes:
        user: whose job it is, "" where there is one user.
        expected_s: how long its attempts are expected to run, for predictions; None where that is not known.
    """

    job: Job
    trials: tuple[Trial, ...]
    arrives_s: float = 0.0
    user: str = ""
    expected_s: float | None = None

    def trial(self, number: int) -> Trial:
        """The attempt with this number, from 0."""
        return self.trials[min(number, len(self.trials) - 1)]


@dataclass(frozen=True, slots=True)
class Mix(Generic[T]):
    """Values with weights: ``1:8,4:2`` is one GPU in eight cases of ten, four in two."""

    values: tuple[T, ...]
    weights: tuple[float, ...]

    def draw(self, chance: Random) -> T:
        """One of the values."""
        return self.values[0] if len(self.values) == 1 else chance.choices(self.values, self.weights)[0]


def mix(word: str, parse: Callable[[str], T]) -> Mix[T]:
    """The mix in the word; ``parse`` reads one value. Raises ValueError with a sentence.

    >>> mix("1:8,4:2", int)
    Mix(values=(1, 4), weights=(8.0, 2.0))
    """
    values, weights = [], []
    for part in word.split(","):
        value, colon, weight = part.partition(":")
        values.append(parse(value.strip()))
        message = f"{word!r}: the weight {weight!r} is not a number above 0; write 1:8,4:2"
        weights.append(number(weight, lambda value: 0 < value < math.inf, message) if colon else 1.0)
    return Mix(tuple(values), tuple(weights))


def failure_shares(word: str) -> Mapping[FailureClass, float]:
    """Shares of attempts that fail, by class: ``crash=0.02,gpu-fault=0.001``. Raises ValueError with a sentence.

    >>> dict(failure_shares("out-of-memory=0.1"))
    {<FailureClass.OUT_OF_MEMORY: 'out of memory'>: 0.1}
    """
    known = {each.value.lower().replace(" ", "-"): each for each in FailureClass}
    shares: dict[FailureClass, float] = {}
    for part in word.split(","):
        name, _, value = part.partition("=")
        name = name.strip().lower().replace(" ", "-").replace("_", "-")
        if name not in known:
            hint = did_you_mean(name, known, f"possible: {', '.join(known)}")
            raise ValueError(f"{name!r} is no class of failure{hint}")
        message = f"{part!r}: the share of attempts that fail like this is a number from 0 to 1"
        shares[known[name]] = number(value, lambda share: 0 <= share <= 1, message)
    if sum(shares.values()) > 1:
        raise ValueError(f"{word!r}: the shares add up to more than 1")
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How jobs are drawn.

    Attributes:
        seconds: how long a job runs; a number is seconds for each unit of the job's own ``cost``.
        gpus, memory_mb: GPUs of a job on each node, and MB on each GPU; None for no request.
        nodes: nodes of a job.
        every: time between two arrivals; None when all jobs arrive at the start.
        failures: share of attempts that fail, by class, each at a random moment.
        retries: further tries of a job.
        limits: time limit of a job as a multiple of its length; None for no limit.
        guess: error of a job's ``cost`` as an estimate of its length: sigma of the logarithm; 0 for the exact length.
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
    """``count`` jobs drawn by the recipe, in the order of their arrival."""
    if not 1 <= count <= MOST_JOBS:
        raise UsageError(f"{count} jobs; 1 to {MOST_JOBS} can be simulated")
    if not isinstance(recipe.seconds, Spread):
        raise UsageError("drawn jobs have no cost of their own; give their length: --seconds lognormal:300,1")
    return _arriving(
        (_draw(f"job-{index + 1}", recipe, recipe.seconds, chance) for index in range(count)), recipe, chance
    )


def _draw(name: str, recipe: Recipe, seconds: Spread, chance: Random) -> tuple[Job, tuple[Trial, ...]]:
    length = seconds.draw(chance)
    gpus = recipe.gpus.draw(chance)
    nodes = recipe.nodes.draw(chance)
    memory_mb = None if recipe.memory_mb is None or not gpus else recipe.memory_mb.draw(chance)
    job = Job(
        name=name,
        argv=("simulated",),
        gpus=gpus,
        nodes=nodes,
        memory_mb=memory_mb,
        retries=recipe.retries,
        timeout_s=None if recipe.limits is None else length * recipe.limits,
        cost=length * math.exp(chance.gauss(0, recipe.guess)) if recipe.guess else length,
    )
    return job, _trials(length, recipe.retries, recipe.failures, chance)


def _arriving(jobs: Iterable[tuple[Job, tuple[Trial, ...]]], recipe: Recipe | None, chance: Random) -> tuple[Work, ...]:
    """The jobs with the time of their arrival: at the start, or as the recipe says. Each arrival is drawn after its
    job, so that the same seed gives the same work."""
    works, arrives_s = [], 0.0
    for job, trials in jobs:
        works.append(Work(job, trials, arrives_s))
        if recipe is not None and recipe.every is not None:
            arrives_s += recipe.every.draw(chance)
    return tuple(works)


def listed(jobs: Sequence[Job], recipe: Recipe, chance: Random) -> tuple[Work, ...]:
    """Works for the jobs of a list: lengths, arrivals and failures by the recipe, requests by the jobs themselves.

    Raises UsageError when a length can't be determined, and for needs that name no job or go in a circle.
    """
    check_needs(jobs)

    def length_of(job: Job) -> float:
        if isinstance(recipe.seconds, Spread):
            return recipe.seconds.draw(chance)
        if job.cost is None:
            raise UsageError(f"job {job.name!r} has no cost to take its length from; give it one, or use --seconds 10m")
        return job.cost * recipe.seconds

    return _arriving(
        ((job, _trials(length_of(job), job.retries, recipe.failures, chance)) for job in jobs), recipe, chance
    )


def _trials(length: float, retries: int, failures: Mapping[FailureClass, float], chance: Random) -> tuple[Trial, ...]:
    """As many attempts as a job may need, each failing at random. Without failures one stands for all."""
    if not failures:
        return (Trial(length),)
    classes, shares = tuple(failures), tuple(failures.values())
    trials = []
    for _ in range(retries + 1 + _MORE_TRIALS):
        found = chance.choices((None, *classes), (1 - sum(shares), *shares))[0]
        trials.append(Trial(length if found is None else length * chance.random(), found))
    return tuple(trials)


# Work from a run folder's queue: its jobs, with the lengths and failures that their attempts had. It is only read, also
# while a dispatcher works on the folder.


@dataclass(frozen=True, slots=True)
class Recorded:
    """The jobs of a queue by age, and by a job's name those of its attempts that ended by themselves."""

    jobs: tuple[Job, ...]
    trials: Mapping[str, tuple[Trial, ...]]


def read_queue(path: Path) -> Recorded:
    """The jobs of the latest submission of a queue. Raises QueueUnreadable, UsageError where there is none."""
    with closing(QueueReader(path)) as reader, reader.snapshot():
        rows = reader.rows(
            "SELECT spec FROM jobs WHERE submission = (SELECT value FROM meta WHERE key = 'submission') ORDER BY id"
        )
        attempts = reader.rows(
            "SELECT j.name, a.state, a.class, a.ended_mono - a.started_mono - a.paused_s"
            " FROM attempts a JOIN jobs j ON j.id = a.job"
            " WHERE a.state IN ('done', 'failed') AND a.ended_mono IS NOT NULL ORDER BY a.id"
        )
    jobs = tuple(job_of(spec) for (spec,) in rows)
    names = {job.name for job in jobs}
    # Jobs of earlier submissions are not part of this one, nor are needs of them.
    jobs = tuple(replace(job, needs=tuple(need for need in job.needs if need in names)) for job in jobs)
    trials: dict[str, list[Trial]] = defaultdict(list)
    for name, state, failure, seconds in attempts:
        trials[name].append(Trial(max(0.0, seconds), None if state == "done" else _class(failure)))
    return Recorded(jobs, {name: tuple(found) for name, found in trials.items()})


def replayed(recorded: Recorded, recipe: Recipe | None, chance: Random) -> tuple[Work, ...]:
    """Work for every job: as recorded; else by the recipe; else the median length of its family, or of all jobs.

    Raises UsageError when there is no such length, and when there are no jobs.
    """
    if not recorded.jobs:
        raise UsageError("the queue holds no jobs")
    unknown = [job for job in recorded.jobs if job.name not in recorded.trials]
    drawn = {} if recipe is None else {work.job.name: work for work in _drawn(unknown, recipe, chance)}
    typical = _typical(recorded)

    def trials_of(job: Job) -> tuple[Trial, ...]:
        if job.name in recorded.trials:
            return recorded.trials[job.name]
        if job.name in drawn:
            return drawn[job.name].trials
        length = typical.get(job.family, typical.get(None))
        if length is None:
            raise UsageError(
                f"job {job.name!r} has not run yet, and no other has; give the length of jobs with --seconds 10m"
            )
        return (Trial(length),)

    return _arriving(((job, trials_of(job)) for job in recorded.jobs), recipe, chance)


def _drawn(jobs: list[Job], recipe: Recipe, chance: Random) -> tuple[Work, ...]:
    # Without needs: they may name jobs that have run, which are not among these.
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
    """A failure class of the queue; one that this gpuherd does not know counts as a crash."""
    return next((each for each in FailureClass if each.value == word), FailureClass.CRASH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is the same for all variants.

    Attributes:
        machines: the GPUs of each machine.
        works: the jobs.
        background: external users, None for none.
        seed: of the external users.
        starts_at: local time of second 0, for quiet hours.
        users: those who share the machine, each with the jobs that name them; () for one user alone.
    """

    machines: tuple[Machine, ...]
    works: tuple[Work, ...]
    background: ExternalUsers | None = None
    seed: int = 0
    starts_at: datetime = MONDAY
    users: tuple[User, ...] = ()


# What the code that classifies real failures is given for a simulated one: exit code, signal and log, by class.

_SIGNS = {
    FailureClass.BAD_INPUT: partial(classify, Exit(True, ExitCode.BAD_INPUT)),
    FailureClass.MISSING: partial(classify, Exit(True, ExitCode.MISSING)),
    FailureClass.OUT_OF_MEMORY: partial(classify, Exit(True, 1), "torch.OutOfMemoryError: CUDA out of memory."),
    FailureClass.GPU_FAULT: partial(classify, Exit(True, 1), "CUDA error: uncorrectable ECC error encountered"),
    FailureClass.DISK_FULL: partial(classify, Exit(True, 1), "OSError: [Errno 28] No space left on device"),
    FailureClass.CANNOT_WRITE: partial(classify, Exit(True, ExitCode.CANNOT_WRITE)),
    FailureClass.KILLED: partial(classify, Exit(True, signal=9)),
    FailureClass.TIMEOUT: partial(classify, Exit(True, signal=15), passed=Passed(LimitKind.WHOLE, 1.0)),
    FailureClass.NO_HEARTBEAT: partial(classify, Exit(True, signal=15), passed=Passed(LimitKind.HEARTBEAT, 1.0)),
    FailureClass.IDLE: partial(classify, Exit(True, signal=15), passed=Passed(LimitKind.IDLE, 1.0)),
    FailureClass.NO_RESULT: partial(classify, Exit(True, 0), missing_result="result"),
    FailureClass.NEVER_STARTED: partial(classify, Exit(False)),
    FailureClass.CRASH: partial(classify, Exit(True, 1), "RuntimeError: simulated"),
}


@cache
def diagnosis(failure: FailureClass) -> Diagnosis:
    """The diagnosis of an attempt that failed like this."""
    return _SIGNS[failure]()
