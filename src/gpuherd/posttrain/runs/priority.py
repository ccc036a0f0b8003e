"""Which of an experiment's jobs goes first, where several could: a function of the job, which a user can replace."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuherd.errors import UsageError
from gpuherd.posttrain.runs.plan import Phase, Step

_PHASES = {Phase.COLLECT: 2, Phase.TRAIN: 1, Phase.EVALUATE: 0}
_MOST = 2**31


@dataclass(frozen=True, slots=True)
class JobDescription:
    """A job, as a priority function sees it.

    Attributes:
        name: of the job in the queue.
        phase: collect, train or evaluate.
        algorithm, dataset, family: the combination; of a reference the algorithm is "reference".
        round_idx: from 0; 0 for the evaluation of a reference.
        rounds: how many there are.
        shard: of a collection.
    """

    name: str
    phase: str
    algorithm: str
    dataset: str
    family: str
    round_idx: int
    rounds: int
    shard: int = 0


TrainingJob = JobDescription  # the guide's name
Priority = Callable[[JobDescription], int]


def description_of(step: Step, rounds: int) -> JobDescription:
    """What a priority function is given."""
    number = 0 if step.round is None else step.round
    return JobDescription(
        step.name, step.phase.value, step.algorithm, step.dataset, step.family, number, rounds, step.shard
    )


def earlier_rounds_first(job: JobDescription) -> int:
    """The default: the higher, the earlier the round; within a round what others wait for goes first.

    (A guide that this follows has ``round_idx * 100`` and says that higher runs first: taken at its word, later rounds
    would. Here ``needs`` keeps the rounds of a combination in order whatever a function says.)

    >>> jobs = [JobDescription("x", phase, "PITA", "d", "f", number, 2) for number in (0, 1) for phase in Phase]
    >>> [earlier_rounds_first(job) for job in jobs]
    [2, 1, 0, -8, -9, -10]
    """
    return _PHASES[Phase(job.phase)] - 10 * job.round_idx


def priority_named(name: str | None) -> Priority:
    """The function of a dotted name, ``my_module.my_priority``; None: the default. Modules are found as Python finds
    them, and in the folder that the command is in.

    Raises UsageError: there is no such function.
    """
    if name is None:
        return earlier_rounds_first
    module, _, attribute = name.rpartition(".")
    if not module:
        raise UsageError(f"job_priority={name!r}: a dotted name, as in my_module.my_priority")
    found: Any = getattr(_imported(module, name), attribute, None)
    if not callable(found):
        raise UsageError(f"job_priority={name}: {module} has no function {attribute}")

    def checked(job: JobDescription) -> int:
        try:
            value = found(job)
        except Exception as problem:
            raise UsageError(f"job_priority={name}: {type(problem).__name__} for {job.name}: {problem}") from problem
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _MOST:
            raise UsageError(f"job_priority={name}: gave {value!r} for {job.name}; it gives a whole number")
        return value

    return checked


def _imported(module: str, name: str) -> Any:
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        return importlib.import_module(module)
    except Exception as problem:
        told = f"{type(problem).__name__}: {problem}"
        raise UsageError(f"job_priority={name}: {module} can't be imported: {told}") from problem
    finally:
        sys.path.remove(here)
