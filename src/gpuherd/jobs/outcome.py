"""How a run ended: plain frozen data for whoever called ``run_jobs``."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.errors import ExitCode
from gpuherd.jobs.failures import FailureClass


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that has failed for good. ``attempt`` and ``log`` are those of its last attempt; no log if it had none."""

    job: str
    title: str
    failure: FailureClass
    reason: str
    attempt: int
    log: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Jobs of this submission by state, and the failures.

    Attributes:
        waiting: not yet run when the run ended, because it was interrupted.
        cancelled: can't run, because a job that they need has failed.
        stopped_by: INTERRUPTED or TERMINATED when a signal ended the run before all was done, else None.
    """

    done: int
    failed: int
    waiting: int
    cancelled: int
    failures: tuple[Failure, ...] = ()
    stopped_by: ExitCode | None = None

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the run before all was done; the same command goes on from there."""
        return self.stopped_by is not None

    @property
    def exit_code(self) -> ExitCode:
        """What a command that ran these jobs exits with."""
        if self.stopped_by is not None:
            return self.stopped_by
        return ExitCode.FAILED if self.failed or self.cancelled or self.waiting else ExitCode.OK
