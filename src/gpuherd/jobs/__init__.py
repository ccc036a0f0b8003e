"""A durable queue of commands and the dispatcher that runs them on GPUs that people share.

The public names are imported when first used: the command line reads ``jobs.options`` for its flags and must not pay
for the dispatcher then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.jobs.attempts.failures import FailureClass
    from gpuherd.jobs.control.client import poke, send
    from gpuherd.jobs.control.messages import ControlKind, Request, Response
    from gpuherd.jobs.dispatcher import Dispatcher
    from gpuherd.jobs.job import Job, JobState
    from gpuherd.jobs.options import DispatchOptions, GpuOptions
    from gpuherd.jobs.queue.store import Queue
    from gpuherd.jobs.records import Event, EventKind, Failure, Outcome
    from gpuherd.jobs.run import run_jobs, work_off
    from gpuherd.jobs.run_dir import RunDirectory

__all__ = [
    "ControlKind",
    "DispatchOptions",
    "Dispatcher",
    "Event",
    "EventKind",
    "Failure",
    "FailureClass",
    "GpuOptions",
    "Job",
    "JobState",
    "Outcome",
    "Queue",
    "Request",
    "Response",
    "RunDirectory",
    "poke",
    "run_jobs",
    "send",
    "work_off",
]

_HOME = {
    "ControlKind": "control.messages",
    "DispatchOptions": "options",
    "Dispatcher": "dispatcher",
    "Event": "records",
    "EventKind": "records",
    "Failure": "records",
    "FailureClass": "attempts.failures",
    "GpuOptions": "options",
    "Job": "job",
    "JobState": "job",
    "Outcome": "records",
    "Queue": "queue.store",
    "Request": "control.messages",
    "Response": "control.messages",
    "RunDirectory": "run_dir",
    "poke": "control.client",
    "run_jobs": "run",
    "send": "control.client",
    "work_off": "run",
}

__getattr__, __dir__ = on_first_use(__name__, _HOME)
