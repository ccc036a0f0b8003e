"""Measures one statistic of a run: its shards, its jobs, and one file of what they wrote, the description last."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

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
from gpuherd.qa.statistics.files import Meta, Spec, Task, is_there, meta_values, write_task
from gpuherd.qa.statistics.registry import statistic_of
from gpuherd.qa.statistics.similarity_model import encoder_of
from gpuherd.runs.files import single_writer, write_lines, write_values
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedDirectory, ShardedWork, gathered_lines, shard_records
from gpuherd.runs.spec import versions
from gpuherd.runs.stage import Stage, StageOutcome

WORKER = "gpuherd.qa.scoring.worker"
# Float32 activations of a batch of 2^15 tokens in a large encoder, with room to spare.
_ENCODER_WORKSPACE_MB = 4096


class Measuring(Stage[StageOutcome]):
    """Measures one statistic of a run by jobs, each of which has a part of the questions.

    Making one plans the jobs and writes nothing. Raises what ``job_request`` raises; running it also CannotWrite and
    Damaged.

    Attributes:
        spec: the statistic.
        folder: of its jobs.
        model: what the jobs load.
        asks: what each job requests.
        work: the questions as the jobs share them.
    """

    kind = "score"

    def __init__(
        self,
        spec: Spec,
        options: ScoreOptions,
        run: Run,
        answers: Sequence[Answered],
        console: Console,
        *,
        simulate: bool = False,
    ) -> None:
        statistic = statistic_of(spec)
        cost = statistic.cost(spec, answers)
        self.spec, self.source, self._simulate = spec, run, simulate
        self.folder = run.folder.work_of(spec.name)
        self._workload = Workload(options.batch_size, cost.prompt_tokens, 1)
        if statistic.by_encoder(spec):
            self.model, self._job_options = spec.model, _encoder_options(options)
            self.asks = _encoder_asks(spec, options)
        else:
            self.model, self._job_options = statistic.language_model(spec, options, run)
            self.asks = job_request(self.model, self._job_options, self._workload, resources_for(options))
        identity = f"{run.answers_sha256} {spec.name}"
        batches = partial(plan_batches, rows=cost.questions or options.batch_size)
        self.work = ShardedWork(self.folder, identity, cost.tokens, batches, options.shards)
        super().__init__(self._job_options, self.folder, console, enqueue_only=options.enqueue_only)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Which questions each job has: as at the first start, or as it would be."""
        return self.work.shards(self.asks.at_once)

    def existing(self) -> StageOutcome | None:
        return StageOutcome(already=True) if is_there(self.source.folder, self.spec.name) else None

    def prepare(self) -> None:
        """Nothing: the plan was made with the stage."""

    def planned(self) -> StageOutcome:
        return StageOutcome(never=() if self.outlook is None else self.outlook.never)

    def begin(self) -> None:
        write_task(self.folder, Task(self.spec, str(self.source.folder.root), self.source.answers_sha256))
        self.work.begin(self.asks.at_once)

    def jobs(self) -> Sequence[Job]:
        call = WorkerCall(
            module=WORKER,
            model=self.model,
            words=(),
            workload=self._workload,
            simulate=self._simulate,
            identity=self.work.identity,
            title=self.spec.name,
        )
        return shard_jobs(call, self.shards, self.folder, self.asks, self._job_options)

    @property
    def folders_of_results(self) -> Sequence[Path]:
        return (self.folder.shards,)

    def finish(self, jobs: Outcome | None) -> StageOutcome:
        """Makes one file of the shards, and its description, unless another command was first."""
        if jobs is None or jobs.complete:
            with single_writer(self.source.folder.statistics):
                if not is_there(self.source.folder, self.spec.name):
                    _write(self.spec, self.folder, self.shards, self.source)
        return StageOutcome(jobs)


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
