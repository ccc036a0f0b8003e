"""Measures one statistic of a run: its shards, its jobs, and one file of what they wrote, the description last."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial

from rich.console import Console

from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Outcome
from gpuherd.lm.batching import plan_batches
from gpuherd.models.load.jobs import JobRequest, WorkerCall, job_request, resources_for, shard_jobs
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.plan.workload import Workload
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.statistics.files import Meta, Spec, Task, is_there, meta_values, statistic_named, write_task
from gpuherd.qa.statistics.registry import statistic_of
from gpuherd.qa.statistics.similarity_model import encoder_of
from gpuherd.runs.files import single_writer, write_lines, write_values
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import (
    ShardedDirectory,
    gathered_lines,
    kept_plan,
    number_of_shards,
    plan_shards,
    read_plan,
    shard_records,
)
from gpuherd.runs.spec import versions
from gpuherd.runs.stage import run_work

WORKER = "gpuherd.qa.scoring.worker"
# Float32 activations of a batch of 2^15 tokens in a large encoder, with room to spare.
_ENCODER_WORKSPACE_MB = 4096


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
    asks: JobRequest
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
    """What measuring it takes on this machine. Writes nothing. Raises what ``job_request`` raises."""
    statistic = statistic_of(spec)
    folder = run.folder.work_of(spec.name)
    cost = statistic.cost(spec, answers)
    workload = Workload(options.batch_size, cost.prompt_tokens, 1)
    if statistic.by_encoder(spec):
        model, of_jobs = spec.model, _encoder_options(options)
        asks = _encoder_asks(spec, options)
    else:
        model, of_jobs = statistic.language_model(spec, options, run)
        asks = job_request(model, of_jobs, workload, resources_for(options))
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
    outcome = run_work(
        jobs,
        work.options,
        work.folder,
        [work.folder.root, work.folder.shards],
        console,
        kind="score",
        enqueue_only=work.options.enqueue_only,
    )
    if outcome.complete:
        finish(work.spec, work.folder, shards, run)
    return outcome


def finish(spec: Spec, folder: ShardedDirectory, shards: Sequence[Shard], run: Run) -> Meta:
    """Makes one file of the shards, and its description, unless somebody was first. Raises Damaged, CannotWrite."""
    with single_writer(run.folder.statistics):
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
        remarks=statistic_of(spec).remarks(shard_records(folder, shards)),
        versions=versions("torch", "transformers", "numpy"),
        made=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    write_values(run.folder.statistic(spec.name, ".json"), meta_values(meta))


def _counted(lines: Iterable[bytes], undefined: Counter[str]) -> Iterable[bytes]:
    for line in lines:
        why = json.loads(line).get("why")
        if why is not None:
            undefined[str(why)] += 1
        yield line


def _encoder_options(options: ScoreOptions) -> ScoreOptions:
    """The options without what is said of the language model: an encoder is loaded in float32, as it is."""
    plain = ModelOptions()
    return replace(options, **{each.name: getattr(plain, each.name) for each in fields(ModelOptions)})


def _encoder_asks(spec: Spec, options: ScoreOptions) -> JobRequest:
    """One GPU with room for the weights in float32 and a batch; the CPU where there is none, or it is asked for."""
    have = resources_for(options)
    if options.device_map == "cpu" or (have.cluster is None and not have.gpus):
        return JobRequest(0, None, have.places(0, options), "on the CPU")
    memory_mb = encoder_of(spec.model).float32_bytes // (1 << 20) + _ENCODER_WORKSPACE_MB
    return JobRequest(1, memory_mb, have.places(1, options), f"1 GPU with {memory_mb} MB free")
