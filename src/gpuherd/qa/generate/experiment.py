"""A run of answers as a stage: prepare, jobs, done.json; and what is printed before it starts and when it is done."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gpuherd.errors import printable
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Outcome
from gpuherd.lm.backend import beyond_rounding
from gpuherd.lm.forward import plan_batches
from gpuherd.lm.vllm import require
from gpuherd.models.load.jobs import JobRequest, Resources, job_request, resources_for, shard_jobs
from gpuherd.models.memory.kv_cache import Workload
from gpuherd.qa.data.questions import RefusedRow
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generate.config import GenerateConfig
from gpuherd.qa.generate.finish import clear_shards, finish
from gpuherd.qa.generate.prepared import (
    PreparedRun,
    begun_record,
    changed_models,
    guide_bytes,
    prepare,
    refuse_other_settings,
    write,
)
from gpuherd.qa.numbers import rule_for
from gpuherd.qa.runs import questions_in, run_of_path
from gpuherd.runs.console import track
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedWork, items_done, read_plan
from gpuherd.runs.spec import digest_of
from gpuherd.runs.stage import Stage, StageOutcome, print_lines
from gpuherd.units import counted

# ---- output ----------------------------------------------------------------------------------------------------------

_MOST_REFUSED = 10
LEAST_FOR_A_THOUGHT = 1024  # tokens of an answer with a thought; many need more


def plan_lines(
    config: GenerateConfig, prepared: PreparedRun, asks: JobRequest, shards: int, answered: int
) -> list[str]:
    """The lines that describe a run before its jobs start."""
    how = config.decoding()
    answers = [*(["1 greedy"] if how.greedy else []), *([f"{how.samples} drawn"] if how.samples else [])]
    longest = prepared.longest
    lines = [
        f"run {config.name()} in {config.runs_dir}",
        f"{counted(len(prepared.lengths), 'question')} of {config.dataset}, {len(prepared.refused)} refused; "
        f"{' and '.join(answers)} answer{'s' if how.samples else ''} each, at most {config.max_new_tokens} tokens; "
        f"the longest prompt has {longest} tokens",
        f"{counted(shards, 'job')}: {asks.sentence}; {asks.at_once} at once",
        f"{answered} of {len(prepared.lengths)} are answered already",
    ]
    if prepared.guide is not None:
        guide = prepared.guide
        lines.append(
            f"guided by {guide.classifier}: eta {guide.eta:g} ({guide.mode}), among the {guide.top_k} most probable "
            "tokens"
        )
    if prepared.thinks and config.max_new_tokens < LEAST_FOR_A_THOUGHT:
        lines.append(
            f"warning: the model's chat template has thoughts, and {config.max_new_tokens} tokens may end before a "
            "thought does: then there is no answer; --max-new-tokens 4096 leaves room for both"
        )
    if prepared.cut:
        lines.append(f"{counted(prepared.cut, 'prompt')} had to be shortened: their contexts were cut")
    if prepared.stop:
        lines.append(f"answers end before {', '.join(repr(text) for text in prepared.stop)}, or at {_ends(prepared)}")
    else:
        lines.append(f"answers end at {_ends(prepared)}")
    return [printable(line) for line in lines]


def _ends(prepared: PreparedRun) -> str:
    ids: Sequence[int] = prepared.record["end_tokens"]["ids"]
    if not ids:
        return "their length alone: the model names no end token"
    return f"end token{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def done_lines(folder: QADirectory, done: Mapping[str, Any]) -> list[str]:
    """The lines that describe a complete run."""
    counts = done["counts"]
    finish = counts["finish"]
    ended = f"{finish['eos']} ended by themselves, {finish['stop']} at a stop string, {finish['length']} at the limit"
    if finish.get("nan"):
        ended += f", {finish['nan']} at numbers that are not finite (NaN)"
    things = ((done["questions"], "question"), (counts["answers"], "answer"), (counts["tokens"], "token"))
    lines = [f"{', '.join(counted(count, what) for count, what in things)}{_speed(done['shards'])}: {ended}"]
    remarks = [
        f"{counts[name]} {what}"
        for name, what in (
            ("refused", "rows refused (refused.jsonl says why)"),
            ("prompts_cut", "contexts shortened"),
            ("empty", "answers without text"),
            ("only_thought", "answers ended within a thought and so are none (--max-new-tokens allows more)"),
            ("log_probs_not_finite", "log-probs that are not finite"),
            ("kl_not_finite", "guided answers whose KL divergence is not finite: the mean is without them"),
        )
        if counts.get(name)
    ]
    if remarks:
        lines.append("; ".join(remarks))
    if all_nan(done):
        lines.append(
            "failed  every answer is NaN: the model gives no finite numbers; try another --dtype, or other files"
        )
    if counts.get("kl_per_answer") is not None:
        kl = beyond_rounding(counts["kl_per_answer"])
        lines.append(f"guided away from the model by {kl:.3g} nats an answer on average (KL)")
    name, where = folder.root.name, folder.runs_dir_option
    lines += [
        f"answers: {folder.answers}",
        f"next: gpuherd judge {name} {rule_for(questions_in(folder))}{where}   and   gpuherd score {name}{where}",
    ]
    return [printable(line) for line in lines]


def all_nan(done: Mapping[str, Any]) -> bool:
    """Whether every answer is NaN, so that there is none at all."""
    counts = done["counts"]
    return bool(counts["answers"]) and counts["finish"].get("nan", 0) == counts["answers"]


def _speed(shards: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second of a job while it decoded; empty if no time is known."""
    tokens = sum(each.get("tokens", 0) for each in shards)
    seconds = sum(each.get("seconds", 0.0) for each in shards)
    return f" ({tokens / seconds:.1f} tokens/s in a job)" if tokens and seconds > 0 else ""


def print_refused(console: Console, refused: Sequence[RefusedRow]) -> None:
    """The first refused rows with their reasons, and how many more there are."""
    for each in refused[:_MOST_REFUSED]:
        console.print(Text.assemble(("refused  ", "red"), printable(f"{each.row}: {each.reason}")), soft_wrap=True)
    if len(refused) > _MOST_REFUSED:
        more = len(refused) - _MOST_REFUSED
        console.print(Text(f"and {more} more, which refused.jsonl names"))


# ---- the stage -------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

WORKER = "gpuherd.qa.generate.worker"


@dataclass(frozen=True)
class GenerateOutcome(StageOutcome):
    """How a run of answers ended.

    Attributes:
        done: the content of done.json; None if the run is not complete.
    """

    done: Mapping[str, Any] | None = None

    @property
    def is_poor(self) -> bool:
        """Whether all answers are NaN."""
        return self.done is not None and all_nan(self.done)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The resources that each job requests, and the size of its batches."""

    asks: JobRequest
    workload: Workload


class GenerateExperiment(Stage[GenerateOutcome]):
    """Answers a data set's questions by a model on free GPUs.

    Args:
        config: the options.
        console: for progress and the summary; standard output by default.
        simulate: the GPUs are simulated: models are loaded into the CPU's memory.
    """

    kind = "generate"

    def __init__(self, config: GenerateConfig, *, console: Console | None = None, simulate: bool = False):
        self.config = config
        self.simulate = simulate
        self.folder = QADirectory(Path(config.runs_dir) / config.name())
        console = Console() if console is None else console
        super().__init__(config, self.folder, console, dry_run=config.dry_run, enqueue_only=config.enqueue_only)
        self._kept: Mapping[str, Any] | None = None
        self.shards: tuple[Shard, ...] = ()  # none before ``prepare``

    # ``run`` raises, besides the errors of all stages:
    #   UsageError: options that contradict each other; a run of this name with other settings, data or model.
    #   BadQuestions, MissingQuestions, BadModel, MissingModel: the questions or the model can't be used.
    #   JobCannotFit: the model fits nowhere here.
    #   NewerRun, DamagedRun, Damaged, MissingExtra.

    def existing(self) -> GenerateOutcome | None:
        if self.config.backend == "vllm":
            require(self.config, self.config.model)
        if not self.folder.run_json.exists():
            return None
        self._kept = begun_record(self.folder)
        refuse_other_settings(self._kept, self.config)
        return self._complete(self._kept) if self.folder.done.exists() else None

    def prepare(self) -> None:
        self.shards = self.work.shards(self.plan.asks.at_once)

    def planned(self) -> GenerateOutcome:
        return GenerateOutcome(never=self.never)

    def print_plan(self) -> None:
        """Prints what will run, and in a dry run whether the jobs could."""
        print_refused(self.console, self.prepared.refused)
        super().print_plan()

    def plan_lines(self) -> list[str]:
        lines = plan_lines(self.config, self.prepared, self.plan.asks, len(self.shards), self._answered())
        return [*lines, *super().plan_lines()]

    def begin(self) -> None:
        self.folder.create()
        write(self.prepared, self.folder)
        self.shards = self.work.begin(self.plan.asks.at_once)
        self.print_plan()

    def jobs(self) -> Sequence[Job]:
        """A job for each shard. Its worker reads in run.json how answers are decoded."""
        title = Path(self.config.model).name or self.config.model
        asks, workload = self.plan.asks, self.plan.workload
        return shard_jobs(
            WORKER, self.config.model, self.work, asks, workload, self.config, title=title, simulate=self.simulate
        )

    def finish(self, jobs: Outcome | None) -> GenerateOutcome:
        whole = jobs is None or jobs.complete
        done = finish(self.folder, self.prepared, self.shards) if whole else None
        outcome = GenerateOutcome(jobs, done=done)
        self._print_end(outcome)
        return outcome

    @property
    def folders_of_results(self) -> Sequence[Path]:
        return (self.folder.shards,)

    def to_dict(self) -> dict[str, Any]:
        """The plan or the outcome as JSON values, for ``--json``."""
        values: dict[str, Any] = {"run_id": self.folder.root.name, "folder": str(self.folder.root)}
        if self.shards:
            values |= {
                "questions": len(self.prepared.lengths),
                "answered": self._answered(),
                "longest_prompt": self.prepared.longest,
                "prompts_cut": self.prepared.cut,
                "refused": [asdict(each) for each in self.prepared.refused],
                "shards": len(self.shards),
                "asks": asdict(self.plan.asks),
                **self.plan_values(self.plan.asks.gpus),
            }
        if self.outcome is not None:
            values |= {
                "exit_code": int(self.outcome.exit_code),
                "complete": self.outcome.done is not None,
                "done": self.outcome.done,
                "failures": self.outcome.failure_values(),
            }
        return values

    # --- what ``prepare`` finds out -----------------------------------------------------------------------------------

    @cached_property
    def prepared(self) -> PreparedRun:
        """Questions and prompts."""
        return prepare(self.config, self._kept, self.folder, partial(track, self.console))

    @cached_property
    def plan(self) -> JobPlan:
        """The request of each job."""
        return plan_jobs(self.config, self.prepared)

    @cached_property
    def work(self) -> ShardedWork:
        """The questions, divided among the jobs."""
        return work_of(self.config, self.prepared, self.folder)

    def _answered(self) -> int:
        if self.folder.done.exists():
            return sum(len(shard.items) for shard in self.shards)
        return items_done(self.folder, self.shards)

    def _complete(self, kept: Mapping[str, Any]) -> GenerateOutcome:
        run = run_of_path(self.folder.root)
        run.check()
        if not self.config.dry_run:
            clear_shards(self.folder, len(read_plan(self.folder)) if self.folder.plan.exists() else 0)
        for changed in changed_models(self.config, kept):
            logger.warning(
                "%s has changed since run %s was made: its answers are of the model as it was; give another --run-id "
                "to ask it as it is now",
                changed,
                kept["run_id"],
            )
        self.console.print(f"run {kept['run_id']} is complete; nothing is left to do", markup=False, highlight=False)
        print_lines(self.console, done_lines(self.folder, run.done))
        return GenerateOutcome(done=run.done, already=True)

    def _print_end(self, outcome: GenerateOutcome) -> None:
        if outcome.done is not None:
            print_lines(self.console, done_lines(self.folder, outcome.done))
            return
        lines = [f"failed  {job}: {reason}" for job, reason in outcome.failures]
        if outcome.jobs is not None and outcome.jobs.interrupted:
            lines.append("stopped: the same command continues from here")
        elif not lines:
            lines.append("not all questions are answered; the same command continues from here")
        print_lines(self.console, [*lines, f"logs: {self.folder.logs}"])


def plan_jobs(config: GenerateConfig, prepared: PreparedRun, have: Resources | None = None) -> JobPlan:
    """The plan for this machine (``have``: for another). Raises what ``job_request`` raises, NoSuchGpu."""
    how = config.decoding()
    workload = Workload(config.rows * (how.samples + how.greedy), max(1, prepared.longest), config.max_new_tokens)
    have = resources_for(config) if have is None else have
    asks = job_request(config.model, config, workload, have, guide_bytes(prepared.guide, workload))
    if config.backend == "vllm" and asks.gpus > 1:
        # vLLM divides each layer, which not every number of GPUs can.
        asks = job_request(config.model, replace(config, parallel="tensor"), workload, have)
    return JobPlan(asks, workload)


def work_of(config: GenerateConfig, prepared: PreparedRun, folder: QADirectory) -> ShardedWork:
    """The questions of a run, divided among its jobs."""
    batches = partial(plan_batches, rows=config.rows)
    return ShardedWork(folder, identity_of(prepared.record), prepared.lengths, batches, config.shards)


def identity_of(record: Mapping[str, Any]) -> str:
    """One digest of everything on which a run's answers depend."""
    names = ("identity", "questions_sha256", "prompts_sha256", "model_sha256", "end_tokens", "stop")
    values = [record[name] for name in names]
    if record.get("guide") is not None:
        values += [record["guide"], record["guide_sha256"]]
    return digest_of(json.dumps(values, sort_keys=True))


def as_json(experiment: GenerateExperiment) -> str:
    """The text that ``--json`` prints."""
    return json.dumps(experiment.to_dict(), indent=2, allow_nan=False)
