"""Why one job waits: its own reason, the jobs before it in its queue, and its user's turn on the machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gpuherd.jobs.job import JobState
from gpuherd.jobs.monitor.job_status import JobSelection
from gpuherd.jobs.monitor.status import opened, snapshot
from gpuherd.jobs.monitor.turns import Turn, turn_of
from gpuherd.jobs.records import JobStatus
from gpuherd.jobs.run_dir import RunDirectory

# A job that is further back is not looked for: its place is not known then.
_MOST_AHEAD = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Why:
    """Why a job waits.

    Attributes:
        ahead: waiting jobs of its queue that are before it; None where it does not wait, or is too far back.
        turn: where its gpuherd stands among those of the machine; None where no other user waits, or it does not wait
            for GPUs of this machine.
    """

    job: JobStatus
    ahead: int | None = None
    turn: Turn | None = None


def why(run: RunDirectory, name: str) -> Why | None:
    """Why this job waits, None where there is no such job. Raises UsageError without a queue, and QueueUnreadable."""
    with opened(run) as reader:
        with snapshot(run, reader, JobSelection(names=(name,))) as taken:
            job = next(iter(taken.jobs(taken.rows())), None)
            dispatcher = taken.status.dispatcher
        if job is None:
            return None
        if job.state is not JobState.WAITING:
            return Why(job=job)
        with snapshot(run, reader, JobSelection(states=(JobState.WAITING,), limit=_MOST_AHEAD)) as taken:
            before = list(itertools.takewhile(lambda row: row["id"] != job.id, taken.rows()))
    is_known = len(before) < _MOST_AHEAD
    turn = None
    if dispatcher is not None and job.gpus and is_known:
        # GPUs that come back are given to those before it first.
        nth = sum(row["gpus"] for row in before) + job.gpus
        turn = turn_of(dispatcher.pid, dispatcher.state, nth)
    return Why(job=job, ahead=len(before) if is_known else None, turn=turn)
