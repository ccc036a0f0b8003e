"""Measures one statistic of a run: its shards, its jobs, and one file of what they wrote, the description last."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from rich.console import Console

from gpuherd import __version__
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Outcome
from gpuherd.lm.batching import plan_batches
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.plan.workload import Workload
from gpuherd.qa.folder import ShardedDirectory
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.alone import alone_in
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.statistics.files import Meta, Spec, Task, is_there, meta_values, statistic_named, write_task
from gpuherd.qa.statistics.registry import statistic_of
from gpuherd.qa.statistics.similarity_model import encoder_of
from gpuherd.qa.working.gathering import gathered_lines, write_lines, write_values
from gpuherd.qa.working.model_jobs import Asks, WorkerCall, having, shard_jobs, what_it_takes
from gpuherd.qa.working.running import run_work
from gpuherd.qa.working.sharding import Shard, number_of_shards, plan_shards
from gpuherd.qa.working.shardplan import kept_plan, read_plan

WORKER = "gpuherd.qa.scoring.worker"
# Float32 activations of a batch of 2^15 tokens in a large encoder, with room to spare.
_ENCODER_WORKSPACE_MB = 4096
_LIBRARIES = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Work:
    """A statistic that is not there yet.

    Attributes:
        spec: which.
        folder: of its jobs.
        model, options: what the jobs load, and how.
        asks: what each asks for.
        shards: which questions each has.
        workload: how much it does at once.
    """

    spec: Spec
    folder: ShardedDirectory
    model: str
    options: ScoreOptions
    asks: Asks
    shards: tuple[Shard, ...]
    workload: Workload

    def jobs(self, identity: str, *, simulate: bool) -> list[Job]:
        """A job for each shard. ``identity``: of the answers."""
        call = WorkerCall(
            module=WORKER,
            model=self.model,
            words=(),
            workload=self.workload,
            simulate=simulate,
            identity=f"{identity} {self.spec.name}",
            title=self.spec.name,
        )
        return shard_jobs(call, self.shards, self.folder, self.asks, self.options)


def plan_work(spec: Spec, options: ScoreOptions, run: Run, answers: Sequence[Answered]) -> Work:
    """What measuring it takes on this machine. Writes nothing. Raises what ``what_it_takes`` raises."""
    statistic = statistic_of(spec)
    folder = run.folder.work_of(spec.name)
    cost = statistic.cost(spec, answers)
    workload = Workload(options.batch_size, cost.prompt_tokens, 1)
    if statistic.by_encoder(spec):
        model, of_jobs = spec.model, _encoder_options(options)
        asks = _encoder_asks(spec, options)
    else:
        model, of_jobs = statistic.language_model(spec, options, run)
        asks = what_it_takes(model, of_jobs, workload, having(options))
    if folder.plan.exists():
        shards = read_plan(folder)
    else:
        many = number_of_shards(len(answers), asks.at_once, options.shards)
        shards = plan_shards(cost.tokens, many, partial(plan_batches, rows=cost.questions or options.batch_size))
    return Work(spec, folder, model, of_jobs, asks, shards, workload)


def carry_out(work: Work, run: Run, console: Console, *, simulate: bool) -> Outcome | None:
    """Runs the jobs and writes the statistic. Returns how they ended; None where it was there already.

    Raises what ``run_jobs`` raises, CannotWrite, Damaged.
    """
    if is_there(run.folder, work.spec.name):
        return None
    write_task(work.folder, Task(work.spec, str(run.folder.root), run.answers_sha256))
    shards = kept_plan(
        work.folder, f"{run.answers_sha256} {work.spec.name}", lambda: work.shards, wanted=work.options.shards
    )
    jobs = replace(work, shards=shards).jobs(run.answers_sha256, simulate=simulate)
    outcome = run_work(jobs, work.options, work.folder, console, kind="score")
    if outcome.complete:
        finish(work.spec, work.folder, shards, run)
    return outcome


def finish(spec: Spec, folder: ShardedDirectory, shards: Sequence[Shard], run: Run) -> Meta:
    """Makes one file of the shards, and its description, unless somebody was first. Raises Damaged, CannotWrite."""
    with alone_in(run.folder.statistics):
        if not is_there(run.folder, spec.name):
            _write(spec, folder, shards, run)
    return statistic_named(run.folder, spec.name, run.answers_sha256)


def _write(spec: Spec, folder: ShardedDirectory, shards: Sequence[Shard], run: Run) -> None:
    undefined: Counter[str] = Counter()
    written = write_lines(run.folder.statistic(spec.name), _counted(gathered_lines(folder, shards), undefined))
    meta = Meta(
        spec=spec,
        answers_sha256=run.answers_sha256,
        sha256=written.sha256,
        items=written.lines,
        undefined=dict(sorted(undefined.items())),
        remarks=statistic_of(spec).remarks(list(_records(folder, shards))),
        versions=versions(_LIBRARIES),
        made=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    write_values(run.folder.statistic(spec.name, ".json"), meta_values(meta))


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """The versions of gpuherd and of those of these libraries that are installed; none of them is imported."""
    from importlib import metadata

    found = {"gpuherd": __version__}
    for library in libraries:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def _counted(lines: Iterable[bytes], undefined: Counter[str]) -> Iterable[bytes]:
    for line in lines:
        why = json.loads(line).get("why")
        if why is not None:
            undefined[str(why)] += 1
        yield line


def _records(folder: ShardedDirectory, shards: Sequence[Shard]) -> Iterable[Mapping[str, Any]]:
    """What the jobs wrote of how they went."""
    for number, shard in enumerate(shards):
        if shard.items:
            value: Mapping[str, Any] = json.loads(folder.shard_done(number).read_bytes())
            yield value


def _encoder_options(options: ScoreOptions) -> ScoreOptions:
    """The options without what is said of the language model: an encoder is loaded in float32, as it is."""
    plain = ModelOptions()
    return replace(options, **{each.name: getattr(plain, each.name) for each in fields(ModelOptions)})


def _encoder_asks(spec: Spec, options: ScoreOptions) -> Asks:
    """One GPU with room for the weights in float32 and a batch; the CPU where there is none, or it is asked for."""
    have = having(options)
    if options.device_map == "cpu" or (have.cluster is None and not have.gpus):
        return Asks(0, None, have.places(0, options), "on the CPU")
    memory_mb = encoder_of(spec.model).float32_bytes // (1 << 20) + _ENCODER_WORKSPACE_MB
    return Asks(1, memory_mb, have.places(1, options), f"1 GPU with {memory_mb} MB free")
