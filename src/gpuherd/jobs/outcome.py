"""How a run ended: plain frozen data for whoever called ``run_jobs``."""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.errors import ExitCode
from gpuherd.jobs.failures import FailureClass, in_words


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that has failed for good. ``attempt``, ``log`` and ``exit_code`` are those of its last attempt; None where
    there was none."""

    job: str
    title: str
    failure: FailureClass
    reason: str
    attempt: int
    log: str | None
    exit_code: int | None = None

    @property
    def sentence(self) -> str:
        """Its class, exit code and reason, and where its log is."""
        log = "" if self.log is None else f" (log: {self.log})"
        return in_words(self.failure, self.exit_code, self.reason) + log


@dataclass(frozen=True, slots=True)
class Outcome:
    """Jobs of this submission by state, and the failures.

    Attributes:
        waiting: not yet run when the run ended, because it was interrupted.
        cancelled: can't run, because a job that they need has failed.
        stopped_by: INTERRUPTED or TERMINATED when a signal ended the run before all was done, else None.
        drained: a command (``gpuherd drain``, ``gpuherd down``) ended it before all was done.
    """

    done: int
    failed: int
    waiting: int
    cancelled: int
    failures: tuple[Failure, ...] = ()
    stopped_by: ExitCode | None = None
    drained: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether a signal or a command ended the run before all was done; the same command goes on from there."""
        return self.stopped_by is not None or self.drained

    @property
    def complete(self) -> bool:
        """Whether every job is done."""
        return not (self.failed or self.cancelled or self.waiting)

    @property
    def unsolvable(self) -> tuple[Failure, ...]:
        """Failures that the same command would meet again: what the job was given is at fault."""
        return tuple(each for each in self.failures if each.failure is FailureClass.BAD_INPUT)

    @property
    def exit_code(self) -> ExitCode:
        """What a command that ran these jobs exits with: 0 also when it was drained and nothing has failed."""
        if self.stopped_by is not None:
            return self.stopped_by
        drained_well = self.drained and not (self.failed or self.cancelled)
        return ExitCode.OK if self.complete or drained_well else ExitCode.FAILED
