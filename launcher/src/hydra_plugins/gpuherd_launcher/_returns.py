"""What the jobs of a sweep returned, as Hydra's sweepers read it. A job that could not tell how it ended has failed."""

from __future__ import annotations

import logging

from hydra.core.utils import JobReturn, JobStatus

from gpuherd.jobs.records import Failure
from hydra_plugins.gpuherd_launcher import _parcels
from hydra_plugins.gpuherd_launcher._planning import Planned
from hydra_plugins.gpuherd_launcher._telling import JobFailed

log = logging.getLogger(__name__)


def returned(planned: Planned, failure: Failure | None) -> JobReturn:
    """What a job returned. ``failure``: why its last attempt failed, None if it didn't."""
    try:
        result: JobReturn = _parcels.read_one(planned.returned)
    except FileNotFoundError:
        return _failed(planned, failure)
    except Exception as problem:  # whatever the program's own classes raise
        return _failed(planned, failure, None if failure else f"what it returned can't be read: {problem}")
    if failure is not None and result.status is JobStatus.COMPLETED:
        # It had returned, and died of something afterwards.
        return _failed(planned, failure)
    if result.status is JobStatus.FAILED:
        raised = result._return_value
        log.error(f"{planned.job.title} failed: {type(raised).__name__}: {raised}{_log(failure)}")
        raised.add_note(f"This was job {planned.job.title}{_log(failure)}.")
    return result


def _failed(planned: Planned, failure: Failure | None, reason: str | None = None) -> JobReturn:
    """A job of which nothing came back."""
    if reason is None:
        reason = "it was cancelled" if failure is None else f"{failure.failure}: {failure.reason}"
    text = f"{planned.job.title} failed: {reason}{_log(failure)}"
    log.error(text)
    result = JobReturn(overrides=list(planned.overrides), status=JobStatus.FAILED)
    result.return_value = JobFailed(text)
    return result


def _log(failure: Failure | None) -> str:
    return "" if failure is None or failure.log is None else f" (log: {failure.log})"
