"""Runs a batch of a sweep's jobs by a gpuherd queue in the sweep's folder. What is done there is not done again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path

from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console

from gpuherd.jobs import RunDirectory, run_jobs
from gpuherd.jobs.job import Job, JobState
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import Failure
from gpuherd.runs.console import run_log
from hydra_plugins.gpuherd_launcher._planning import Planner
from hydra_plugins.gpuherd_launcher._returns import returned
from hydra_plugins.gpuherd_launcher._settings import Settings

FOLDER = ".gpuherd"
log = logging.getLogger(__name__)


def launch(
    hydra_context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    settings: Settings,
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """Runs the jobs, of which the first has this number; what they returned, in order.

    Raises GpuherdError when they can't be run, and SystemExit when a signal has ended the run before all were done.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
    run = RunDirectory(sweep_dir / FOLDER)
    run.create()
    # Told before: Hydra takes 30 ms and more to compose a job's config, and all are composed before the first begins.
    log.info(f"gpuherd: {len(job_overrides)} job{'' if len(job_overrides) == 1 else 's'}; their queue is in {run.root}")
    planned = Planner(hydra_context, task_function, config, settings, run.root / "hydra").plan(job_overrides, first)
    failures = _work_off([each.job for each in planned], settings.run, run)
    returns = [returned(each, failures.get(each.job.name)) for each in planned]
    for each in planned:
        each.task.unlink(missing_ok=True)
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return returns


def _work_off(jobs: Sequence[Job], options: DispatchOptions, run: RunDirectory) -> Mapping[str, Failure]:
    """Runs the jobs; the failures by name. Raises GpuherdError, and SystemExit when a signal has ended the run."""
    others = _left_running(jobs, run)
    found = _run(jobs, options, run)
    if others:
        # Jobs of these numbers that a killed launcher had left running were other ones; now these can begin.
        again = [job for job in jobs if job.name in others]
        found = {name: failure for name, failure in found.items() if name not in others} | _run(again, options, run)
    return found


def _left_running(jobs: Sequence[Job], run: RunDirectory) -> frozenset[str]:
    """Names of jobs that a killed launcher has left running, with settings other than ours."""
    if not run.queue.exists():
        return frozenset()
    identities = {job.name: job.identity for job in jobs}
    with closing(Queue(run.queue)) as queue:
        states = queue.states()
        return frozenset(
            job.name
            for job in queue.jobs()
            if states[job.name] is JobState.RUNNING and identities.get(job.name, job.identity) != job.identity
        )


def _run(jobs: Sequence[Job], options: DispatchOptions, run: RunDirectory) -> dict[str, Failure]:
    with run_log(run.logs, datetime.now(), "hydra"), display(Console(stderr=True, highlight=False)) as shown:
        outcome = run_jobs(jobs, options, run, display=shown)
    if outcome.interrupted:
        log.warning(f"stopped; the same command with hydra.sweep.dir={run.root.parent} goes on from here")
        raise SystemExit(int(outcome.exit_code))
    return {failure.job: failure for failure in outcome.failures}
