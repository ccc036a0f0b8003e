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
from gpuherd.models.load.jobs import JobRequest, WorkerCall, job_request, resources_for, shard_jobs
from gpuherd.models.load.options import ModelOptions
from gpuherd.models.plan.workload import Workload
from gpuherd.qa.record import Answered
from gpuherd.qa.runs import Run
from gpuherd.qa.scoring.options import ScoreOptions
from gpuherd.qa.scoring.planned import encoder_of, language_model_of
from gpuherd.qa.scoring.remarks import remarks
from gpuherd.qa.scoring.statistic import Kind, Meta, Spec, meta_values
from gpuherd.qa.scoring.statistic_files import is_there, statistic_named
from gpuherd.qa.scoring.task import Task, write_task
from gpuherd.runs.files import single_writer, write_lines, write_values
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedDirectory, gathered_lines, kept_plan, number_of_shards, plan_shards, read_plan
from gpuherd.runs.stage import run_work

WORKER = "gpuherd.qa.scoring.worker"
# Questions whose texts an encoder compares together: many enough that its batches are full and equal texts meet.
_QUESTIONS_AT_ONCE = 16
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
    folder = run.folder.work_of(spec.name)
    lengths = [_cost(spec, each) for each in answers]
    if spec.by_encoder:
        model, told = spec.model, _encoder_options(options)
        workload = Workload(options.batch_size, 512, 1)
        asks = _encoder_asks(spec, options)
        rows = _QUESTIONS_AT_ONCE
    else:
        model, told = language_model_of(spec, options, run)
        workload = Workload(options.batch_size, _prompt_tokens(spec, answers), 1)
        asks = job_request(model, told, workload, resources_for(options))
        rows = options.batch_size if spec.kind in (Kind.P_TRUE, Kind.HIDDEN) else _QUESTIONS_AT_ONCE
    if folder.plan.exists():
        shards = read_plan(folder)
    else:
        many = number_of_shards(len(answers), asks.at_once, options.shards)
        shards = plan_shards(lengths, many, partial(plan_batches, rows=rows))
    return Work(spec, folder, model, told, asks, shards, workload)


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
        remarks=remarks(_records(folder, shards)),
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


def _cost(spec: Spec, answered: Answered) -> int:
    """About how many tokens a question's work has, for a fair division and for batches of like size."""
    greedy = 0 if answered.greedy is None else len(answered.greedy.token_ids)
    samples = [len(each.token_ids) for each in answered.samples]
    prompt = answered.prompt.tokens
    if spec.kind is Kind.RELEVANCE:
        lengths = samples if spec.settings["answers"] == "samples" else [greedy]
        return sum(each * each for each in lengths) + 1
    if spec.kind in (Kind.SIMILARITY, Kind.ENTAILMENT):
        return (len(samples) or 1) * sum(samples) + 1
    return prompt if spec.kind is Kind.HIDDEN else greedy + sum(samples) + 1


def _prompt_tokens(spec: Spec, answers: Sequence[Answered]) -> int:
    """Tokens of the longest prompt, or more: what a plan of memory leaves room for."""
    if spec.kind is Kind.HIDDEN:
        return max((each.prompt.tokens for each in answers), default=1)
    # A token has at least a byte: characters are at least as many as tokens, but for scripts whose letters take three.
    texts = [len(each.question.question) + 2 * max(map(_tokens, each.which.values()), default=0) for each in answers]
    longest = max(texts, default=0) + 128
    if spec.kind is Kind.P_TRUE:
        ideas = max((sum(map(_tokens, each.samples)) for each in answers), default=0) if spec.settings["ideas"] else 0
        return (longest + ideas) * (1 + len(spec.settings["examples"]))
    return longest


def _tokens(generation: Any) -> int:
    return len(generation.token_ids)


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
