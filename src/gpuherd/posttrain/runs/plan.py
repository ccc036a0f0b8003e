"""Algorithm x data set x model pair x round becomes steps: collect, train, evaluate; and steps become jobs of a queue.

Of one combination the rounds follow each other: what a round collects needs the policy of the round before, its
training needs what was collected. Combinations know nothing of each other, so they fill the machine side by side. Pure,
but for the function that a user gives for priorities.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpuherd.errors import UsageError
from gpuherd.jobs.job import Job
from gpuherd.jobs.run_dir import safe_name
from gpuherd.models.load.jobs import HEARTBEAT_S
from gpuherd.posttrain.eval.results import ASKED, REFERENCE, RESULT, number_of_parts, shard_done
from gpuherd.runs.shards import number_of_shards

if TYPE_CHECKING:
    from gpuherd.posttrain.runs.folder import RoundsDirectory
    from gpuherd.posttrain.runs.prepare import Prepared
    from gpuherd.posttrain.runs.settings import Settings


class Phase(StrEnum):
    """What a job does."""

    COLLECT = "collect"
    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True)
class Combination:
    """An algorithm on a data set with a pair of models.

    Attributes:
        algorithm: its name in the experiment.
        collects: whether rows are collected before a training (else it samples while it trains, or needs none).
        off_policy: whether what it learns from may come from an older policy.
        shards: jobs that collect a round's rows.
        evaluated_on: names of data sets.
        evaluation_shards: jobs that share an evaluation's problems, by data set; 1 where it says nothing, as in runs of
            earlier versions.
        whole_batches: these jobs have whole batches of the round, so that rows don't depend on their number. Runs of
            earlier versions deal single problems to them, and continue so.
    """

    algorithm: str
    dataset: str
    family: str
    collects: bool
    off_policy: bool
    shards: int
    evaluated_on: tuple[str, ...]
    evaluation_shards: Mapping[str, int] = field(default_factory=dict)
    whole_batches: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """Algorithm, data set and models: what it is a combination of."""
        return self.algorithm, self.dataset, self.family

    def divided_as(self, other: Combination) -> Combination:
        """This combination with the other's shards; those of collections stay where they have no whole batches."""
        changed = replace(self, evaluation_shards=other.evaluation_shards)
        if self.collects and self.shards > 1 and not self.whole_batches:
            return changed
        return replace(changed, shards=other.shards, whole_batches=True)


@dataclass(frozen=True, slots=True)
class Step:
    """A job of the experiment.

    Attributes:
        algorithm: the name in the experiment; REFERENCE for the evaluation of a model as it came.
        round: from 0; None of a reference.
        shard, shards: of a collection or an evaluation: which, of how many.
        whole_batches: of a collection: see ``Combination``.
        joins: of an evaluation in several shards: the job that makes their result of them.
        evaluated_on: of an evaluation: the data set whose problems are asked.
        policy_round: the round whose policy is asked, or gone on from; None: the reference.
        needs: names of steps that must have succeeded.
    """

    phase: Phase
    algorithm: str
    dataset: str
    family: str
    round: int | None
    shard: int = 0
    shards: int = 1
    evaluated_on: str | None = None
    policy_round: int | None = None
    needs: tuple[str, ...] = ()
    joins: bool = False
    whole_batches: bool = False

    @property
    def undivided(self) -> str:
        """The name of the collection or evaluation that this is a shard of."""
        return replace(self, shard=0, shards=1).name

    @property
    def name(self) -> str:
        """``<algorithm>_<data set>_<family>_r<round>_<phase>[_<shard>]``.

        >>> Step(Phase.COLLECT, "PITA", "gsm8k", "llama32", 1, 2, 4).name
        'PITA_gsm8k_llama32_r1_collect_2'
        """
        parts = [safe_name(self.algorithm), safe_name(self.dataset), safe_name(self.family)]
        parts += [] if self.round is None else [f"r{self.round}"]
        parts.append(self.phase.value)
        if self.shards > 1 and not self.joins:
            parts.append(str(self.shard))
        if self.evaluated_on is not None and self.evaluated_on != self.dataset:
            parts.append(safe_name(self.evaluated_on))
        return "_".join(parts)


def plan_steps(
    combinations: Sequence[Combination],
    rounds: int,
    *,
    asynchronous: bool = False,
    references: bool = True,
    divided: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Step, ...]:
    """All steps, earlier rounds first; each after those that it needs.

    Args:
        asynchronous: what a round collects is asked of the policy before the last, where the algorithm allows it: then
            it is collected while the last one is still trained. That policy is fixed by the plan and not by what
            happens to be finished, so that results don't depend on how fast things go.
        references: evaluate the models as they came, on each data set that something is evaluated on.
        divided: the number of shards of collections and evaluations, by ``Step.undivided``, that have another one than
            their combination.

    Raises UsageError: two steps would have one name.
    """
    steps = _references(combinations, divided) if references else []
    for number in range(rounds):
        for each in combinations:
            steps += _round(each, number, divided, asynchronous=asynchronous and each.off_policy)
    names: dict[str, Step] = {}
    for step in steps:
        other = names.setdefault(step.name, step)
        if other is not step:
            raise UsageError(
                f"two jobs would be named {step.name}: of {_of(other)} and of {_of(step)}; rename one of them"
            )
    return tuple(steps)


def _round(of: Combination, number: int, divided: Mapping[str, int], *, asynchronous: bool) -> list[Step]:
    """A round of one combination."""
    before = None if number == 0 else number - 1
    trained = () if before is None else (_train(of, before).name,)
    asked = before
    if asynchronous:
        asked = number - 2 if number >= 2 else None
    collection = Step(
        Phase.COLLECT,
        *of.key,
        number,
        shards=of.shards,
        policy_round=asked,
        needs=() if asked is None else (_train(of, asked).name,),
        whole_batches=of.whole_batches,
    )
    collected = _shards_of(collection, divided) if of.collects else []
    train = Step(
        Phase.TRAIN,
        *of.key,
        number,
        policy_round=before,
        needs=(*trained, *(each.name for each in collected)),
    )
    evaluations = [
        Step(
            Phase.EVALUATE,
            *of.key,
            number,
            shards=of.evaluation_shards.get(name, 1),
            evaluated_on=name,
            policy_round=number,
            needs=(train.name,),
        )
        for name in of.evaluated_on
    ]
    return [*collected, train, *(job for each in evaluations for job in _shards_of(each, divided))]


def _train(of: Combination, number: int) -> Step:
    return Step(Phase.TRAIN, *of.key, number)


def _references(combinations: Sequence[Combination], divided: Mapping[str, int]) -> list[Step]:
    pairs = {
        (each.family, name): each.evaluation_shards.get(name, 1) for each in combinations for name in each.evaluated_on
    }
    whole = [
        Step(Phase.EVALUATE, REFERENCE, name, family, None, shards=shards, evaluated_on=name)
        for (family, name), shards in pairs.items()
    ]
    return [job for each in whole for job in _shards_of(each, divided)]


def _shards_of(step: Step, divided: Mapping[str, int]) -> list[Step]:
    """The shards of a collection or an evaluation; of an evaluation also the job that joins them."""
    shards = divided.get(step.undivided, step.shards)
    parts = [replace(step, shard=number, shards=shards) for number in range(shards)]
    if shards == 1 or step.phase is Phase.COLLECT:
        return parts
    return [*parts, replace(step, shards=shards, joins=True, needs=tuple(part.name for part in parts))]


def _of(step: Step) -> str:
    words = [step.algorithm, step.dataset, step.family]
    return " / ".join(words if step.evaluated_on is None else [*words, step.evaluated_on])


def combinations_of(settings: Settings, prepared: Prepared, places: int) -> tuple[Combination, ...]:
    """Every algorithm on every data set with every pair of models.

    The places of the machine are divided among those that collect, and among their evaluations: so many jobs each as
    fill it together.

    Args:
        places: how many jobs can run side by side.
    """
    data, models = settings.trained_on(), tuple(settings.families())
    collecting = sum(choice.collects for choice in prepared.choices) * len(data) * len(models)
    each = max(1, places // max(1, collecting)) if settings.parallel_generation else 1
    evaluations = sum(len(settings.evaluated_on(name)) for name in data) * len(prepared.choices) * len(models)
    evaluating = max(1, places // max(1, evaluations)) if settings.parallel_generation else 1
    options, rows = settings.evaluation.options(settings.data_collection.seed), settings.generation.batch_size
    evaluation_shards = {
        name: number_of_parts(problems, options, rows, evaluating, settings.evaluation.shards)
        for name, problems in prepared.evaluated.items()
    }
    return tuple(
        Combination(
            algorithm=choice.name,
            dataset=name,
            family=family,
            collects=choice.collects,
            off_policy=choice.make().off_policy,
            shards=number_of_shards(prepared.problems[name], each, settings.data_collection.shards, batch_size=rows),
            evaluated_on=settings.evaluated_on(name),
            evaluation_shards={each: evaluation_shards[each] for each in settings.evaluated_on(name)},
            whole_batches=True,
        )
        for choice in prepared.choices
        for name in data
        for family in models
    )


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
        shard: of a collection or an evaluation.
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


WORKER = "gpuherd.posttrain.runs.worker"


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The GPUs and memory that a job asks for: a step of rounds, or a training of ``gpuherd train`` on each machine.

    Attributes:
        gpus: how many; 0 of a job that joins what others have made.
        memory_mb: free memory that it needs on each; 0 without GPUs.
        sentence: what for, in words.
    """

    gpus: int
    memory_mb: int
    sentence: str


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with what its job asks for."""

    step: Step
    asked: StepRequest
    priority: int


def planned(steps: Sequence[Step], asked: Sequence[StepRequest], priority: Priority, rounds: int) -> list[PlannedStep]:
    """The steps with their priorities. Raises what the priority function raises."""
    return [
        PlannedStep(step, each, priority(description_of(step, rounds))) for step, each in zip(steps, asked, strict=True)
    ]


def result_of(step: Step, folder: RoundsDirectory) -> Path:
    """The file that is there when a step is done."""
    number = -1 if step.round is None else step.round
    if step.phase is Phase.COLLECT:
        return folder.rows_done(folder.data(step.algorithm, step.dataset, step.family, number), step.shard)
    if step.phase is Phase.TRAIN:
        return folder.policy(folder.model(step.algorithm, step.dataset, step.family, number))
    made = folder.result(step.algorithm, step.family, step.dataset, step.round, step.evaluated_on or step.dataset)
    return made / RESULT if step.joins or step.shards == 1 else shard_done(made, step.shard)


def has_begun(step: Step, folder: RoundsDirectory) -> bool:
    """Whether a shard of the step's collection or evaluation has written anything. False for a training, which any
    number of processes can take over."""
    if step.phase is Phase.COLLECT and step.round is not None:
        data = folder.data(step.algorithm, step.dataset, step.family, step.round)
        return data.is_dir() and any(data.iterdir())
    made = folder.result(step.algorithm, step.family, step.dataset, step.round, step.evaluated_on or step.dataset)
    return step.phase is Phase.EVALUATE and (made / ASKED).exists()


def make_jobs(
    plan: Sequence[PlannedStep],
    folder: RoundsDirectory,
    *,
    identity: str,
    cwd: str,
    retries: int = 1,
    heartbeat_s: float | None = None,
    share: bool = False,
    simulate: bool = False,
) -> list[Job]:
    """A job for each step. Jobs that a killed run has finished stay done while their results are there."""
    return [
        Job(
            name=each.step.name,
            argv=(
                *(sys.executable, "-P", "-m", WORKER, "--folder", str(folder.root), "--job", each.step.name),
                *(["--simulate"] if simulate else []),
            ),
            gpus=each.asked.gpus,
            memory_mb=each.asked.memory_mb or None,
            share=share and each.asked.gpus > 0,
            priority=each.priority,
            needs=each.step.needs,
            family=f"{each.step.algorithm} {each.step.dataset} {each.step.family} "
            f"{'join' if each.step.joins else each.step.phase}",
            heartbeat_s=heartbeat_s or HEARTBEAT_S,
            retries=retries,
            cwd=cwd,
            result=str(result_of(each.step, folder)),
            identity=json.dumps([identity, each.step.name, each.step.shards]),
        )
        for each in plan
    ]
