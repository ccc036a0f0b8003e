"""A job, its options, and the checks of jobs that need each other. Pure: no database, no processes.

``Job`` is the only description of a job between the file or command line and the queue. Fields that people may write
declare themselves as options (``gpuherd.options``): such a field is the flag of ``gpuherd submit``, the key in
``jobs.yaml`` and the word in a ``#gpuherd`` line. The values that people gave travel as ``Given``, by field name, until
the job is complete: a file's line may leave out the name, and a model's memory plan may set GPUs and memory.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any

from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.options import did_you_mean, option, option_fields
from gpuherd.units import amount, count, duration_s, gpu_range, positive_int, size_mb, whole_number

LONGEST_NAME = 200


class JobState(StrEnum):
    """The state of a job in the queue."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


# --- words of options ---------------------------------------------------------------------------------------------


def job_name(word: str) -> str:
    """A job's name: printable, without blanks and commas, so that ``needs=a,b`` can list names, and not like a flag."""
    if not word or len(word) > LONGEST_NAME or not word.isprintable() or "," in word or " " in word:
        raise ValueError(f"{word!r} is no name; write up to {LONGEST_NAME} letters, without blanks and commas")
    if word.startswith("-"):
        raise ValueError(f"{word!r} is no name: one that begins with - would be taken for a flag")
    return word


def job_names(word: str) -> tuple[str, ...]:
    """Names, separated by commas."""
    return tuple(job_name(name.strip()) for name in word.split(","))


def model_name(word: str) -> str:
    """A model's name or path."""
    if not word or not word.isprintable():
        raise ValueError(f"{word!r} is no model; write a known name, a Hugging Face id or a path")
    return word


def path_name(word: str) -> str:
    """A path that a system call can take."""
    if not word or "\0" in word:
        raise ValueError(f"{word!r} is no path")
    return word


# --- the job ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A command to run on some GPUs.

    Attributes:
        name: unique within a queue; submitting the same name again continues the existing job.
        argv: the command as an argument list; no shell reads it.
        gpus: how many GPUs it needs; 0 for a job that runs on the CPU. A range is written 1-4 (``gpus_at_most``).
        gpus_at_most: after running out of memory it is tried on more GPUs, up to this many; None for never more.
        memory_mb: free memory that it needs on each GPU, None if unknown.
        nodes: how many machines it spans; it gets ``gpus`` GPUs on each. More than 1 needs a cluster's engine.
        cpus: CPU cores that it gets on each node, None for the engine's default (on this machine: its share).
        host_memory_mb: main memory that it gets on each node, None for the engine's default.
        share: it may share its GPU with other jobs of this queue that allow it, too; needs ``memory_mb``.
        priority: higher runs first; equal priorities run in the order of submission.
        needs: names of jobs that must have succeeded before.
        timeout_s: seconds after which the job is stopped; None for no limit.
        stage_timeout_s: seconds that it may stay in one stage of its progress; None for no limit.
        heartbeat_s: seconds that it may go without reporting progress (``engines.progress``); None for no limit.
        retries: further tries after a failure that may pass (a crash, out of memory).
        round: jobs of a round start when no job of an earlier round waits or runs, however those ended.
        cost: expected duration, in any unit that is the same for the whole queue (bytes of the model, say); None if
            unknown. With ``order="longest"`` the costly ones start first.
        family: jobs of one family are alike: the memory that one used is expected of the others.
        project: what its GPU hours are counted for; None for that of the run.
        cwd: working directory, None for the dispatcher's.
        result: a file that exists when the job has succeeded; a job is done only while it exists. A relative path is
            one in ``cwd``.
        env: variables added to the job's environment.
        title: its name in progress lines, if not ``name``.
        identity: what its result depends on: a job that is done runs again when this changes. None: its command, the
            additions to its environment, and its working directory.
    """

    argv: tuple[str, ...]
    gpus: int = option(
        1,
        help="GPUs that the job gets, or 1-4 for up to 4 of them after it ran out of memory",
        name="num_gpus",
        key="gpus",
        parse=gpu_range,
        metavar="N",
        group="job",
    )
    gpus_at_most: int | None = None
    memory_mb: int | None = option(
        None,
        help="free memory that it needs on each GPU, like 20GB",
        name="mem",
        parse=size_mb,
        metavar="SIZE",
        group="job",
    )
    nodes: int = option(
        1,
        help="machines of a cluster that it spans, with as many GPUs on each",
        parse=positive_int,
        metavar="N",
        group="job",
    )
    cpus: int | None = option(
        None,
        help="CPU cores that it gets on each node; on this machine the number of threads for numeric libraries",
        parse=positive_int,
        metavar="N",
        group="job",
    )
    host_memory_mb: int | None = option(
        None,
        help="main memory that it gets on each node, like 64GB; on this machine that much must be installed",
        name="host_mem",
        parse=size_mb,
        metavar="SIZE",
        group="job",
    )
    share: bool = option(
        False, help="it may share its GPU with jobs that allow it, too, and give their --mem", group="job"
    )
    priority: int = option(0, help="higher runs first", parse=whole_number, metavar="N", group="job")
    name: str = option(help="the job's name (default: a number)", parse=job_name, metavar="NAME", group="job")
    needs: tuple[str, ...] = option(
        (), help="jobs that must have succeeded before, like a,b", parse=job_names, metavar="NAMES", group="job"
    )
    timeout_s: float | None = option(
        None,
        help="stop it after this time, like 90s or 2h",
        name="timeout",
        parse=duration_s,
        metavar="TIME",
        group="job",
    )
    stage_timeout_s: float | None = option(
        None,
        help="stop it when one stage of its progress takes longer",
        name="stage_timeout",
        parse=duration_s,
        metavar="TIME",
        group="job",
    )
    heartbeat_s: float | None = option(
        None,
        help="stop it when it reports no progress for this time",
        name="heartbeat",
        parse=duration_s,
        metavar="TIME",
        group="job",
    )
    retries: int = option(1, help="further tries after a failure that may pass", parse=count, metavar="N", group="job")
    round: int = option(
        0, help="it waits until all jobs of lower rounds have ended", parse=count, metavar="N", group="job"
    )
    cost: float | None = option(
        None, help="expected duration, in any unit; see --order longest", parse=amount, metavar="X", group="job"
    )
    family: str | None = option(
        None, help="jobs of one family are expected to use as much memory", parse=job_name, metavar="NAME", group="job"
    )
    project: str | None = option(
        None,
        help="what it belongs to, for gpuherd usage (default: the name of the run's folder)",
        parse=job_name,
        metavar="NAME",
        group="job",
    )
    cwd: str | None = option(
        None, help="folder that it runs in (default: this one)", parse=path_name, metavar="DIR", group="job"
    )
    result: str | None = option(
        None, help="a file that exists when it has succeeded", parse=path_name, metavar="FILE", group="job"
    )
    env: Mapping[str, str] = field(default_factory=dict)
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


# --- a job that names its model in place of its GPUs --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUse:
    """The model that a job loads, and how; None where the job leaves it to the planner, which checks the words.

    Attributes:
        model: a known name, a Hugging Face id, a folder or a file.
        dtype: the data type of the weights in memory.
        batch: sequences at once.
        prompt_tokens, new_tokens: the longest prompt and answer.
        parallel: how the model is split over several GPUs.
        gpus: at least and at most so many GPUs.
        memory_mb: free memory that the job asks for on each GPU, whatever the plan needs.
    """

    model: str = option(
        help="the model that it loads: its memory plan sets the job's GPUs and memory",
        parse=model_name,
        metavar="MODEL",
        group="model",
    )
    dtype: str | None = option(
        None,
        help="data type of the weights: fp32, bf16, fp16, int8, nf4, nf4-dq (default: the checkpoint's)",
        metavar="DTYPE",
        group="model",
    )
    batch: int | None = option(
        None, help="sequences at once (default: 1)", parse=positive_int, metavar="B", group="model"
    )
    prompt_tokens: int | None = option(
        None, help="most tokens of a prompt (default: 512)", parse=positive_int, metavar="P", group="model"
    )
    new_tokens: int | None = option(
        None, help="most tokens of an answer (default: 64)", parse=positive_int, metavar="N", group="model"
    )
    parallel: str | None = option(
        None,
        help="over several GPUs: auto (the fewest that hold it), layers, tensor, or replica (one GPU)",
        metavar="HOW",
        group="model",
    )
    gpus: tuple[int, int] | None = None
    memory_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What a model's plan asks for: GPUs, and MB free on each.

    ``family`` is one name for all jobs that use a model in the same way; ``sentence`` is for people.
    """

    gpus: int
    memory_mb: int
    family: str
    sentence: str


# Raises a GpuherdError for a model that can't be found, or that fits nowhere.
Planner = Callable[[ModelUse], Need]
# Values of options by field name of Job and ModelUse, ``gpus`` as least and most, and ``env``. A name that is not in it
# was not given.
Given = Mapping[str, Any]

_OF_MODEL = tuple(declared.name for declared, _ in option_fields(ModelUse))


def model_use(given: Given) -> ModelUse | None:
    """The model that a job names; None without one. Raises UsageError for options of a model without the model."""
    words = {name: given[name] for name in _OF_MODEL if name in given}
    if "model" in words:
        return ModelUse(gpus=given.get("gpus"), memory_mb=given.get("memory_mb"), **words)
    for name in words:
        raise UsageError(f"{name.replace('_', '-')} is said of a model, and no model is named")
    return None


def job_fields(given: Given, *, gpus: int = 1, retries: int = 1, planner: Planner | None = None) -> dict[str, Any]:
    """The fields of the ``Job`` that these options describe, but for those that are neither given nor planned.

    Args:
        gpus, retries: for a job that doesn't give them.
        planner: sets GPUs, memory and family of a job that names a model; memory, family and a range of GPUs that are
            given count.

    Raises UsageError for options that don't go together, and what the planner raises.
    """
    least, most = given.get("gpus", (gpus, gpus))
    values = {"retries": retries} | without_model(given)
    use = model_use(given)
    if use is not None:
        if planner is None:
            raise UsageError("the job names a model, and nothing here can plan it")
        need = planner(use)
        least, most = need.gpus, most if "gpus" in given else need.gpus
        values = {"memory_mb": need.memory_mb, "family": need.family} | values
    return values | {"gpus": least, "gpus_at_most": most if most > least else None}


def without_model(given: Given) -> dict[str, Any]:
    """These options without those that describe a model."""
    return {name: value for name, value in given.items() if name not in _OF_MODEL}


# --- jobs that need each other ------------------------------------------------------------------------------------
#
# A job may run when all jobs that it needs have succeeded, and when no job of an earlier round waits or runs, however
# those ended. One that needs a failed job can't run any more.

_MOST_CIRCLES = 100


class BadNeeds(UsageError):
    """Jobs whose names, needs or rounds contradict each other.

    ``faults``: for each a sentence and the names of the jobs at fault, in the order in which the sentence names them.
    """

    def __init__(self, *faults: tuple[str, Sequence[str]]):
        super().__init__("; ".join(text for text, _ in faults))
        self.faults = tuple((text, tuple(jobs)) for text, jobs in faults)


def check_needs(jobs: Sequence[Job], known: Mapping[str, int] | None = None) -> None:
    """Checks needs and rounds of jobs that are added together.

    Args:
        jobs: the new jobs.
        known: the round of each job in the queue, by name; new jobs may need those.

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
                text = (
                    f"job {job.name!r} of round {job.round} needs {need!r} of round {its_round}, which starts only when"
                    f" round {job.round} has ended; give it the same round or a later one"
                )
                raise BadNeeds((text, [job.name]))
    circles = list(itertools.islice(_circles(by_name), _MOST_CIRCLES))
    if circles:
        raise BadNeeds(*((_in_a_circle(circle), circle[:-1]) for circle in circles))


def _in_a_circle(circle: Sequence[str]) -> str:
    return f"jobs need each other in a circle: {' needs '.join(repr(name) for name in circle)}"


def _no_such(job: str, need: str, names: Iterable[str]) -> str:
    hint = did_you_mean(need, itertools.islice(names, 1000), show=repr)
    return f"job {job!r} needs {need!r}, and there is no such job{hint}"


def _circles(by_name: Mapping[str, Job]) -> Iterator[tuple[str, ...]]:
    """Circles of needs, the first name of each repeated at its end. Removing one need of each leaves no circle.

    Depth-first without recursion: chains may be long.
    """
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
