"""The dispatcher's book of GPUs on which jobs fail: what ``quarantine`` says, kept in the queue over restarts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from gpuherd.jobs import clock, quarantine
from gpuherd.jobs.failures import Diagnosis
from gpuherd.jobs.quarantine import Health
from gpuherd.jobs.queue import Queue

logger = logging.getLogger(__name__)


class HealthBook:
    """What is held against each GPU. Writes in the transaction of its caller."""

    def __init__(self, queue: Queue):
        self._queue = queue
        self._known: dict[str, Health] = {}
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
        self, gpus: Collection[str], job: str, diagnosis: Diagnosis, *, now: float, machine: Collection[str]
    ) -> None:
        """A job has failed on these GPUs, of all those of the ``machine`` that the run may use."""
        reason, failure = diagnosis.reason, diagnosis.failure
        self._keep(quarantine.after_failure(self._known, gpus, job, failure, reason, now=now, machine=machine))

    def succeeded(self, gpus: Collection[str], *, started_at: float) -> None:
        """A job has succeeded on these GPUs."""
        if self._known:
            self._keep(quarantine.after_success(self._not_ahead(), gpus, started_at=started_at))

    def faulty(self, gpus: Collection[str], reason: str, *, now: float) -> None:
        """The driver reports a fault of these GPUs."""
        self._keep(quarantine.after_fault(self._known, gpus, reason, now=now))

    def excluded(self, now: float) -> dict[str, str]:
        """The GPUs that are left out now, with a sentence each."""
        return quarantine.excluded(self._known, now) if self._known else {}

    def next_return(self, now: float) -> float | None:
        """The wall-clock second at which the next of them comes back."""
        return quarantine.next_return(self._known, now) if self._known else None

    def _not_ahead(self) -> dict[str, Health]:
        """A failure that lies ahead is of a time before the clock was set back: no success would ever come after it."""
        now = clock.wall()
        return {
            uuid: health if health.failed_at is None or health.failed_at <= now else replace(health, failed_at=now)
            for uuid, health in self._known.items()
        }

    def _keep(self, known: dict[str, Health]) -> None:
        changed = {uuid: known.get(uuid, Health()) for uuid in known.keys() | self._known.keys()}
        changed = {uuid: health for uuid, health in changed.items() if health != self._known.get(uuid)}
        if changed:
            self._queue.save_gpu_health({uuid: quarantine.to_json(health) for uuid, health in changed.items()})
        self._known = dict(known)
