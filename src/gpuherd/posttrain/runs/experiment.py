"""An experiment from its settings to done.json: the checks before it, its jobs, its summary.

Knows the order of things. What a round is, what algorithms do and what runs when are other modules' business.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gpuherd.columns import window
from gpuherd.engines.options import read_block
from gpuherd.engines.registry import LOCAL
from gpuherd.errors import QueueBusy, UsageError
from gpuherd.gpus.query import machine
from gpuherd.gpus.state import Gpu
from gpuherd.jobs import clock, feasibility
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.remote.dispatcher import settled
from gpuherd.jobs.run import run_jobs
from gpuherd.models.load.jobs import resources_for
from gpuherd.posttrain.config.composing import compose, said
from gpuherd.posttrain.eval.summary import json_values
from gpuherd.posttrain.runs.folder import (
    FORMAT,
    RoundsDirectory,
    RunRecord,
    begin,
    future_folder,
    new_folder,
    read_record,
    resumed,
    unfinished,
)
from gpuherd.posttrain.runs.gpu_monitor import GpuWatcher
from gpuherd.posttrain.runs.options import RoundsOptions
from gpuherd.posttrain.runs.plan import (
    Combination,
    PlannedStep,
    Step,
    combinations_of,
    has_begun,
    make_jobs,
    planned,
    priority_named,
    result_of,
)
from gpuherd.posttrain.runs.prepare import Prepared, prepare, refuse_others
from gpuherd.posttrain.runs.render import end_lines, headline, notices, plan_tree, print_tree, result_lines
from gpuherd.posttrain.runs.settings import Settings, absolute, settings_of
from gpuherd.posttrain.runs.step_memory import Memory
from gpuherd.posttrain.runs.work import versions
from gpuherd.runs.console import logged_to
from gpuherd.runs.files import write_file
from gpuherd.runs.stage import StageOutcome, tidy

if TYPE_CHECKING:
    from gpuherd.posttrain.eval.tables import Gathered

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundsOutcome(StageOutcome):
    """How an experiment's run ended; ``complete``: all is there."""

    complete: bool = False


class RoundsExperiment:
    """Runs an experiment's rounds on free GPUs.

    Args:
        settings: what to do, paths absolute (``settings.absolute``); of a run that goes on its own.
        options: how jobs run.
        console: where progress and the summary go; standard output by default.
        simulate: the GPUs are pretended: all is computed on the CPU.
        going_on: the folder of a run that goes on. None: the newest unfinished one of the experiment, or a new one.
        only: the steps that are done now, such that none needs one that is not among them; a later start without it
            resumes with the others. None: all.
    """

    def __init__(
        self,
        settings: Settings,
        options: RoundsOptions,
        *,
        console: Console | None = None,
        simulate: bool = False,
        going_on: RoundsDirectory | None = None,
        only: Callable[[Step], bool] | None = None,
    ):
        self.settings, self.simulate = settings, simulate
        self.options = options if settings.system.use_parallel_execution else replace(options, max_concurrent=1)
        self.console = Console() if console is None else console
        self.only = only
        self.now = datetime.now()
        found = unfinished(settings) if going_on is None else going_on
        self.goes_on = found is not None
        self.folder = future_folder(settings, self.now) if found is None else found
        self.prepared: Prepared  # by run()
        self.plan: list[PlannedStep] = []
        self.outcome: RoundsOutcome | None = None
        self._feasibility: feasibility.Feasibility | None = None

    def run(self) -> RoundsOutcome:
        """Runs to the end, or resumes a run that was stopped.

        Raises:
            UsageError: settings that make no sense, or name what is not there.
            MissingModel, BadModel: a model is not to be had. JobCannotFit: one fits on no GPU here. NoSuchGpu.
            CannotWrite, QueueBusy, BadRun; what reading data raises.
        """
        if self.goes_on and self.folder.done.exists():
            return self._complete()
        recorded = read_record(self.folder).made.get("inputs", {}) if self.goes_on else None
        self.prepared = prepare(self.settings, recorded)
        self._print(*notices(self.settings, self.prepared))
        record = self._record()
        self.plan = self._plan([step for step in record.steps() if self.only is None or self.only(step)])
        if self.options.dry_run:
            self._print_plan()
            never = () if self._feasibility is None else self._feasibility.never
            self.outcome = RoundsOutcome(None, complete=False, never=never)
            return self.outcome
        if not self.goes_on:
            self.folder = new_folder(self.settings, self.now)
        self.folder.create()
        if not self.goes_on:
            begin(self.folder, record)
        with logged_to(self.folder.run_log):
            self.outcome = self._run(record)
        self._print_end()
        return self.outcome

    def to_dict(self) -> dict[str, Any]:
        """Plan or outcome as plain JSON values, for ``--json``."""
        done = self._done()
        asks = {} if self._feasibility is None else self._feasibility.asks
        told: dict[str, Any] = {
            "experiment": self.settings.experiment.name,
            "folder": str(self.folder.root),
            "goes_on": self.goes_on,
            "jobs": [
                {
                    "name": each.step.name,
                    "phase": each.step.phase.value,
                    "algorithm": each.step.algorithm,
                    "dataset": each.step.dataset,
                    "family": each.step.family,
                    "round": each.step.round,
                    "needs": list(each.step.needs),
                    "priority": each.priority,
                    "done": each.step.name in done,
                    **asdict(each.asked),
                    "asks": asks.get(each.asked.gpus),
                }
                for each in self.plan
            ],
        }
        if self._feasibility is not None:
            told |= self._feasibility.to_dict()
        if self.outcome is not None and not self.options.dry_run:
            jobs = self.outcome.jobs
            told |= {
                "exit_code": int(self.outcome.exit_code),
                "complete": self.outcome.complete,
                "can_go_on": jobs is None or not jobs.unsolvable,
                "failures": self.outcome.failure_values(),
                "results": json_values(self._gathered()),
            }
        return told

    # --- steps --------------------------------------------------------------------------------------------------

    def _record(self) -> RunRecord:
        """The run's record: as it would begin now, or go on with what has not begun yet divided among the GPUs of now.

        Raises UsageError where another number of shards would change what is collected.
        """
        places = resources_for(self.options).places(1, self.options)
        combinations = combinations_of(self.settings, self.prepared, places)
        if self.goes_on:
            kept = read_record(self.folder)
            refuse_others(kept.made.get("inputs", {}), self.prepared.inputs, self.folder.root)
            record = self._going_on(kept, combinations)
            fixed = {each.shards for each in record.combinations if not each.whole_batches}
            shards = self.settings.data_collection.shards
            if fixed and shards not in (None, kept.settings.data_collection.shards, *fixed):
                raise UsageError(
                    f"{self.folder.root} was begun by a version whose rows depend on the number of shards: "
                    f"data_collection.shards={shards} would change them; leave it at {', '.join(map(str, fixed))}"
                )
            return record
        return RunRecord(
            self.settings,
            combinations,
            self.settings.identity(),
            os.getcwd(),  # noqa: PTH109 - a record
            {
                "command": without_webhook(sys.argv),
                "inputs": self.prepared.inputs,
                "host": socket.gethostname(),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": versions(self.settings.generation.backend, self.settings.evaluation.backend),
            },
        )

    def _going_on(self, kept: RunRecord, combinations: Sequence[Combination]) -> RunRecord:
        """The record of a run that goes on. What has begun, or is at work, keeps its number of shards."""
        names: set[str] = set()
        with suppress(UsageError), closing(QueueReader(self.folder.queue)) as queue:  # there may be none yet
            query = "SELECT name FROM jobs WHERE id IN (SELECT job FROM attempts WHERE state = 'running')"
            names |= {row["name"] for row in queue.rows(query)}
        # Only now: one that has ended since has left what it wrote.
        begun = {step.undivided for step in kept.steps() if step.name in names or has_begun(step, self.folder)}
        return replace(kept.divided_anew(combinations, begun), settings=self.settings)

    def _keep(self, record: RunRecord) -> None:
        """Writes the record of a run that goes on; called when no other start can begin anything. Raises QueueBusy."""
        kept = read_record(self.folder)
        if self._going_on(kept, record.combinations).steps() != record.steps():
            raise QueueBusy(f"{self.folder.root}: another start has begun jobs just now; start the same command again")
        if record != kept:
            begin(self.folder, record, anew=True)

    def _plan(self, steps: Sequence[Step]) -> list[PlannedStep]:
        cards = resources_for(self.options).gpu_specs
        memory = Memory(self.settings, cards, self.prepared)
        priority = priority_named(self.settings.job_priority)
        return planned(steps, [memory.of(step) for step in steps], priority, self.settings.rounds_of_training)

    def _run(self, record: RunRecord) -> RoundsOutcome:
        """The jobs, and what is written when they have ended."""
        began = clock.wall()
        logger.info("experiment %s in %s: %d jobs", self.settings.experiment.name, self.folder.root, len(self.plan))
        for line in notices(self.settings, self.prepared):
            logger.info("%s", line)
        if self.simulate:
            logger.info("the GPUs are simulated, and so are the figures of their memory and utilization")
        self._print(f"run: {self.folder.root}")
        jobs = make_jobs(
            self.plan,
            self.folder,
            identity=record.identity,
            cwd=record.cwd if Path(record.cwd).is_dir() else os.getcwd(),  # noqa: PTH109 - as the record has it
            retries=self.options.retries,
            heartbeat_s=self.options.heartbeat,
            share=self.options.share,
            simulate=self.simulate,
        )
        if not self.options.enqueue_only:
            done = self._done()
            self.options = settled([job for job in jobs if job.name not in done], self.options, self.folder)
        phases = {each.step.name: each.step.phase.value for each in self.plan}
        with display(self.console) as shown:
            watcher = GpuWatcher(self.folder, phases, shown, self._gpus)
            outcome = run_jobs(
                jobs,
                self.options,
                self.folder,
                before=partial(self._keep, record),
                display=watcher,
                enqueue_only=self.options.enqueue_only,
            )
        self._print(*watcher.write())
        logger.info(
            "jobs: %d done, %d failed, %d waiting, %d cancelled",
            *(outcome.done, outcome.failed, outcome.waiting, outcome.cancelled),
        )
        self._tidy(began)
        complete = outcome.complete and self.only is None
        if complete:
            values = {"format": FORMAT, "jobs": len(self.plan), "results": json_values(self._gathered())}
            text = json.dumps(values, indent=1, allow_nan=False)
            write_file(self.folder.done, text.encode() + b"\n")
        return RoundsOutcome(outcome, complete)

    def _gpus(self) -> Sequence[Gpu]:
        """Those that the jobs run on, as far as they can be looked at from here."""
        return machine(processes=False).gpus if self.options.engine == LOCAL else ()

    def _complete(self) -> RoundsOutcome:
        self._print(f"run {self.folder.root} is complete; nothing is left to do")
        self._print_results()
        self.outcome = RoundsOutcome(None, complete=True)
        return self.outcome

    def _gathered(self) -> Gathered:
        from gpuherd.posttrain.eval.tables import gather

        return gather(self.folder.results)

    def _done(self) -> set[str]:
        """Names of the jobs whose results are there."""
        if not self.goes_on and self.outcome is None:
            return set()
        return {each.step.name for each in self.plan if result_of(each.step, self.folder).exists()}

    def _tidy(self, began: float) -> None:
        """Removes half-written files of workers that were killed before this start; not while a job runs."""
        made = (self.folder.datasets, self.folder.models, self.folder.results, self.folder.usage)
        inside = [path for place in made for path in (place, *place.rglob("*")) if path.is_dir()]
        tidy(self.folder, [self.folder.root, *inside], began)

    # --- output -------------------------------------------------------------------------------------------------

    def _print_plan(self) -> None:
        done = self._done()
        title = headline(self.settings, self.prepared, self.plan, done)
        print_tree(self.console, plan_tree(title, self.plan, done, self.prepared))
        self._feasibility = feasibility.of_like(
            [each.asked.gpus for each in self.plan if each.step.name not in done], self.options, self.folder
        )
        goes = f"would go on in {self.folder.root}" if self.goes_on else f"would go to {self.folder.root}"
        self._print(*self._feasibility.lines, f"nothing was started; it {goes}")

    def _print_end(self) -> None:
        assert self.outcome is not None and self.outcome.jobs is not None  # noqa: S101 - as above
        self._print_results()
        lines = end_lines(self.outcome.jobs, self.folder.root)
        if self.only is None:
            lines += [f"log: {self.folder.run_log}", f"next: gpuherd report {self.folder.root}"]
        self._print(*lines)

    def _print_results(self) -> None:
        self._print(*result_lines(self._gathered(), window(self.console)))

    def _print(self, *lines: str) -> None:
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def experiment_of(
    words: Sequence[str],
    options: RoundsOptions,
    *,
    console: Console | None = None,
    simulate: bool = False,
    engine_is_said: bool = False,
) -> RoundsExperiment:
    """The experiment that words ask for: a run that goes on (``options.resume``, ``resume_from=DIR``), or a composed
    configuration (``options.config`` and the words over what is shipped).

    ``engine_is_said``: the options have the engine already, whatever the configuration says; else that counts where
    they name none. Raises UsageError, BadRun.
    """
    if options.resume is not None or any(word.startswith("resume_from=") for word in words):
        given = said(words)
        place = options.resume or str(given["resume_from"])
        if str(given.get("resume_from", place)) != place:
            raise UsageError(f"--resume {place} and resume_from={given['resume_from']} name two runs; name one")
        if options.config is not None:
            raise UsageError("resume_from goes on with the configuration of its run; leave --config out")
        folder = RoundsDirectory(place)
        settings = resumed(folder, given).settings
        if not engine_is_said:
            options = _with_engine(options, settings)
        return RoundsExperiment(settings, options, console=console, simulate=simulate, going_on=folder)
    settings = absolute(settings_of(compose(words, options.config)))
    if settings.resume_from is not None:
        raise UsageError(f"resume_from={settings.resume_from}: it is a word of its own on the command line")
    if not engine_is_said:
        options = _with_engine(options, settings)
    return RoundsExperiment(settings, options, console=console, simulate=simulate)


def _with_engine(options: RoundsOptions, settings: Settings) -> RoundsOptions:
    return replace(options, **read_block(settings.engine)) if options.engine == LOCAL else options


def without_webhook(words: Sequence[str]) -> list[str]:
    """A command without the webhook's address: who knows it may post there."""
    found = []
    for before, word in zip(("", *words), words, strict=False):
        hidden = word.startswith("--webhook=") or before == "--webhook"
        found.append("--webhook=..." if word.startswith("--webhook=") else "..." if hidden else word)
    return found


def as_json(experiment: RoundsExperiment) -> str:
    """What ``--json`` prints."""
    return json.dumps(experiment.to_dict(), indent=2, allow_nan=False)
