"""How a job stands in a simulation: what it asks for now, its tries, and where it failed.

It is what ``retry.next_try`` wants to know of a job (``retry.Tried``), without a database's row behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuherd.jobs.job import Job
from gpuherd.jobs.order import rank
from gpuherd.jobs.policy import WaitingJob
from gpuherd.jobs.retry import NextTry
from gpuherd.jobs.sharing import could_share


@dataclass(frozen=True, slots=True)
class Standing:
    """A job as it stands.

    Attributes:
        number: its place in the order of submission, from 0.
        job: as it was submitted.
        gpus, memory_mb, share: what it asks for now; MB on each GPU.
        ready_at: since when it could have run.
        tries: failures that count against ``job.retries``.
        attempts: starts so far.
        avoid: UUIDs of GPUs on which it failed.
    """

    number: int
    job: Job
    gpus: int
    memory_mb: int | None
    share: bool
    ready_at: float = 0.0
    tries: int = 0
    attempts: int = 0
    avoid: frozenset[str] = frozenset()

    @classmethod
    def of(cls, number: int, job: Job, *, share: bool) -> Standing:
        """A job that has just been submitted. ``share``: all that could share a GPU do; else those that say so."""
        return cls(number, job, job.gpus, job.memory_mb, could_share(job) if share else job.share)

    def started(self) -> Standing:
        """After one more start."""
        return self._with(attempts=self.attempts + 1)

    def ready(self, at: float) -> Standing:
        """It could run from this second on."""
        return self._with(ready_at=at)

    def for_next(self, try_: NextTry) -> Standing:
        """As it is tried again."""
        return Standing(
            self.number,
            self.job,
            try_.gpus,
            try_.memory_mb,
            try_.share,
            try_.not_before,
            self.tries + try_.costs_try,
            self.attempts,
            try_.avoid,
        )

    def waiting(self, timeout: float | None, arrived_s: float) -> WaitingJob:
        """What the policy is told of it. ``timeout``: the time limit of jobs that have none of their own."""
        limit_s = self.job.timeout_s or timeout
        place = rank(self.job.cost, arrived_s)
        return WaitingJob(
            self.number,
            self.gpus,
            self.memory_mb,
            self.job.priority,
            self.avoid,
            self.share,
            place,
            limit_s,
            self.job.nodes,
        )

    def _with(self, *, ready_at: float | None = None, attempts: int | None = None) -> Standing:
        # Not dataclasses.replace, which would take as long as all else that is done for a start.
        return Standing(
            self.number,
            self.job,
            self.gpus,
            self.memory_mb,
            self.share,
            self.ready_at if ready_at is None else ready_at,
            self.tries,
            self.attempts if attempts is None else attempts,
            self.avoid,
        )
