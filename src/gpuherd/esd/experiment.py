"""An ESD experiment from list to summary: plan, queue, workers on free GPUs, result tables.

Knows the order of things and what a folder of results may hold. What a model is, what runs when, and what the figures
mean are other modules' business.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from gpuherd import __version__
from gpuherd.atomic import append_line, remove_strays
from gpuherd.errors import ExitCode
from gpuherd.esd.config import ExperimentConfig
from gpuherd.esd.folder import ESDDirectory
from gpuherd.esd.gathering import Gathered, ModelResult, OtherResult, done_jobs, gather, is_done, write_summary
from gpuherd.esd.model_list import ModelRow
from gpuherd.esd.plan import (
    Plan,
    PlannedModel,
    Refusal,
    gpus_needed,
    make_job,
    make_plan,
    result_file,
    run_directory,
    worker_command,
)
from gpuherd.esd.tables.conventions import refuse_another, refuse_to_mix
from gpuherd.jobs import clock, feasibility
from gpuherd.jobs.job import Job
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import Failure, Outcome
from gpuherd.jobs.run import run_jobs
from gpuherd.report.log import run_log
from gpuherd.report.plan import PlanLine, print_plan
from gpuherd.report.progress import track
from gpuherd.report.summary import FailureLine, SummaryLine, print_summary

logger = logging.getLogger(__name__)

REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    """How an experiment ended.

    Attributes:
        jobs: how the jobs ended; None when nothing was started (--dry-run, or no usable row).
        refused: rows that were not analysed, with the reason.
        results: the models that are done, in the order of the list.
        done_before: how many of them were done before this run.
        others: models that are done but whose files can't be used (made by another convention meanwhile, or damaged),
            with the reason.
        never: why jobs of a dry run could never run.
    """

    jobs: Outcome | None
    refused: tuple[Refusal, ...]
    results: tuple[ModelResult, ...] = ()
    done_before: int = 0
    others: tuple[OtherResult, ...] = ()
    never: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """What the command exits with: 0 only when every row of the list is done."""
        if self.jobs is not None and self.jobs.exit_code is not ExitCode.OK:
            return self.jobs.exit_code
        return ExitCode.FAILED if self.refused or self.others or self.never else ExitCode.OK


class ESDExperiment:
    """Analyses the spectra of a list of models on free GPUs.

    A subclass can change ``_build_esd_command``, to run the worker with other words or another program, and
    ``_print_summary``, to tell more at the end.

    Args:
        config: what to do.
        console: where progress and the summary go; standard output by default.
    """

    def __init__(self, config: ExperimentConfig, *, console: Console | None = None):
        self.config = config
        self.console = console if console is not None else Console()
        self.directory = run_directory(config)
        self.plan = Plan((), ())
        self.outcome: ExperimentOutcome | None = None
        self._outlook: feasibility.Outlook | None = None

    def run(self) -> ExperimentOutcome:
        """Runs the experiment to its end, or goes on with one that was stopped.

        Raises:
            BadModelList, BadModel, MissingModel: the list, or the model of ``single_model``, can't be used.
            CannotWrite: the output folder can't be written.
            UsageError: the folder holds results of another convention, or the GPUs asked for don't exist.
            MissingExtra: truncated power laws are asked for, and powerlaw 1.5 is not there.
            QueueBusy: another gpuherd works on the same folder.
        """
        if self.config.tpl:
            from gpuherd.esd.fits.truncated_power_law import require_powerlaw

            require_powerlaw()
        if self.config.dry_run:
            self.plan = self._make_plan()
            jobs = [self._job(planned) for planned in self.plan.models]
            done = self._done_before(jobs)
            self._outlook = feasibility.of_jobs(
                [job for job in jobs if job.name not in done], self.config, self.directory
            )
            self.outcome = ExperimentOutcome(None, self.plan.refused, never=self._outlook.never)
            self._print_plan()
            return self.outcome
        began = clock.wall()
        self._check_convention()
        self.directory.create()
        with run_log(self.directory.logs, datetime.now(), "esd_experiment") as log:
            logger.info("gpuherd %s: %s", __version__, json.dumps(self.config.to_dict()))
            self.plan = self._make_plan()
            self._check_others()
            self._report_refused()
            jobs = [self._job(planned) for planned in self.plan.models]
            done_before = len(self._done_before(jobs))
            outcome = self._run_jobs(jobs) if jobs else None
            found = self._collect(jobs)
            self._tidy(began)
            self.outcome = ExperimentOutcome(outcome, self.plan.refused, found.results, done_before, found.others)
            logger.info("%s; log: %s", self.headline(), log)
        self._print_summary()
        return self.outcome

    # --- what a subclass may change -----------------------------------------------------------------------------

    def _build_esd_command(self, row: ModelRow) -> list[str]:
        """The worker's argument list for a row of the list. The worker refuses words that it doesn't know."""
        return worker_command(self.config, row, self.directory)

    def _print_summary(self) -> None:
        """Prints what was done, what failed, and where everything is. ``self.outcome`` holds the figures."""
        if self.outcome is not None:
            places = [("results", str(self.directory.stats)), ("summary", str(self.directory.summary))]
            places.append(("logs", str(self.directory.logs)))
            lines = [_summary_line(result) for result in self.outcome.results]
            print_summary(self.console, lines, self.failures(), places, self.headline())

    # --- figures for summaries ----------------------------------------------------------------------------------

    def failures(self) -> list[FailureLine]:
        """The rows refused and the models that failed, each with its reason."""
        refused = [FailureLine(self._where(refusal), refusal.reason, True) for refusal in self.plan.refused]
        jobs = self.outcome.jobs if self.outcome is not None else None
        failed: Sequence[Failure] = () if jobs is None else jobs.failures
        others = () if self.outcome is None else self.outcome.others
        lines = [FailureLine(failure.title, failure.sentence) for failure in failed]
        return refused + lines + [FailureLine(other.model, other.reason) for other in others]

    def headline(self) -> str:
        """The counts in one line."""
        if self.outcome is None:
            return "not run yet"
        jobs = self.outcome.jobs
        counts = [("done", len(self.outcome.results)), ("refused", len(self.plan.refused))]
        if jobs is not None:
            counts += [("failed", jobs.failed), ("waiting", jobs.waiting), ("cancelled", jobs.cancelled)]
        text = ", ".join(f"{number} {word}" for word, number in counts if number or word == "done")
        if self.outcome.done_before:
            text = text.replace(" done", f" done ({self.outcome.done_before} before this run)", 1)
        stopped = jobs is not None and jobs.interrupted
        return f"{text}; stopped: the same command goes on from here" if stopped else text

    def to_dict(self) -> dict[str, Any]:
        """Plan or outcome as plain JSON values, for ``--json``."""
        if self.outcome is None or self.config.dry_run:
            refused = [
                {"model": refusal.model_id, "row": refusal.line, "reason": refusal.reason}
                for refusal in self.plan.refused
            ]
            engine = {} if self._outlook is None else self._outlook.to_dict()
            return engine | {"plan": [asdict(line) for line in self._plan_lines()], "refused": refused}
        jobs = self.outcome.jobs
        return {
            "exit_code": int(self.outcome.exit_code),
            "interrupted": jobs is not None and jobs.interrupted,
            "counts": {
                "done": len(self.outcome.results),
                "failed": 0 if jobs is None else jobs.failed,
                "refused": len(self.plan.refused),
                "waiting": 0 if jobs is None else jobs.waiting,
            },
            "models": [_result_entry(result) for result in self.outcome.results],
            "failures": [asdict(line) for line in self.failures()],
            "output_dir": str(self.directory.root),
            "summary": str(self.directory.summary),
        }

    # --- steps --------------------------------------------------------------------------------------------------

    def _make_plan(self) -> Plan:
        def shown(rows: Sequence[ModelRow], title: str) -> Iterable[ModelRow]:
            return track(self.console, rows, title)

        return make_plan(self.config, shown)

    def _check_convention(self) -> None:
        """Refuses a folder whose results were made with other analysis options, unless they are to be overwritten."""
        if not self.config.overwrite:
            remedy = "Choose another --output-dir, or --overwrite to make them anew"
            refuse_another(self.directory, self.config.convention_columns, remedy)

    def _check_others(self) -> None:
        """Refuses to overwrite some results with other analysis options and leave the others beside them."""
        anew = {result_file(self.directory, planned.row) for planned in self.plan.models}
        refuse_to_mix(self.directory, self.config.convention_columns, anew)

    def _report_refused(self) -> None:
        """Tells each refused row as one line, and in failures.jsonl unless an earlier run already has."""
        told = set(_refusals_told(self.directory))
        for refusal in self.plan.refused:
            line = f"{self._where(refusal)}: {refusal.reason}"
            logger.error("%s", line)
            self.console.print(f"refused  {line}", style="red", markup=False, highlight=False, soft_wrap=True)
            if (refusal.model_id, refusal.reason) not in told:
                append_line(self.directory.failures, json.dumps(self._failure_record(refusal)))

    def _failure_record(self, refusal: Refusal) -> dict[str, Any]:
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "job": None,
            "title": refusal.model_id,
            "row": refusal.line,
            "attempt": 0,
            "class": REFUSED,
            "reason": refusal.reason,
        }

    def _where(self, refusal: Refusal) -> str:
        return refusal.where(None if self.config.model_list is None else os.fspath(self.config.model_list))

    def _job(self, planned: PlannedModel) -> Job:
        return make_job(self.config, planned, self._build_esd_command(planned.row), self.directory)

    def _run_jobs(self, jobs: Sequence[Job]) -> Outcome:
        rerun: Collection[str] = [job.name for job in jobs] if self.config.overwrite else ()
        with display(self.console) as shown:
            return run_jobs(
                jobs,
                self.config,
                self.directory,
                rerun=rerun,
                before=self._begin,
                display=shown,
                enqueue_only=self.config.enqueue_only,
            )

    def _begin(self) -> None:
        """Writes the record of the run. Looks at the convention again: another run can have come and gone meanwhile."""
        self._check_convention()
        self._check_others()
        self.directory.write_run_record(self._run_record())

    def _run_record(self) -> dict[str, Any]:
        return {
            "command": sys.argv,
            "config": self.config.to_dict(),
            "convention": self.config.convention_columns,
            "cwd": os.getcwd(),  # noqa: PTH109 - a record, not a path to work with
            "host": socket.gethostname(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"gpuherd": __version__, "python": platform.python_version()},
        }

    def _collect(self, jobs: Sequence[Job]) -> Gathered:
        """Rebuilds the summary file from the queue and the stats files. Returns this list's models that are done."""
        if not self.directory.queue.exists():
            return Gathered((), ())
        found = gather(self.directory, list(zip(jobs, self.plan.models, strict=True)))
        write_summary(self.directory, found.results)
        return found

    def _tidy(self, began: float) -> None:
        """Removes half-written files of workers that were killed before this run began.

        Not while a job of the queue runs: a worker of an earlier run, stopped for a while, could go on writing. What
        workers have written since, also those that people run by hand, is not looked at.
        """
        if not self.directory.queue.exists():
            return
        with Queue(self.directory.queue) as queue:
            if queue.running():
                return
        for folder in (self.directory.root, *self.directory.folders_of_results):
            remove_strays(folder, began)

    # --- the dry run --------------------------------------------------------------------------------------------

    def _print_plan(self) -> None:
        lines = self._plan_lines()
        done = sum(line.state == "done" for line in lines)
        headline = f"{len(lines) - done} to do, {done} done, {len(self.plan.refused)} refused; nothing was started"
        refused = [f"{self._where(refusal)}: {refusal.reason}" for refusal in self.plan.refused]
        engine = [] if self._outlook is None else self._outlook.lines
        print_plan(self.console, lines, refused, "\n".join([*engine, headline]))

    def _plan_lines(self) -> list[PlanLine]:
        jobs = [self._job(planned) for planned in self.plan.models]
        done = self._done_before(jobs)
        gpus = gpus_needed(self.config)
        asks = None if self._outlook is None else self._outlook.asks.get(gpus)
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


def _summary_line(result: ModelResult) -> SummaryLine:
    summary = result.summary
    return SummaryLine(
        model=summary.lineage["model_id"],
        layers=summary.layers,
        without_fit=summary.without_fit,
        alpha_mean=summary.metrics.get("alpha_mean"),
        alpha_min=summary.metrics.get("alpha_min"),
        alpha_max=summary.metrics.get("alpha_max"),
        seconds=result.seconds,
        gpus=", ".join(result.gpus) or "CPU",
    )


def _result_entry(result: ModelResult) -> dict[str, Any]:
    return {"stats": str(result.stats), "seconds": result.seconds, "gpus": list(result.gpus)} | result.summary.columns()


def _refusals_told(directory: ESDDirectory) -> Iterable[tuple[str, str]]:
    """Model and reason of each refusal that failures.jsonl holds already."""
    try:
        lines = directory.failures.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while writing it
        if isinstance(record, dict) and record.get("class") == REFUSED:
            yield str(record.get("title")), str(record.get("reason"))
