"""A run of answers from the questions to done.json: what is prepared, which jobs run, what is made of their lines.

Knows the order of things. How a prompt is made, how answers are decoded and what runs when are other modules' business.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Outcome
from gpuherd.lm.batching import plan_batches
from gpuherd.lm.vllm import require
from gpuherd.models.load.jobs import JobRequest, Resources, WorkerCall, job_request, resources_for, shard_jobs
from gpuherd.models.plan.workload import Workload
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generation import summary
from gpuherd.qa.generation.begun import begun_record, refuse_other_settings
from gpuherd.qa.generation.config import GenerateConfig
from gpuherd.qa.generation.finish import clear_shards, finish
from gpuherd.qa.generation.guiding import guide_bytes
from gpuherd.qa.generation.prepared import Prepared, changed_models, prepare, write
from gpuherd.qa.runs import run_of_path
from gpuherd.runs.console import track
from gpuherd.runs.shard_file import Shard
from gpuherd.runs.shards import ShardedWork, items_done, read_plan
from gpuherd.runs.spec import digest_of
from gpuherd.runs.stage import Stage, StageOutcome, print_lines

logger = logging.getLogger(__name__)

WORKER = "gpuherd.qa.generation.worker"


@dataclass(frozen=True)
class GenerateOutcome(StageOutcome):
    """How a run of answers ended.

    Attributes:
        done: what done.json holds, None where the run is not complete.
    """

    done: Mapping[str, Any] | None = None

    @property
    def is_poor(self) -> bool:
        """Whether all answers are NaN."""
        return self.done is not None and summary.all_nan(self.done)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What each job requests, and what it does at once."""

    asks: JobRequest
    workload: Workload


class GenerateExperiment(Stage[GenerateOutcome]):
    """Answers a data set's questions by a model on free GPUs.

    Args:
        config: what to do.
        console: where progress and the summary go; standard output by default.
        simulate: the GPUs are pretended: models lie in the CPU's memory.
    """

    kind = "generate"

    def __init__(self, config: GenerateConfig, *, console: Console | None = None, simulate: bool = False):
        self.config = config
        self.simulate = simulate
        self.folder = QADirectory(Path(config.runs_dir) / config.name())
        console = Console() if console is None else console
        super().__init__(config, self.folder, console, dry_run=config.dry_run, enqueue_only=config.enqueue_only)
        self._kept: Mapping[str, Any] | None = None
        self._prepared: Prepared | None = None
        self._plan: JobPlan | None = None
        self.shards: tuple[Shard, ...] = ()

    # What ``run`` raises besides what all stages raise:
    #   UsageError: options that don't go together; a run of this name with other settings, data or model.
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
        def shown(items: Sequence[Any], title: str) -> Iterable[Any]:
            return track(self.console, items, title)

        self._prepared = prepare(self.config, self._kept, self.folder, shown)
        self._plan = plan_jobs(self.config, self._prepared)
        self.shards = self.work.shards(self._plan.asks.at_once)

    def planned(self) -> GenerateOutcome:
        return GenerateOutcome(never=() if self.outlook is None else self.outlook.never)

    def print_plan(self) -> None:
        """Prints what will run; of a dry run also what becomes of the jobs."""
        lines = summary.plan_lines(self.config, self.prepared, self.plan.asks, len(self.shards), self._answered())
        summary.print_refused(self.console, self.prepared.refused)
        if self.outlook is not None:
            lines += [*self.outlook.lines, "nothing was started"]
        print_lines(self.console, lines)

    def begin(self) -> None:
        self.folder.create()
        write(self.prepared, self.folder)
        self.shards = self.work.begin(self.plan.asks.at_once)
        self.print_plan()

    def jobs(self) -> Sequence[Job]:
        """A job for each shard; how answers are decoded its worker reads in run.json."""
        call = WorkerCall(
            module=WORKER,
            model=self.config.model,
            words=(),
            workload=self.plan.workload,
            simulate=self.simulate,
            identity=self.work.identity,
            title=Path(self.config.model).name or self.config.model,
        )
        return shard_jobs(call, self.shards, self.folder, self.plan.asks, self.config)

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
        """JobPlan or outcome as plain JSON values, for ``--json``."""
        values: dict[str, Any] = {"run_id": self.folder.root.name, "folder": str(self.folder.root)}
        if self._plan is not None:
            values |= {
                "questions": len(self.prepared.lengths),
                "answered": self._answered(),
                "longest_prompt": self.prepared.longest,
                "prompts_cut": self.prepared.cut,
                "refused": [asdict(each) for each in self.prepared.refused],
                "shards": len(self.shards),
                "asks": asdict(self.plan.asks),
            }
            if self.outlook is not None:
                values |= self.outlook.to_dict() | {"engine_asks": self.outlook.asks.get(self.plan.asks.gpus)}
        if self.outcome is not None:
            values |= {
                "exit_code": int(self.outcome.exit_code),
                "complete": self.outcome.done is not None,
                "done": self.outcome.done,
                "failures": self.outcome.failure_values(),
            }
        return values

    # --- what is known after ``prepare`` ------------------------------------------------------------------------------

    @property
    def prepared(self) -> Prepared:
        """Questions and prompts."""
        assert self._prepared is not None  # noqa: S101 - ``prepare`` has made it
        return self._prepared

    @property
    def plan(self) -> JobPlan:
        """What each job requests."""
        assert self._plan is not None  # noqa: S101 - ``prepare`` has made it
        return self._plan

    @cached_property
    def work(self) -> ShardedWork:
        """The questions as the jobs share them."""
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
        print_lines(self.console, summary.done_lines(self.folder, run.done))
        return GenerateOutcome(done=run.done, already=True)

    def _print_end(self, outcome: GenerateOutcome) -> None:
        if outcome.done is not None:
            print_lines(self.console, summary.done_lines(self.folder, outcome.done))
            return
        lines = [f"failed  {job}: {reason}" for job, reason in outcome.failures]
        if outcome.jobs is not None and outcome.jobs.interrupted:
            lines.append("stopped: the same command goes on from here")
        elif not lines:
            lines.append("not all is answered; the same command goes on from here")
        print_lines(self.console, [*lines, f"logs: {self.folder.logs}"])


def plan_jobs(config: GenerateConfig, prepared: Prepared, have: Resources | None = None) -> JobPlan:
    """The plan for this machine (``have``: for another). Raises what ``job_request`` raises, NoSuchGpu."""
    how = config.decoding()
    workload = Workload(config.rows * (how.samples + how.greedy), max(1, prepared.longest), config.max_new_tokens)
    have = resources_for(config) if have is None else have
    asks = job_request(config.model, config, workload, have, guide_bytes(prepared.guide, workload))
    if config.backend == "vllm" and asks.gpus > 1:
        # It divides each layer, which not every number of GPUs can.
        asks = job_request(config.model, replace(config, parallel="tensor"), workload, have)
    return JobPlan(asks, workload)


def work_of(config: GenerateConfig, prepared: Prepared, folder: QADirectory) -> ShardedWork:
    """The questions of a run as its jobs share them."""
    batches = partial(plan_batches, rows=config.rows)
    return ShardedWork(folder, identity_of(prepared.record), prepared.lengths, batches, config.shards)


def identity_of(record: Mapping[str, Any]) -> str:
    """All that a run's answers depend on, as one digest."""
    names = ("identity", "questions_sha256", "prompts_sha256", "model_sha256", "end_tokens", "stop")
    values = [record[name] for name in names]
    if record.get("guide") is not None:
        values += [record["guide"], record["guide_sha256"]]
    return digest_of(json.dumps(values, sort_keys=True))


def as_json(experiment: GenerateExperiment) -> str:
    """What ``--json`` prints."""
    return json.dumps(experiment.to_dict(), indent=2, allow_nan=False)
