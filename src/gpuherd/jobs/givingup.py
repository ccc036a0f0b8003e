"""A job that can't ever run fails without an attempt."""

from __future__ import annotations

import sqlite3

from gpuherd.jobs.failures import FailureClass, clean
from gpuherd.jobs.fulldisk import may_pass
from gpuherd.jobs.outcome import Failure
from gpuherd.jobs.queue import Queue
from gpuherd.jobs.records import QueuedJob
from gpuherd.jobs.reporter import Reporter


def give_up(
    queue: Queue, tell: Reporter, queued: QueuedJob, failure: FailureClass, reason: str
) -> sqlite3.OperationalError | None:
    """Records and tells it. Returns what is in the way when the queue can't be written now: it is to be tried again."""
    job = queued.job
    try:
        cancelled = queue.fail_waiting(queued.id, reason)
    except sqlite3.OperationalError as problem:
        if not may_pass(problem):
            raise
        return problem
    tell.given_up(Failure(job.name, job.title or job.name, failure, clean(reason), queued.attempts, None))
    tell.cancelled(cancelled, job.name)
    return None
