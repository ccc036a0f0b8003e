"""``gpuherd batch``: runs the jobs of a file in a run folder, in the foreground, and continues them later; its tables.

The readers know what a file may contain, ``gpuherd.jobs`` decides what runs when.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuherd import __version__
from gpuherd.batch.assemble import STDIN, Content, FileRules, JobFile, read_job_file
from gpuherd.batch.options import BatchOptions
from gpuherd.batch.user_queue import folder
from gpuherd.columns import Column, fitted, window
from gpuherd.engines.registry import LOCAL, names
from gpuherd.errors import UsageError, clean, printable
from gpuherd.jobs.job import Job, JobState, Planner
from gpuherd.jobs.records import Outcome
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.jobs.scheduler.memory import could_share

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of the file before a run.

    Attributes:
        done: it need not run again.
        never: why it can't run on this machine, or in the cluster; None if it can.
        asks: its request to the cluster, None on this machine.
    """

    job: Job
    done: bool = False
    never: str | None = None
    asks: str | None = None

    @property
    def state(self) -> str:
        """One word for a table."""
        return "done" if self.done else "refused" if self.never is not None else "to do"


def run_folder(path: str | os.PathLike[str], options: BatchOptions) -> RunDirectory:
    """The run folder: --output-dir, else one in the working folder with the file's name in it.

    Raises UsageError for the folder of the user's own queue.
    """
    if options.output_dir is not None:
        run = RunDirectory(options.output_dir)
        if run.root.resolve() in {folder(engine).resolve() for engine in names()}:
            # A batch cancels waiting jobs of its folder that are not in the file: all submitted jobs.
            raise UsageError(f"{run.root} is your own queue, to which gpuherd submit adds; choose another --output-dir")
        return run
    name = "batch" if os.fspath(path) == STDIN else Path(path).stem
    return RunDirectory(f"{name}_results")


def plan(path: str | os.PathLike[str], options: BatchOptions, planner: Planner | None = None) -> tuple[PlannedJob, ...]:
    """The jobs of the file with their states, by the run folder's queue and this machine's GPUs. Changes nothing.

    ``planner``: plans jobs that name a model. Raises NoJobFile, BadJobFile, NoSuchGpu, and QueueUnreadable.
    """
    from gpuherd.jobs.feasibility import never
    from gpuherd.jobs.remote.dispatcher import settled

    run = run_folder(path, options)
    states, known = _queued(run)
    file = _read(path, options, known, planner)
    done = [_stays_done(job, states, known) for job in file.jobs]
    left = [job for job, is_done in zip(file.jobs, done, strict=True) if job.name not in file.unfit and not is_done]
    options = settled(left, options, run) if left else options
    reasons = [file.unfit.get(job.name, why) for job, why in zip(file.jobs, never(file.jobs, options), strict=True)]
    found = zip(file.jobs, done, _with_dependents(file.jobs, reasons), strict=True)
    return tuple(PlannedJob(job, is_done, reason, _asks(job, options)) for job, is_done, reason in found)


def jobs_of(path: str | os.PathLike[str], options: BatchOptions, planner: Planner | None = None) -> JobFile:
    """The jobs of the file, named so that those in the run folder's queue are recognised.

    ``planner``: as for ``plan``. Raises NoJobFile, BadJobFile, and QueueUnreadable.
    """
    return _read(path, options, _queued(run_folder(path, options))[1], planner)


def with_sharing(options: BatchOptions, jobs: Sequence[Job]) -> BatchOptions:
    """The options of a run of these jobs: also jobs whose file lets them share GPUs do so, without --share."""
    return replace(options, share=True) if any(job.share for job in jobs) else options


def run_record(path: str | os.PathLike[str], options: BatchOptions, jobs: Sequence[Job]) -> dict[str, Any]:
    """The content of run.json: command, options, time and place."""
    return {
        "command": sys.argv,
        "file": os.fspath(path),
        "jobs": len(jobs),
        "config": options.to_dict(),
        "cwd": os.getcwd(),  # noqa: PTH109 - a record, not a path to work with
        "host": socket.gethostname(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"gpuherd": __version__, "python": sys.version.split()[0]},
    }


def _queued(run: RunDirectory) -> tuple[dict[str, JobState], dict[str, Content]]:
    """States and contents of the jobs that the folder's queue holds, by name."""
    if not run.queue.exists():
        return {}, {}
    from gpuherd.jobs.queue.store import Queue

    with Queue(run.queue) as queue:
        return queue.states(), {job.name: Content.of(job) for job in queue.jobs()}


def _read(
    path: str | os.PathLike[str], options: BatchOptions, known: dict[str, Content], planner: Planner | None
) -> JobFile:
    """The file's jobs; with --share every job that could share its GPU does."""
    rules = FileRules(
        shell=options.shell,
        gpus=options.gpus_per_job,
        retries=options.retries,
        known=known,
        planner=planner,
        keep_unfit=True,
    )
    file = read_job_file(path, rules)
    if not options.share:
        return file
    return replace(file, jobs=tuple(replace(job, share=could_share(job)) for job in file.jobs))


def _stays_done(job: Job, states: dict[str, JobState], known: dict[str, Content]) -> bool:
    """Whether the queue will leave it as it is: done with the same command, and its result exists."""
    if states.get(job.name) is not JobState.DONE or known[job.name] != Content.of(job):
        return False
    return job.result is None or Path(job.cwd or ".", job.result).exists()


def _asks(job: Job, options: BatchOptions) -> str | None:
    if options.engine == LOCAL:
        return None
    from gpuherd.jobs.feasibility import in_words, would_ask

    return in_words(would_ask(job, options))


def _with_dependents(jobs: Sequence[Job], never: Sequence[str | None]) -> list[str | None]:
    """The same, with a reason also for jobs that need one that can never run, directly or through others."""
    reasons = {job.name: reason for job, reason in zip(jobs, never, strict=True)}
    needed_by: dict[str, list[str]] = {}
    for job in jobs:
        for need in job.needs:
            needed_by.setdefault(need, []).append(job.name)
    stack = [name for name, reason in reasons.items() if reason is not None]
    while stack:
        name = stack.pop()
        for dependent in needed_by.get(name, ()):
            if reasons[dependent] is None:
                reasons[dependent] = f"needs {name}, which can't run"
                stack.append(dependent)
    return [reasons[job.name] for job in jobs]


# --- tables -------------------------------------------------------------------------------------------------------
#
# Plain data in, rich text out; it fits in 80 columns.

MOST_ROWS = 60
MOST_FAILURES = 20
_PLAN = (
    Column("job", 0, middle=True),
    Column("GPUs", 3, right=True),
    Column("MB", 4, right=True),
    Column("state", 1),
    Column("command", 2, least=16),
)


def print_plan(console: Console, planned: Sequence[PlannedJob], where: str | None = None) -> None:
    """The jobs that would run, those that can't and why, and the counts. ``where``: the cluster's engine, if any."""
    from rich.text import Text

    # A pipe gets every job, in full.
    width = window(console)
    shown = planned if width is None else planned[:MOST_ROWS]
    columns = _PLAN if where is None else (*_PLAN[:-1], Column(f"asks {where} for", 2, least=10), _PLAN[-1])
    table = fitted(columns, [_words(each, there=where is not None) for each in shown], width)
    table.show(console)
    console.print()
    if len(planned) > len(shown):
        console.print(Text(f"… and {len(planned) - len(shown)} more jobs"))
    table.show_left_out(console)
    for each in planned:
        if each.never is not None:
            console.print(Text.assemble(("refused  ", "red"), f"{clean(each.job.name)} {each.never}"), soft_wrap=True)
    states = [each.state for each in planned]
    refused = f", {states.count('refused')} refused" if "refused" in states else ""
    console.print(
        Text(f"{states.count('to do')} to do, {states.count('done')} done{refused}; nothing was started"),
        soft_wrap=True,
    )


def _words(planned: PlannedJob, *, there: bool) -> tuple[str, ...]:
    job = planned.job
    asks = (planned.asks or "-",) if there else ()
    return tuple(printable(word) for word in (job.name, gpus(job), memory(job), planned.state, *asks, command(job)))


def print_outcome(console: Console, outcome: Outcome, run: RunDirectory) -> None:
    """The counts, the failures with their reasons and logs, and where everything is."""
    from rich.text import Text

    console.print(Text(headline(outcome)), soft_wrap=True)
    for failure in outcome.failures[:MOST_FAILURES]:
        text = f"{clean(failure.title)}: {printable(failure.sentence)}"
        console.print(Text.assemble(("failed  ", "red"), text), soft_wrap=True)
    if len(outcome.failures) > MOST_FAILURES:
        console.print(Text(f"… and {len(outcome.failures) - MOST_FAILURES} more in {run.failures}"), soft_wrap=True)
    console.print(Text(f"logs     {run.logs}"), soft_wrap=True)
    console.print(Text(f"metrics  {run.gpu_metrics}"), soft_wrap=True)


def headline(outcome: Outcome) -> str:
    """The counts in one line."""
    counts = (("failed", outcome.failed), ("cancelled", outcome.cancelled), ("waiting", outcome.waiting))
    text = ", ".join([f"{outcome.done} done", *(f"{number} {word}" for word, number in counts if number)])
    return f"{text}; stopped: the same command goes on from here" if outcome.interrupted else text


def gpus(job: Job) -> str:
    """How many GPUs, as in a job file."""
    return str(job.gpus) if job.gpus_at_most is None else f"{job.gpus}-{job.gpus_at_most}"


def memory(job: Job) -> str:
    """Memory on each GPU in MB, a dash where none is given."""
    return "-" if job.memory_mb is None else str(job.memory_mb)


def command(job: Job) -> str:
    """The command as a shell line."""
    return shlex.join(job.argv)
