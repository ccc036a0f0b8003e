"""A run of answers from the questions to done.json: what is prepared, which jobs run, what is made of their lines.

Knows the order of things. How a prompt is made, how answers are decoded and what runs when are other modules' business.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd.errors import ExitCode
from gpuherd.jobs import feasibility
from gpuherd.jobs.records import Outcome
from gpuherd.lm.vllm import require
from gpuherd.qa.folder import QADirectory
from gpuherd.qa.generation import summary
from gpuherd.qa.generation.config import GenerateConfig
from gpuherd.qa.generation.gathering import clear_shards, finish
from gpuherd.qa.generation.kept import begun_record, refuse_other_settings
from gpuherd.qa.generation.plan import Plan, identity_of, make_jobs, make_plan
from gpuherd.qa.generation.prepared import Prepared, changed_models, prepare, write
from gpuherd.qa.runs import run_of_path
from gpuherd.qa.working.running import failure_lines, run_work
from gpuherd.qa.working.shardfile import batches_done
from gpuherd.qa.working.sharding import Shard
from gpuherd.qa.working.shardplan import kept_plan, read_plan
from gpuherd.report.progress import track

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerateOutcome:
    """How a run of answers ended.

    Attributes:
        jobs: how its jobs ended; None when none was started.
        done: what done.json holds, None where the run is not complete.
        never: why jobs of a dry run could never run.
    """

    jobs: Outcome | None
    done: Mapping[str, Any] | None
    never: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """0 only when the run is complete or was drained, and not all answers are NaN; or nothing was to be started and
        all could be."""
        if self.jobs is not None and self.jobs.exit_code is not ExitCode.OK:
            return self.jobs.exit_code
        nothing = self.done is not None and summary.all_nan(self.done)
        return ExitCode.FAILED if self.never or nothing else ExitCode.OK


class GenerateExperiment:
    """Answers a data set's questions by a model on free GPUs.

    Args:
        config: what to do.
        console: where progress and the summary go; standard output by default.
        simulate: the GPUs are pretended: models lie in the CPU's memory.
    """

    def __init__(self, config: GenerateConfig, *, console: Console | None = None, simulate: bool = False):
        self.config = config
        self.console = Console() if console is None else console
        self.simulate = simulate
        self.folder = QADirectory(Path(config.runs_dir) / config.name())
        self.prepared: Prepared | None = None
        self.plan: Plan | None = None
        self.outcome: GenerateOutcome | None = None
        self._outlook: feasibility.Outlook | None = None

    def run(self) -> GenerateOutcome:
        """Runs to the end, or goes on with a run that was stopped.

        Raises:
            UsageError: options that don't go together; a run of this name with other settings, data or model.
            BadQuestions, MissingQuestions, BadModel, MissingModel: the questions or the model can't be used.
            JobCannotFit: the model fits nowhere here. NoSuchGpu.
            CannotWrite, QueueBusy, NewerRun, DamagedRun, Damaged, MissingExtra.
        """
        if self.config.backend == "vllm":
            require(self.config, self.config.model)
        kept = self._kept()
        if kept is not None and self.folder.done.exists():
            return self._complete(kept)
        self.prepared = prepare(self.config, kept, self.folder, self._track)
        self.plan = make_plan(self.config, self.prepared)
        if self.config.dry_run:
            self._tell_plan(self._shards_now())
            self.outcome = GenerateOutcome(None, None, () if self._outlook is None else self._outlook.never)
            return self.outcome
        self.folder.create()
        write(self.prepared, self.folder)
        shards = self._shards()
        summary.print_refused(self.console, self.prepared.refused)
        self._tell_plan(shards)
        jobs = make_jobs(self.config, self.prepared, self.plan, shards, self.folder, simulate=self.simulate)
        outcome = run_work(jobs, self.config, self.folder, self.console, kind="generate")
        done = finish(self.folder, self.prepared, shards) if outcome.complete else None
        self.outcome = GenerateOutcome(outcome, done)
        self._tell_end(outcome, done)
        return self.outcome

    def to_dict(self) -> dict[str, Any]:
        """Plan or outcome as plain JSON values, for ``--json``."""
        told: dict[str, Any] = {"run_id": self.folder.root.name, "folder": str(self.folder.root)}
        if self.prepared is not None and self.plan is not None:
            shards = self._shards_now()
            told |= {
                "questions": len(self.prepared.lengths),
                "answered": self._answered(shards),
                "longest_prompt": self.prepared.longest,
                "prompts_cut": self.prepared.cut,
                "refused": [asdict(each) for each in self.prepared.refused],
                "shards": len(shards),
                "asks": asdict(self.plan.asks),
            }
            if self._outlook is not None:
                told |= self._outlook.to_dict() | {"engine_asks": self._outlook.asks.get(self.plan.asks.gpus)}
        if self.outcome is not None:
            jobs = self.outcome.jobs
            told |= {
                "exit_code": int(self.outcome.exit_code),
                "complete": self.outcome.done is not None,
                "done": self.outcome.done,
                "failures": []
                if jobs is None
                else [{"job": job, "reason": reason} for job, reason in failure_lines(jobs)],
            }
        return told

    # --- steps --------------------------------------------------------------------------------------------------

    def _kept(self) -> Mapping[str, Any] | None:
        """What run.json holds of a run of this name; None where there is none. Raises UsageError for another's."""
        if not self.folder.run_json.exists():
            return None
        kept = begun_record(self.folder)
        refuse_other_settings(kept, self.config)
        return kept

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
        summary.print_lines(self.console, summary.done_lines(self.folder, run.done))
        self.outcome = GenerateOutcome(None, run.done)
        return self.outcome

    def _shards(self) -> tuple[Shard, ...]:
        """The run's shards: those that it was begun with, else the plan's, which are then its own."""
        assert self.prepared is not None and self.plan is not None  # noqa: S101 - run() has made both
        planned = self.plan.shards
        return kept_plan(self.folder, identity_of(self.prepared.record), lambda: planned, wanted=self.config.shards)

    def _shards_now(self) -> tuple[Shard, ...]:
        """The same without writing anything."""
        assert self.plan is not None  # noqa: S101 - as above
        return read_plan(self.folder) if self.folder.plan.exists() else self.plan.shards

    def _answered(self, shards: Sequence[Shard]) -> int:
        if self.folder.done.exists():
            return sum(len(shard.items) for shard in shards)
        done = [batches_done(self.folder.shard(number), shard) for number, shard in enumerate(shards)]
        return sum(len(batch) for shard, many in zip(shards, done, strict=True) for batch in shard.batches[:many])

    def _tell_plan(self, shards: Sequence[Shard]) -> None:
        assert self.prepared is not None and self.plan is not None  # noqa: S101 - as above
        lines = summary.plan_lines(self.config, self.prepared, self.plan, len(shards), self._answered(shards))
        if self.config.dry_run:
            summary.print_refused(self.console, self.prepared.refused)
            self._outlook = feasibility.of_like([self.plan.asks.gpus] * len(shards), self.config, self.folder)
            lines += self._outlook.lines
            lines.append("nothing was started")
        summary.print_lines(self.console, lines)

    def _tell_end(self, outcome: Outcome, done: Mapping[str, Any] | None) -> None:
        if done is not None:
            summary.print_lines(self.console, summary.done_lines(self.folder, done))
            return
        lines = [f"failed  {job}: {reason}" for job, reason in failure_lines(outcome)]
        if outcome.interrupted:
            lines.append("stopped: the same command goes on from here")
        elif not lines:
            lines.append("not all is answered; the same command goes on from here")
        summary.print_lines(self.console, [*lines, f"logs: {self.folder.logs}"])

    def _track(self, items: Sequence[Any], title: str) -> Iterable[Any]:
        return track(self.console, items, title)


def as_json(experiment: GenerateExperiment) -> str:
    """What ``--json`` prints."""
    return json.dumps(experiment.to_dict(), indent=2, allow_nan=False)
