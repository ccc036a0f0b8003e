"""A durable queue of commands and the dispatcher that runs them on GPUs that people share.

The public names are imported when first used: the command line reads ``jobs.options`` for its flags and must not pay
for the dispatcher then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuherd.exports import on_first_use

if TYPE_CHECKING:
    from gpuherd.jobs.control import poke, send
    from gpuherd.jobs.dispatcher import Dispatcher
    from gpuherd.jobs.events import Event, EventKind
    from gpuherd.jobs.failures import FailureClass
    from gpuherd.jobs.job import Job, JobState
    from gpuherd.jobs.options import DispatchOptions, GpuOptions
    from gpuherd.jobs.outcome import Failure, Outcome
    from gpuherd.jobs.queue import Queue
    from gpuherd.jobs.run import run_jobs, work_off
    from gpuherd.jobs.rundir import RunDirectory
    from gpuherd.jobs.wishes import Answer, Control, ControlKind

__all__ = [
    "Answer",
    "Control",
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
    "RunDirectory",
    "poke",
    "run_jobs",
    "send",
    "work_off",
]

_HOME = {
    "Answer": "wishes",
    "Control": "wishes",
    "ControlKind": "wishes",
    "DispatchOptions": "options",
    "Dispatcher": "dispatcher",
    "Event": "events",
    "EventKind": "events",
    "Failure": "outcome",
    "FailureClass": "failures",
    "GpuOptions": "options",
    "Job": "job",
    "JobState": "job",
    "Outcome": "outcome",
    "Queue": "queue",
    "RunDirectory": "rundir",
    "poke": "control",
    "run_jobs": "run",
    "send": "control",
    "work_off": "run",
}

__getattr__, __dir__ = on_first_use(__name__, _HOME)
