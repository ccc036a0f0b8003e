"""Jobs that can't ever run fail without an attempt."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from gpuherd.jobs.failures import FailureClass, clean
from gpuherd.jobs.fulldisk import may_pass
from gpuherd.jobs.outcome import Failure
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.reporter import Reporter


def give_up(
    queue: Queue, tell: Reporter, jobs: Sequence[QueuedJob], failure: FailureClass, reason: str
) -> sqlite3.OperationalError | None:
    """Records and reports it, once for all jobs that have this reason. Returns the error when the queue can't be
    written now: the caller tries again."""
    try:
        with queue.transaction():
            cancelled = [queue.fail_waiting(each.id, reason) for each in jobs]
    except sqlite3.OperationalError as problem:
        if not may_pass(problem):
            raise
        return problem
    reason = clean(reason)
    tell.given_up(
        [Failure(each.job.name, each.job.title or each.job.name, failure, reason, each.attempts, None) for each in jobs]
    )
    for each, names in zip(jobs, cancelled, strict=True):
        tell.cancelled(names, each.job.name)
    return None
