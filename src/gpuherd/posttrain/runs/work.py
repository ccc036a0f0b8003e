"""A job of an experiment: its inputs, read from the run's folder, and the three kinds of it; and the one way that a
training runs in its processes, of rounds or of ``gpuherd train``.

Runs in a worker, on whatever device that has. Each kind writes its result last and resumes where a killed one stopped.
A shard of a round's rows lies in a file of its own (``runs.rows``).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gpuherd.engines import progress
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.posttrain.engine.curves import of_world
from gpuherd.posttrain.engine.dist_env import DistEnv
from gpuherd.posttrain.eval.results import REFERENCE, About
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.rewards.function import FunctionTask
from gpuherd.posttrain.runs.folder import FORMAT, RoundsDirectory, RunRecord, read_policy, write_policy
from gpuherd.posttrain.runs.plan import Phase, Step
from gpuherd.posttrain.runs.prepare import make_dataset, reward_input
from gpuherd.posttrain.runs.rows import collect_rows, read_round
from gpuherd.posttrain.runs.settings import AlgorithmConfig, Settings
from gpuherd.posttrain.types import (
    Algorithm,
    BackendName,
    Collecting,
    Policy,
    Problem,
    Row,
    Sampling,
    Split,
    Task,
    Training,
)
from gpuherd.runs import spec
from gpuherd.runs.files import write_file
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import dealt


@dataclass(frozen=True)
class Work:
    """One step of a run, on a device. ``stopping``: asked after each step of a training; where it says so, that ends by
    ``Stopped`` behind a checkpoint."""

    folder: RoundsDirectory
    record: RunRecord
    step: Step
    device: str
    stopping: Callable[[], bool] | None = None

    @property
    def settings(self) -> Settings:
        """The experiment's."""
        return self.record.settings

    @cached_property
    def choice(self) -> AlgorithmConfig:
        """The step's algorithm."""
        found = {each.name: each for each in self.settings.choices()}
        return found[self.step.algorithm]

    @cached_property
    def task(self) -> Task:
        """That of the step's problems."""
        name = self.step.evaluated_on if self.step.evaluated_on is not None else self.step.dataset
        task = make_dataset(self.settings, name, self.device)
        if isinstance(task, FunctionTask):
            task.scoring.sha256 = self.record.made.get("inputs", {}).get(reward_input(name))
        return task

    @cached_property
    def problems(self) -> Sequence[Problem]:
        """The problems that are trained on, in the seed's order."""
        told = self.settings.data_collection
        return self.task.problems(Split.TRAIN, told.max_examples or None, told.seed)

    @property
    def reference(self) -> Policy:
        """The model as it came."""
        family = self.settings.families()[self.step.family]
        return Policy(family.reference, family.adapter)

    @property
    def policy(self) -> Policy:
        """The policy that this step asks, or goes on from."""
        step = self.step
        if step.policy_round is None:
            return self.reference
        model = self.folder.model(step.algorithm, step.dataset, step.family, step.policy_round)
        return read_policy(self.folder.policy(model), self.folder.root)

    def sampling(self, purpose: str) -> Sampling:
        """How completions are drawn: with a seed of its own for each purpose, such as a round."""
        return self.settings.generation.sampling(seed_for(self.settings.data_collection.seed, purpose))

    @property
    def round(self) -> int:
        """The step's round. Only a reference's evaluation has none."""
        assert self.step.round is not None  # noqa: S101 - as said
        return self.step.round


def seed_for(seed: int, purpose: str) -> int:
    """A seed that a seed and a purpose fix: draws of two rounds are others though problems and samples are the same."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:4], "big")


def do(work: Work) -> dict[str, Any]:
    """Does the step. Returns figures of it, for people. Raises what algorithms, tasks and models raise."""
    try:
        if work.step.phase is Phase.COLLECT:
            return collect(work)
        return train(work) if work.step.phase is Phase.TRAIN else evaluate(work)
    finally:
        if "task" in work.__dict__:
            work.task.close()


def collect(work: Work) -> dict[str, Any]:
    """The rows of this shard's problems, a line a problem."""
    from gpuherd.posttrain.rollout.loading import keeping_models

    step, folder = work.step, work.folder
    data = folder.data(step.algorithm, step.dataset, step.family, work.round)
    shard = shard_of(step, len(work.problems), work.settings.generation.batch_size)
    algorithm, started = work.choice.make(), time.monotonic()

    def done(figures: dict[str, int]) -> None:
        seconds = time.monotonic() - started
        values = {"format": FORMAT, **figures, "seconds_last_start": seconds}
        write_file(folder.rows_done(data, step.shard), json.dumps(values, indent=1).encode() + b"\n")

    with keeping_models():
        return collect_rows(
            folder.rows(data, step.shard),
            shard,
            work.problems,
            lambda problems: algorithm.collect(_collecting(work, problems)),
            done=done,
        )


def _collecting(work: Work, problems: Sequence[Problem]) -> Collecting:
    return Collecting(
        task=work.task,
        problems=problems,
        policy=work.policy,
        reference=work.reference,
        round=work.round,
        sampling=work.sampling(f"round {work.round}"),
        precision=work.settings.system.precision,
        device=work.device,
        reward_batch_size=work.settings.data_collection.reward_batch_size,
        backend=work.settings.generation.backend,
    )


def train(work: Work) -> dict[str, Any]:
    """The policy of the round."""
    folder = work.folder.model(work.step.algorithm, work.step.dataset, work.step.family, work.round)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise CannotWrite(f"can't make {folder}: {problem.strerror}") from None
    started = time.monotonic()
    figures: dict[str, Any] = {}
    progress.report(0, None, Phase.TRAIN.value)
    with DistEnv.from_environment(work.device) as world:

        def end(policy: Policy) -> None:
            if world.size > 1:
                figures["gpus"] = [asdict(each) for each in of_world(world)]
            if world.is_main:
                write_policy(work.folder.policy(folder), policy, work.folder.root)

        models = {"policy": work.policy, "reference": work.reference}
        value_model = work.settings.families()[work.step.family].value
        if work.choice.guided and value_model is not None:
            models["value_model"] = Policy(value_model)
        run_training(work.choice.make(), _training(work, folder, world), world, models, end)
    return {"seconds_last_start": time.monotonic() - started, **{key: each for key, each in figures.items() if each}}


def run_training(
    algorithm: Algorithm,
    work: Training,
    world: DistEnv,
    models: Mapping[str, Policy],
    end: Callable[[Policy], object],
) -> None:
    """Trains in this process and the others, or resumes a training. What it needed to go on is removed at the end.

    Args:
        work: all but ``digests`` and ``device``, which are the same in each process.
        models: what it begins with beside the algorithm's frozen models, by the names that checkpoints have for their
            digests.
        end: called in each process with the policy; writes, in the main one, the file that says that the training has
            ended. Checkpoints are there until then: what is killed before goes on from them.

    Raises what the algorithm and loading raise; ``Stopped``.
    """
    models = {**models, **{each: Policy(each) for each in algorithm.frozen_models}}
    digests = world.from_main(lambda: {name: each.sha256 for name, each in models.items()})
    device = world.device if world.size == 1 else world.device.partition(":")[0]
    end(algorithm.train(replace(work, digests=digests, device=device)))
    if world.is_main:
        shutil.rmtree(work.folder / "checkpoints", ignore_errors=True)
    world.barrier()


def _training(work: Work, folder: Path, world: DistEnv) -> Training:
    settings, purpose = work.settings, f"training {work.round}"
    return Training(
        task=work.task,
        problems=work.problems,
        rows=rows_of_rounds(work),
        policy=work.policy,
        reference=work.reference,
        value_model=settings.families()[work.step.family].value,
        folder=folder,
        round=work.round,
        sampling=work.sampling(purpose),
        precision=settings.system.training,
        device=work.device,
        seed=seed_for(settings.training.seed, purpose),
        steps=settings.steps_of(work.choice, world.size),
        root=work.folder.root,
        reward_batch_size=settings.data_collection.reward_batch_size,
        extra={"hooks": Hooks(stopping=work.stopping, callbacks=settings.callbacks)},
        backend=settings.generation.backend,
    )


def rows_of_rounds(work: Work) -> list[tuple[Row, ...]]:
    """What was collected in each round up to this one; an empty one where the algorithm collects nothing."""
    step = work.step
    collected: dict[int, list[Step]] = {number: [] for number in range(work.round + 1)}
    for each in work.record.steps():
        same = (each.algorithm, each.dataset, each.family) == (step.algorithm, step.dataset, step.family)
        if each.phase is Phase.COLLECT and same and each.round in collected:
            collected[each.round].append(each)
    batch = work.settings.generation.batch_size
    return [rows_of(work.folder, some, len(work.problems), batch) for some in collected.values()]


def rows_of(folder: RoundsDirectory, shards: Sequence[Step], problems: int, batch: int) -> tuple[Row, ...]:
    """What the shards of one collection have collected, in the order of its problems.

    Args:
        problems, batch: how many there are, and how many of them are asked together.

    Raises BadRows: a file is not whole.
    """
    parts = []
    for step in shards:
        data = folder.data(step.algorithm, step.dataset, step.family, 0 if step.round is None else step.round)
        parts.append((folder.rows(data, step.shard), shard_of(step, problems, batch)))
    return read_round(parts)


def evaluate(work: Work) -> dict[str, Any]:
    """The policy's figures on the problems of an evaluation, at each eta; ``result.json`` comes last. Of an evaluation
    that is divided: one shard of it, or the result of all."""
    from gpuherd.posttrain.eval import evaluation

    step, settings = work.step, work.settings
    name = step.evaluated_on if step.evaluated_on is not None else step.dataset
    started = time.monotonic()
    progress.report(0, None, Phase.EVALUATE.value)
    evaluating = evaluation.Evaluating(
        about=About(step.algorithm, step.dataset, name, step.family, step.round, settings.training.seed),
        policy=work.policy,
        reference=work.reference,
        task=work.task if step.algorithm == REFERENCE else work.choice.make().evaluated(work.task),
        folder=work.folder.result(step.algorithm, step.family, step.dataset, step.round, name),
        root=work.folder.root,
        options=settings.evaluation.options(settings.data_collection.seed),
        sampling=work.sampling("evaluation"),
        precision=settings.system.precision,
        device=work.device,
        gpus=0 if work.device == "cpu" else 1,
        reward_batch_size=settings.data_collection.reward_batch_size,
        versions=versions(settings.evaluation.backend),
        backend=settings.evaluation.backend,
    )
    figures: dict[str, Any] = {}
    if step.shards == 1:
        evaluation.evaluate(evaluating)
    elif step.joins:
        evaluation.join_shards(evaluating, step.shards)
    else:
        figures |= evaluation.evaluate_shard(evaluating, step.shard, step.shards)
    return {**figures, "seconds_last_start": time.monotonic() - started}


def versions(*backends: BackendName) -> dict[str, str]:
    """Of what computes, for the record; of vLLM that of the Python that it is run by."""
    found = spec.versions("torch", "transformers")
    if BackendName.VLLM in backends:
        from gpuherd.lm.vllm import installed_version

        if (vllm := installed_version()) is not None:
            found["vllm"] = vllm
    return found


def processes_of(settings: Settings, step: Step) -> int:
    """The processes that do a step: of a training as many as its algorithm has GPUs."""
    if step.phase is not Phase.TRAIN:
        return 1
    return next(each.gpus for each in settings.choices() if each.name == step.algorithm)


def step_named(record: RunRecord, name: str) -> Step:
    """The step of a job's name. Raises UsageError."""
    for step in record.steps():
        if step.name == name:
            return step
    raise UsageError(f"this run has no job {name!r}")


def shard_of(step: Step, problems: int, batch: int) -> Shard:
    """The problems of a shard of a collection as places in the round's list, in batches that are asked together and
    written whole. In runs of earlier versions they are each ``step.shards``-th problem, and not whole batches."""
    if step.whole_batches:
        return dealt(problems, batch, step.shards)[step.shard]
    places = range(problems)[step.shard :: step.shards]
    return Shard(tuple(tuple(places[start : start + batch]) for start in range(0, len(places), batch)))
