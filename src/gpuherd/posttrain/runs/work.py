"""A job of an experiment: its inputs, read from the run's folder, and the three kinds of it; and the files of rows.

Runs in a worker, on whatever device that has. Each kind writes its result last and resumes where a killed one stopped.

A round's rows are a line of JSON a problem, with all rows of that problem, in the order of a shard's problems. A
problem's line is there whole or not at all; where an algorithm drops a problem the line has no rows. So a shard that
was killed resumes behind its last whole batch, and a round reads back the same from any number of shards.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.engines import progress
from gpuherd.errors import CannotWrite, ExitCode, GpuherdError, UsageError
from gpuherd.posttrain.engine.curves import of_world
from gpuherd.posttrain.eval.results import REFERENCE, About
from gpuherd.posttrain.policy_gradient.algorithm import Hooks
from gpuherd.posttrain.rewards.function import FunctionTask
from gpuherd.posttrain.runs.folder import FORMAT, RoundsDirectory, RunRecord, read_policy, write_policy
from gpuherd.posttrain.runs.plan import Phase, Step
from gpuherd.posttrain.runs.prepare import make_dataset, reward_input
from gpuherd.posttrain.runs.settings import AlgorithmConfig, Settings
from gpuherd.posttrain.types import (
    BackendName,
    Collecting,
    Comparison,
    Policy,
    Problem,
    Rollout,
    Row,
    Sampling,
    Split,
    Task,
    Training,
)
from gpuherd.runs.files import write_file
from gpuherd.runs.shard_file import Shard, ShardFile, unsealed
from gpuherd.runs.shards import dealt

if TYPE_CHECKING:
    from gpuherd.posttrain.engine.dist_env import DistEnv


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
    """The rows of this shard's problems, a line a problem.

    The algorithm is asked batch by batch: so a job that goes on asks it for exactly what an undisturbed one would have
    asked, and rows are equal to the last bit.
    """
    from gpuherd.posttrain.rollout.loading import keeping_models

    step, folder = work.step, work.folder
    data = folder.data(step.algorithm, step.dataset, step.family, work.round)
    shard = shard_of(step, len(work.problems), work.settings.generation.batch_size)
    algorithm, items = work.choice.make(), len(shard.items)
    started, now, rows = time.monotonic(), 0, 0
    with ShardFile(folder.rows(data, step.shard), shard, sealed=True) as file, keeping_models():
        before = items - sum(map(len, file.todo))
        progress.report(before, items, Phase.COLLECT.value)
        for batch in file.todo:
            problems = [work.problems[place] for place in batch]
            found = list(by_problem(algorithm.collect(_collecting(work, problems)), problems))
            file.append([line_of(problem, of) for problem, of in zip(problems, found, strict=True)])
            now, rows = now + len(batch), rows + sum(map(len, found))
            progress.report(before + now, items, Phase.COLLECT.value)
        figures = {"problems": items, "problems_last_start": now, "rows_last_start": rows}
        # While the file is ours: a shard that is not done can't be taken to be.
        _write(folder.rows_done(data, step.shard), figures | {"seconds_last_start": time.monotonic() - started})
    return figures


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
    """The policy of the round. What the training needed to go on is removed when it is done."""
    folder = work.folder.model(work.step.algorithm, work.step.dataset, work.step.family, work.round)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise CannotWrite(f"can't make {folder}: {problem.strerror}") from None
    from gpuherd.posttrain.engine.dist_env import DistEnv

    started = time.monotonic()
    progress.report(0, None, Phase.TRAIN.value)
    with DistEnv.from_environment(work.device) as world:
        policy = work.choice.make().train(_training(work, world))
        gpus = [] if world.size == 1 else [asdict(each) for each in of_world(world)]
        if world.is_main:
            write_policy(work.folder.policy(folder), policy, work.folder.root)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        world.barrier()
    figures: dict[str, Any] = {"seconds_last_start": time.monotonic() - started}
    return figures | {"gpus": gpus} if gpus else figures


def _training(work: Work, world: DistEnv) -> Training:
    step, settings = work.step, work.settings
    value_model = settings.families()[step.family].value
    models = {"policy": work.policy, "reference": work.reference}
    if work.choice.guided and value_model is not None:
        models["value_model"] = Policy(value_model)
    models |= {each: Policy(each) for each in work.choice.make().frozen_models}
    return Training(
        task=work.task,
        problems=work.problems,
        rows=rows_of_rounds(work),
        policy=work.policy,
        reference=work.reference,
        value_model=value_model,
        folder=work.folder.model(step.algorithm, step.dataset, step.family, work.round),
        round=work.round,
        sampling=work.sampling(f"training {work.round}"),
        precision=settings.system.training,
        device=work.device if world.size == 1 else work.device.partition(":")[0],
        seed=seed_for(settings.training.seed, f"training {work.round}"),
        steps=settings.steps_of(work.choice, world.size),
        root=work.folder.root,
        digests=world.broadcast({name: each.sha256 for name, each in models.items()} if world.is_main else {}),
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
    from importlib.metadata import PackageNotFoundError, version

    found = {"gpuherd": __version__}
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
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


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_file(path, json.dumps({"format": FORMAT, **values}, indent=1).encode() + b"\n")


_KINDS: dict[str, type[Rollout] | type[Comparison]] = {"rollout": Rollout, "comparison": Comparison}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class BadRows(GpuherdError):
    """A file of rows is damaged, or an algorithm gave rows that belong to none of its problems."""

    exit_code = ExitCode.BAD_INPUT


def shard_of(step: Step, problems: int, batch: int) -> Shard:
    """The problems of a shard of a collection as places in the round's list, in batches that are asked together and
    written whole. In runs of earlier versions they are each ``step.shards``-th problem, and not whole batches."""
    if step.whole_batches:
        return dealt(problems, batch, step.shards)[step.shard]
    places = range(problems)[step.shard :: step.shards]
    return Shard(tuple(tuple(places[start : start + batch]) for start in range(0, len(places), batch)))


def by_problem(rows: Iterable[Row], problems: Sequence[Problem]) -> Iterator[list[Row]]:
    """The rows of each problem, problem by problem, as soon as they are all there; [] of one that has none.

    Raises BadRows for a row of another problem, or one that comes too late.
    """
    places = {problem.id: place for place, problem in enumerate(problems)}
    waiting: list[Row] = []
    at = 0
    for row in rows:
        place = places.get(row.problem)
        if place is None or place < at:
            raise BadRows(f"a row of problem {row.problem!r} is none of this job's, or out of order")
        while at < place:
            yield waiting
            waiting, at = [], at + 1
        waiting.append(row)
    for _ in range(at, len(problems)):
        yield waiting
        waiting = []


def line_of(problem: Problem, rows: Sequence[Row]) -> str:
    """A problem's line."""
    told = [{"kind": _NAMES[type(row)], **row.to_dict()} for row in rows]
    return json.dumps({"problem": problem.id, "rows": told}, separators=(",", ":"), allow_nan=False)


def read_round(parts: Iterable[tuple[Path, Shard]]) -> tuple[Row, ...]:
    """All rows of a round in the order of its problems, from the files of its shards. Raises BadRows: one is not
    whole."""
    found: dict[int, list[Row]] = {}
    for path, shard in parts:
        places = shard.items
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as problem:
            raise BadRows(f"{path} can't be read: {problem.strerror}") from None
        again = f"remove {path.with_suffix('.json')} and start the same command again"
        if len(lines) != len(places):
            raise BadRows(f"{path} has {len(lines)} lines and should have {len(places)}; {again}")
        for at, (place, line) in enumerate(zip(places, lines, strict=True), 1):
            if (content := unsealed(line)) is None:
                raise BadRows(f"{path}: line {at} is incomplete or has changed; {again}")
            found[place] = _rows_of(content, path)
    return tuple(row for place in sorted(found) for row in found[place])


def _rows_of(line: bytes, path: Path) -> list[Row]:
    try:
        return [
            _KINDS[row["kind"]].from_dict({key: value for key, value in row.items() if key != "kind"})
            for row in json.loads(line)["rows"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise BadRows(f"{path} is damaged: {type(problem).__name__}: {problem}") from None
