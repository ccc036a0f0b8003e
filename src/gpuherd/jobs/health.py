"""The dispatcher's book of GPUs on which jobs fail: what ``quarantine`` says, kept in the queue over restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from gpuherd.jobs import clock, quarantine
from gpuherd.jobs.failures import Diagnosis
from gpuherd.jobs.job import Job
from gpuherd.jobs.quarantine import Health
from gpuherd.jobs.queue import Queue

logger = logging.getLogger(__name__)


class HealthBook:
    """What is held against each GPU. Writes in the transaction of its caller."""

    def __init__(self, queue: Queue):
        self._queue = queue
        self._known: dict[str, Health] = {}
        self._told: dict[str, float] = {}
        for uuid, text in queue.gpu_health().items():
            try:
                self._known[uuid] = quarantine.from_json(text)
            except ValueError:
                logger.warning("what the queue remembers of %s is no good and is forgotten", uuid)

    @contextmanager
    def unless_taken_back(self) -> Iterator[None]:
        """What is noted meanwhile is forgotten again when the transaction round it fails."""
        before = self._known
        try:
            yield
        except BaseException:
            self._known = before
            raise

    def failed(
        self,
        gpus: Collection[str],
        job: Job,
        diagnosis: Diagnosis,
        *,
        now: float,
        machine: Collection[str],
        in_use: Callable[[str], bool],
    ) -> None:
        """A job has failed on these GPUs; ``machine`` and ``in_use`` as for ``quarantine.after_failure``."""
        failure, reason = diagnosis.failure, diagnosis.reason
        changed = quarantine.after_failure(
            self._known, gpus, job.name, job.family, failure, reason, now=now, machine=machine, in_use=in_use
        )
        self._keep(changed)

    def succeeded(self, gpus: Collection[str], job: Job, *, started_at: float, now: float) -> None:
        """A job has succeeded on these GPUs."""
        before = self._not_ahead(gpus)
        changed = quarantine.after_success(before, gpus, job.name, job.family, started_at=started_at, now=now)
        # A success that clears nothing is kept in memory alone: it is no loss after a restart, and a write for each is.
        clears = {uuid for uuid in changed if before[uuid].row or before[uuid].failed_at is not None}
        self._keep({uuid: health for uuid, health in changed.items() if uuid in clears})
        self._known = self._known | before | changed

    def faulty(self, gpus: Collection[str], reason: str, *, now: float) -> None:
        """The driver reports a fault of these GPUs."""
        self._keep(quarantine.after_fault(self._known, gpus, reason, now=now))

    def excluded(self, now: float) -> dict[str, str]:
        """The GPUs that are left out now, with a sentence each."""
        return quarantine.excluded(self._known, now)

    def next_return(self, now: float) -> float | None:
        """The wall-clock second at which the next of them comes back."""
        return quarantine.next_return(self._known, now)

    def returns(self, now: float) -> dict[str, float]:
        """The GPUs that are left out now, with the wall-clock second at which each comes back."""
        return quarantine.returns(self._known, now)

    def is_on_trial(self, gpus: Collection[str], now: float) -> bool:
        """Whether one of these GPUs was left out for crashes, and no job has succeeded on it since."""
        return any(self._known[uuid].is_on_trial(now) for uuid in gpus if uuid in self._known)

    def fetch_news(self, now: float) -> dict[str, str]:
        """GPUs that have been left out since the last call, with a sentence each."""
        told, out = self.excluded(now), self.returns(now)
        news = {uuid: told[uuid] for uuid, until in out.items() if self._told.get(uuid) != until}
        self._told |= out
        return news

    def fetch_returned(self, now: float) -> dict[str, str]:
        """GPUs that were told of as left out and are no more, once each, with a sentence."""
        known = {uuid: self._known.get(uuid, Health()) for uuid in self._told}
        back = {uuid: health for uuid, health in known.items() if not health.is_out(now)}
        self._told = {uuid: until for uuid, until in self._told.items() if uuid not in back}
        return {uuid: f"used again: {_why_back(health, now)}" for uuid, health in back.items()}

    def _not_ahead(self, gpus: Collection[str]) -> dict[str, Health]:
        """A failure that lies ahead is of a time before the clock was set back: no success would ever come after it."""
        now = clock.wall()
        known = {uuid: self._known.get(uuid, Health()) for uuid in gpus}
        return {
            uuid: health if health.failed_at is None or health.failed_at <= now else replace(health, failed_at=now)
            for uuid, health in known.items()
        }

    def _keep(self, changed: Mapping[str, Health]) -> None:
        if changed:
            self._queue.save_gpu_health({uuid: quarantine.to_json(health) for uuid, health in changed.items()})
        self._known = self._known | dict(changed)


def _why_back(health: Health, now: float) -> str:
    if health.until is None:
        return "a job has succeeded on it"
    return "the time is over, and the next job that fits tries it" if health.is_on_trial(now) else "the time is over"
