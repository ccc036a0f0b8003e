"""One stage of a run, written once: is it there already? -> prepare -> plan or jobs -> finish.

A stage may need others, which run before its own jobs; each has a run folder of its own.

A stage's own class says what is its own: what it has made before, what it prepares, its jobs, and what it makes of
their results. The order of these steps, the log, the display, the dry run, the tidying up and the exit code are the
same for all stages, and are here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rich.console import Console
from rich.text import Text

from gpuherd.atomic import remove_strays
from gpuherd.errors import ExitCode, UsageError
from gpuherd.jobs import clock, feasibility
from gpuherd.jobs.job import Job
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import Outcome
from gpuherd.jobs.run import run_jobs
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.runs.console import run_log

if TYPE_CHECKING:
    from gpuherd.jobs.options import DispatchOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageOutcome:
    """How a stage ended.

    Attributes:
        jobs: how its jobs ended; None when none was started.
        already: what it makes was there before.
        never: why jobs of a dry run could never run.
    """

    jobs: Outcome | None = None
    already: bool = field(default=False, kw_only=True)
    never: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def is_poor(self) -> bool:
        """Whether what was made is a failure all the same, although every job ended well."""
        return False

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the command: 0 only if all is done or was drained, or a dry run found nothing impossible."""
        if self.jobs is not None and self.jobs.exit_code is not ExitCode.OK:
            return self.jobs.exit_code
        return ExitCode.FAILED if self.never or self.is_poor else ExitCode.OK

    @property
    def failures(self) -> tuple[tuple[str, str], ...]:
        """Title, and reason with the place of the log, of each job that failed for good."""
        return () if self.jobs is None else tuple(failure_lines(self.jobs))

    def failure_values(self) -> list[dict[str, str]]:
        """The same as plain JSON values."""
        return [{"job": job, "reason": reason} for job, reason in self.failures]


OutcomeT = TypeVar("OutcomeT", bound=StageOutcome)


class Stage(ABC, Generic[OutcomeT]):
    """A stage of work in a run folder of its own.

    Args:
        options: where its jobs run.
        folder: the run folder of its jobs.
        console: where progress and results are printed.
        dry_run: only plan, and say whether the jobs could run.
        enqueue_only: put the jobs into the folder's queue and raise Enqueued.

    Attributes:
        kind: the beginning of the log file's name.
        outcome: how it ended; None before.
        outlook: what becomes of the jobs of a dry run; None otherwise.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        options: DispatchOptions,
        folder: RunDirectory,
        console: Console,
        *,
        dry_run: bool = False,
        enqueue_only: bool = False,
    ) -> None:
        self._options, self._folder = options, folder
        self._dry_run, self._enqueue_only = dry_run, enqueue_only
        self.console = console
        self.outcome: OutcomeT | None = None
        self.outlook: feasibility.Feasibility | None = None
        self._log: Path | None = None

    # --- what is a stage's own --------------------------------------------------------------------------------------

    def existing(self) -> OutcomeT | None:
        """The outcome where all is there already; None where something is left to do."""
        return None

    def prepare(self) -> None:
        """Finds out everything that is known before a job starts. Raises what refuses the start; writes nothing.

        Nothing where all of it is known when the stage is made.
        """

    def needs(self) -> Sequence[Stage[Any]]:
        """The stages that this one needs, in order; known after ``prepare``. Each continues where it was stopped."""
        return ()

    def plan_lines(self) -> list[str]:
        """The plan as lines: what becomes of the jobs of a dry run. A stage puts the lines that are its own first."""
        return [] if self.outlook is None else [*self.outlook.lines, "nothing was started"]

    def plan_values(self, gpus: int) -> dict[str, Any]:
        """The same as plain JSON values, for jobs of so many GPUs each; none where this is no dry run."""
        if self.outlook is None:
            return {}
        return self.outlook.to_dict() | {"engine_asks": self.outlook.asks.get(gpus)}

    def print_plan(self) -> None:
        """Prints what a dry run has found; ``outlook`` is known."""
        print_lines(self.console, self.plan_lines())

    def planned(self) -> OutcomeT:
        """The outcome of a dry run. Raises UsageError for a stage that has none."""
        raise UsageError(f"gpuherd {self.kind} has no dry run")

    @property
    def never(self) -> tuple[str, ...]:
        """Why jobs of a dry run could never run."""
        return () if self.outlook is None else self.outlook.never

    def begin(self) -> None:
        """Writes what the jobs read; nothing where there are none."""

    def jobs(self) -> Sequence[Job]:
        """All jobs, those that are done too; in a dry run as they would be. None for a stage that computes here."""
        return ()

    @abstractmethod
    def finish(self, jobs: Outcome | None) -> OutcomeT:
        """Makes the results of what the jobs have written; called also where not all of them are done, or not all of a
        stage that this one needs: ``jobs`` are then those of that stage."""

    def left(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Those of the jobs that a dry run is about."""
        return jobs

    @property
    def reruns(self) -> bool:
        """Whether jobs run again although they are done."""
        return False

    def before_jobs(self) -> None:
        """The last that can refuse the start; called with the queue's lock held."""

    @property
    def folders_of_results(self) -> Sequence[Path]:
        """Where workers write, besides the run folder itself: what killed ones left half-written there is removed."""
        return ()

    # --- what is the same for all -----------------------------------------------------------------------------------

    def run(self) -> OutcomeT:
        """Runs to the end, or continues where it was stopped. Raises what the steps and ``run_jobs`` raise."""
        began = clock.wall()
        self.outcome = self.existing()
        if self.outcome is not None:
            return self.outcome
        self.prepare()
        needed = self.needs()
        if self._dry_run:
            stages = [*needed, self]
            jobs = [job for each in stages for job in each.left(each.jobs())]
            # Where the first jobs would run (inside the engine's job that this process is part of), all would.
            self.outlook = feasibility.of_jobs(jobs, self._options, stages[0]._folder)
            self.outcome = self.planned()
            self.print_plan()
            return self.outcome
        for each in needed:
            outcome = each.run()
            if outcome.jobs is not None and not outcome.jobs.complete:
                self.outcome = self.finish(outcome.jobs)
                return self.outcome
        self.begin()
        own = self.jobs()
        ended = None
        if own:
            ended = self._run_jobs(own)
            self._tidy(began)
        self.outcome = self.finish(ended)
        return self.outcome

    @contextmanager
    def logged(self) -> Iterator[Path]:
        """The stage's log, which is begun here unless it is open already."""
        if self._log is not None:
            yield self._log
            return
        with run_log(self._folder.logs, datetime.now(), self.kind) as self._log:
            try:
                yield self._log
            finally:
                self._log = None

    def _run_jobs(self, jobs: Sequence[Job]) -> Outcome:
        self._folder.create()
        with self.logged() as log, display(self.console) as shown:
            outcome = run_jobs(
                jobs,
                self._options,
                self._folder,
                rerun=[job.name for job in jobs] if self.reruns else (),
                before=self.before_jobs,
                display=shown,
                enqueue_only=self._enqueue_only,
            )
            logger.info("%s; log: %s", outcome, log)
        return outcome

    def _tidy(self, began: float) -> None:
        tidy(self._folder, [self._folder.root, *self.folders_of_results], began)


def tidy(folder: RunDirectory, places: Sequence[Path], began: float) -> None:
    """Removes half-written files of workers that were killed before this run began.

    Not while a job of the queue runs: a worker of an earlier run, stopped for a while, could continue writing. What
    workers have written since, also those that people run by hand, is left alone.
    """
    if not folder.queue.exists():
        return
    with Queue(folder.queue) as queue:
        if queue.running():
            return
    for place in places:
        remove_strays(place, began)


def failure_lines(outcome: Outcome) -> list[tuple[str, str]]:
    """Each job that failed for good, by its title, with its reason and where its log is."""
    return [(failure.title, failure.sentence) for failure in outcome.failures]


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Lines as they are, no markup read in them."""
    console.print(Text("\n".join(lines)), soft_wrap=True)
