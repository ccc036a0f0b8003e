"""A training in the hands of a cluster's engine: one job, which may span several nodes, in a queue in its own folder.

What is stopped there, for want of time or to make room for others, waits again and goes on from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from gpuherd.errors import ExitCode, UsageError, printable
from gpuherd.jobs import feasibility
from gpuherd.jobs.attempts.failures import FailureClass
from gpuherd.jobs.job import Job
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Outcome
from gpuherd.jobs.run import run_jobs
from gpuherd.jobs.run_dir import RunDirectory
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.inventory import node_gpus
from gpuherd.posttrain.learning.config import TrainConfig
from gpuherd.posttrain.learning.folder import TrainDirectory
from gpuherd.posttrain.learning.launching import Processes, of_a_job

# As a training in the foreground ends.
_CODES = {
    FailureClass.BAD_INPUT: ExitCode.BAD_INPUT,
    FailureClass.MISSING: ExitCode.MISSING,
    FailureClass.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    FailureClass.CANNOT_WRITE: ExitCode.CANNOT_WRITE,
}


def cards_there(options: DispatchOptions) -> tuple[tuple[GpuSpec, ...], str | None]:
    """The GPUs of a node, and why they aren't known where they aren't. Raises EngineMissing, EngineAway, and UsageError
    for a --node-gpus that makes no sense."""
    try:
        return node_gpus(options), None
    except UsageError as problem:
        if options.node_gpus is not None:
            raise
        return (), str(problem)


def job_of(config: TrainConfig, processes: Processes, argv: Sequence[str], folder: TrainDirectory) -> Job:
    """The training as a job of a queue. It is not tried again when it fails, as in the foreground."""
    return Job(
        name="train",
        title=config.experiment_name,
        argv=tuple(argv),
        gpus=0 if processes.on_cpu else processes.here,
        nodes=config.distributed.num_nodes,
        retries=0,
        env=of_a_job(),
        cwd=str(Path.cwd()),
        result=str(folder.done),
        identity="train",  # what else decides is looked at in the folder
    )


def asked(job: Job, options: DispatchOptions) -> tuple[str, str | None]:
    """What the engine would be asked for, for people, and why it can never give it, None where it can. Raises as
    ``Engine.check``."""
    (never,) = feasibility.never([job], options)
    return feasibility.in_words(feasibility.would_ask(job, options)), never


def train_there(
    job: Job, options: DispatchOptions, folder: TrainDirectory, begin: Callable[[], None], console: Console
) -> Outcome:
    """Hands it over, or follows it where that was done before, until it has ended.

    Args:
        begin: prepares the folder; called when nothing refuses the start any more.

    Raises what ``run_jobs`` raises.
    """
    run = RunDirectory(folder.root)
    with display(console) as shown:
        outcome = run_jobs([job], options, run, before=begin, display=shown)
    for failure in outcome.failures:
        console.print(printable(f"failed: {failure.sentence}"), markup=False, highlight=False, soft_wrap=True)
    return outcome


def code_of(outcome: Outcome) -> int:
    """What the command exits with."""
    if outcome.stopped_by is None and outcome.failures:
        return _CODES.get(outcome.failures[0].failure, ExitCode.FAILED)
    return outcome.exit_code
