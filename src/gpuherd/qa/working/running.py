"""Runs the jobs of a piece of work in its folder, shown to people as any run of jobs is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from rich.console import Console

from gpuherd.atomic import remove_strays
from gpuherd.jobs import clock
from gpuherd.jobs.job import Job
from gpuherd.jobs.monitor.display import display
from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import Outcome
from gpuherd.jobs.run import run_jobs
from gpuherd.qa.folder import ShardedDirectory
from gpuherd.qa.working.options import WorkOptions
from gpuherd.report.log import run_log

logger = logging.getLogger(__name__)


def run_work(
    jobs: Sequence[Job],
    options: WorkOptions,
    folder: ShardedDirectory,
    console: Console,
    *,
    kind: str,
    before: Callable[[], None] = lambda: None,
) -> Outcome:
    """Runs the jobs until none is left; those that are done stay done, those that were stopped go on.

    Args:
        kind: the beginning of the log file's name.
        before: as in ``run_jobs``: the last that can refuse the start.

    Raises what ``run_jobs`` raises.
    """
    began = clock.wall()
    folder.create()
    with run_log(folder.logs, datetime.now(), kind) as log:
        with display(console) as shown:
            outcome = run_jobs(jobs, options, folder, before=before, display=shown, enqueue_only=options.enqueue_only)
        logger.info("%s; log: %s", outcome, log)
    _tidy(folder, began)
    return outcome


def failure_lines(outcome: Outcome) -> list[tuple[str, str]]:
    """Each job that failed for good, by its title, with its reason and where its log is."""
    return [(failure.title, failure.sentence) for failure in outcome.failures]


def _tidy(folder: ShardedDirectory, began: float) -> None:
    """Removes half-written files of workers that were killed before this run of jobs began; not while a job runs."""
    with Queue(folder.queue) as queue:
        if queue.running():
            return
    for place in (folder.root, folder.shards):
        remove_strays(place, began)
