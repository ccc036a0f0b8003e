"""An ESD experiment from list to summary: plan, queue, workers on free GPUs, result tables.

Knows the order of things and what a folder of results may hold. What a model is, what runs when, and what the figures
mean are other modules' business.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd import __version__
from gpuherd.atomic import append_line
from gpuherd.esd.config import ExperimentConfig
from gpuherd.esd.folder import failure_records, refuse_another, refuse_to_mix
from gpuherd.esd.model_list import ModelRow, RefusedRow
from gpuherd.esd.plan import (
    AnalysisPlan,
    PlanLine,
    gpus_needed,
    make_job,
    make_plan,
    print_plan,
    run_directory,
    worker_command,
)
from gpuherd.esd.summary import (
    FailureLine,
    GatheredModels,
    ModelSummary,
    done_jobs,
    gather,
    is_done,
    print_summary,
    write_summary,
)
from gpuherd.esd.tails import tails
from gpuherd.jobs.job import Job
from gpuherd.jobs.records import Failure, Outcome
from gpuherd.runs.console import track
from gpuherd.runs.spec import begun_here, now, versions
from gpuherd.runs.stage import Stage, StageOutcome

logger = logging.getLogger(__name__)

REFUSED = "refused"
_ENDS = ("failed", "waiting", "cancelled")


@dataclass(frozen=True)
class ExperimentOutcome(StageOutcome):
    """How an experiment ended.

    Attributes:
        refused: rows that were not analysed, with the reason.
        results: the models that are done, in the order of the list.
        done_before: how many of them were done before this run.
        others: models that are done but whose files can't be used (made by another convention meanwhile, or damaged),
            with the reason.
    """

    refused: tuple[RefusedRow, ...] = ()
    results: tuple[ModelSummary, ...] = ()
    done_before: int = 0
    others: tuple[FailureLine, ...] = ()

    @property
    def is_poor(self) -> bool:
        """Whether a row of the list is not done although no job failed."""
        return bool(self.refused or self.others)


class ESDExperiment(Stage[ExperimentOutcome]):
    """Analyses the spectra of a list of models on free GPUs.

    A subclass can change ``_build_esd_command``, to run the worker with other words or another program, and
    ``_print_summary``, to tell more at the end.

    Args:
        config: what to do.
        console: where progress and the summary go; standard output by default.
    """

    kind = "esd_experiment"

    def __init__(self, config: ExperimentConfig, *, console: Console | None = None):
        self.config = config
        self.directory = run_directory(config)
        console = Console() if console is None else console
        super().__init__(config, self.directory, console, dry_run=config.dry_run, enqueue_only=config.enqueue_only)
        self.plan = AnalysisPlan((), ())
        self._jobs: Sequence[Job] = ()
        self._done_at_start = 0

    def run(self) -> ExperimentOutcome:
        """Runs the experiment to its end, or continues one that was stopped.

        Raises:
            BadModelList, BadModel, MissingModel: the list, or the model of ``single_model``, can't be used.
            CannotWrite: the output folder can't be written.
            UsageError: the folder holds results of another convention, or the requested GPUs don't exist.
            MissingExtra: truncated power laws are requested, and powerlaw 1.5 is not there.
            QueueBusy: another gpuherd works on the same folder.
        """
        for tail in tails():
            if getattr(self.config, tail.name):
                tail.require()
        if self.config.dry_run:
            return super().run()
        self._check_convention()
        self.directory.create()
        with self.logged() as log:  # what is found out about the models of the list belongs into it too
            logger.info("gpuherd %s: %s", __version__, json.dumps(self.config.to_dict()))
            outcome = super().run()
            logger.info("%s; log: %s", self.headline(), log)
        self._print_summary()
        return outcome

    # --- what a subclass may change -----------------------------------------------------------------------------

    def _build_esd_command(self, row: ModelRow) -> list[str]:
        """The worker's argument list for a row of the list. The worker refuses words that it doesn't know."""
        return worker_command(self.config, row, self.directory)

    def _print_summary(self) -> None:
        """Prints what was done, what failed, and where everything is. ``self.outcome`` holds the figures."""
        if self.outcome is not None:
            places = [("results", str(self.directory.stats)), ("summary", str(self.directory.summary))]
            places.append(("logs", str(self.directory.logs)))
            print_summary(self.console, self.outcome.results, self.failures(), places, self.headline())

    # --- figures for summaries ----------------------------------------------------------------------------------

    def failures(self) -> list[FailureLine]:
        """The rows refused and the models that failed, each with its reason."""
        refused = [FailureLine(self._where(refusal), refusal.reason, True) for refusal in self.plan.refused]
        jobs = self.outcome.jobs if self.outcome is not None else None
        failed: Sequence[Failure] = () if jobs is None else jobs.failures
        others = () if self.outcome is None else self.outcome.others
        return [*refused, *(FailureLine(failure.title, failure.sentence) for failure in failed), *others]

    def headline(self) -> str:
        """The counts in one line."""
        if self.outcome is None:
            return "not run yet"
        counts = self._counts(self.outcome)
        text = ", ".join(f"{number} {word}" for word, number in counts.items() if number or word == "done")
        if self.outcome.done_before:
            text = text.replace(" done", f" done ({self.outcome.done_before} before this run)", 1)
        jobs = self.outcome.jobs
        stopped = jobs is not None and jobs.interrupted
        return f"{text}; stopped: the same command goes on from here" if stopped else text

    def _counts(self, outcome: ExperimentOutcome) -> dict[str, int]:
        """Models of the list, by what became of them."""
        jobs = {} if outcome.jobs is None else {name: getattr(outcome.jobs, name) for name in _ENDS}
        return {"done": len(outcome.results), "refused": len(self.plan.refused)} | jobs

    def to_dict(self) -> dict[str, Any]:
        """Plan or outcome as plain JSON values, for ``--json``."""
        if self.outcome is None or self.config.dry_run:
            refused = [
                {"model": refusal.model_id, "row": refusal.line, "reason": refusal.reason}
                for refusal in self.plan.refused
            ]
            engine = {} if self.outlook is None else self.outlook.to_dict()
            return engine | {"plan": [asdict(line) for line in self._plan_lines()], "refused": refused}
        jobs, counts = self.outcome.jobs, self._counts(self.outcome)
        return {
            "exit_code": int(self.outcome.exit_code),
            "interrupted": jobs is not None and jobs.interrupted,
            "counts": {name: counts.get(name, 0) for name in ("done", "failed", "refused", "waiting")},
            "models": [
                {"stats": str(each.stats), "seconds": each.seconds, "gpus": list(each.gpus)} | each.columns()
                for each in self.outcome.results
            ],
            "failures": [asdict(line) for line in self.failures()],
            "output_dir": str(self.directory.root),
            "summary": str(self.directory.summary),
        }

    # --- the steps of a stage -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        self.plan = make_plan(self.config, partial(track, self.console))
        self._jobs = [
            make_job(self.config, planned, self._build_esd_command(planned.row), self.directory)
            for planned in self.plan.models
        ]

    def begin(self) -> None:
        self._check_others()
        self._report_refused()
        self._done_at_start = len(self._done_before(self.jobs()))

    def jobs(self) -> Sequence[Job]:
        return self._jobs

    def left(self, jobs: Sequence[Job]) -> Sequence[Job]:
        done = self._done_before(jobs)
        return [job for job in jobs if job.name not in done]

    @property
    def reruns(self) -> bool:
        return self.config.overwrite

    def before_jobs(self) -> None:
        """Writes the record of the run. Looks at the convention again: another run can have come and gone meanwhile."""
        self._check_convention()
        self._check_others()
        self.directory.write_run_record(
            {
                "command": sys.argv,
                "config": self.config.to_dict(),
                "convention": self.config.convention_columns,
                "versions": versions(),
                **begun_here(),
            }
        )

    @property
    def folders_of_results(self) -> Sequence[Path]:
        return self.directory.folders_of_results

    def finish(self, jobs: Outcome | None) -> ExperimentOutcome:
        """Rebuilds the summary file from the queue and the stats files; of the list those models that are done."""
        found = GatheredModels()
        if self.directory.queue.exists():
            found = gather(self.directory, list(zip(self.jobs(), self.plan.models, strict=True)))
            write_summary(self.directory, found.results)
        return ExperimentOutcome(jobs, self.plan.refused, found.results, self._done_at_start, found.others)

    def planned(self) -> ExperimentOutcome:
        return ExperimentOutcome(None, self.plan.refused, never=self.never)

    def print_plan(self) -> None:
        lines = self._plan_lines()
        done = sum(line.state == "done" for line in lines)
        headline = f"{len(lines) - done} to do, {done} done, {len(self.plan.refused)} refused; nothing was started"
        refused = [f"{self._where(refusal)}: {refusal.reason}" for refusal in self.plan.refused]
        engine = [] if self.outlook is None else self.outlook.lines
        print_plan(self.console, lines, refused, "\n".join([*engine, headline]))

    # --- parts of them ------------------------------------------------------------------------------------------

    def _check_convention(self) -> None:
        """Refuses a folder whose results were made with other analysis options, unless they are to be overwritten."""
        if not self.config.overwrite:
            remedy = "Choose another --output-dir, or --overwrite to make them anew"
            refuse_another(self.directory, self.config.convention_columns, remedy)

    def _check_others(self) -> None:
        """Refuses to overwrite some results with other analysis options and to leave the others as they are."""
        anew = {self.directory.stats_file(planned.row.model_id) for planned in self.plan.models}
        refuse_to_mix(self.directory, self.config.convention_columns, anew)

    def _report_refused(self) -> None:
        """Tells each refused row as one line, and in failures.jsonl unless an earlier run already has."""
        records = failure_records(self.directory)
        told = {(each.get("title"), each.get("reason")) for each in records if each.get("class") == REFUSED}
        for refusal in self.plan.refused:
            line = f"{self._where(refusal)}: {refusal.reason}"
            logger.error("%s", line)
            self.console.print(f"refused  {line}", style="red", markup=False, highlight=False, soft_wrap=True)
            if (refusal.model_id, refusal.reason) not in told:
                about = {"time": now(), "job": None, "title": refusal.model_id, "row": refusal.line, "attempt": 0}
                append_line(self.directory.failures, json.dumps(about | {"class": REFUSED, "reason": refusal.reason}))

    def _where(self, refusal: RefusedRow) -> str:
        return refusal.where(None if self.config.model_list is None else os.fspath(self.config.model_list))

    def _plan_lines(self) -> list[PlanLine]:
        jobs = self.jobs()
        done = self._done_before(jobs)
        gpus = gpus_needed(self.config)
        asks = None if self.outlook is None else self.outlook.asks.get(gpus)
        return [
            PlanLine(
                model=planned.row.model_id,
                relation=planned.row.relation,
                base=planned.facts.base or planned.row.source_model,
                size_bytes=planned.facts.total_bytes,
                matrices=planned.facts.num_matrices,
                share=planned.facts.share,
                gpus=gpus,
                state="done" if job.name in done else "to do",
                asks=asks,
            )
            for job, planned in zip(jobs, self.plan.models, strict=True)
        ]

    def _done_before(self, jobs: Sequence[Job]) -> set[str]:
        """Names of those of this plan's jobs that would be skipped."""
        if self.config.overwrite or not self.directory.queue.exists():
            return set()
        done = done_jobs(self.directory)
        return {job.name for job in jobs if is_done(job, done) and Path(str(job.result)).exists()}
