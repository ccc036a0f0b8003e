"""GPU health: GPUs that are left out for a while because jobs fail on them. The rules (pure), and their record in the
queue.

* A GPU fault (Xid, uncorrectable ECC errors, fallen off the bus) leaves a GPU out at once: 10 minutes the first time,
  twice as long each further time, at most a day.
* A GPU on which at least three different jobs crash in a row is judged by how jobs fare on the other GPUs. It is left
  out when the row has a probability of one in a thousand or less for a GPU that is no worse than those: a bad GPU fails
  fast and would eat the queue, while jobs with bugs fail everywhere.
* It is left out for 5 seconds the first time, then for twice as long, at most 5 minutes. Then a waiting job probes it.
* A job that was started after the last failure and succeeds clears all.

The probability that a job crashes on a sound GPU is estimated for each job of the row, and these are multiplied:

* 1 for a job that crashed on another GPU too: the job is at fault;
* else the share of crashes among jobs of its family on other GPUs (among all jobs, if none of its family ran there). It
  is the larger of two shares: of the last outcomes, and of those since the row began, when all jobs may have become
  worse. Both start from a prior of two jobs that crash with a probability of 1/10, so that a GPU whose neighbours still
  run their first, long jobs is left out after three crashes;
* at most 1/10 for a job that succeeded on another GPU.

Other GPUs count while they are sound: used by the run, not left out, and without such a row of their own. Where the
last job crashed on all of these, the jobs are at fault.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from gpuherd.jobs import clock
from gpuherd.jobs.attempts.failures import Diagnosis, FailureClass
from gpuherd.jobs.job import Job
from gpuherd.jobs.queue.store import Queue
from gpuherd.units import duration

logger = logging.getLogger(__name__)

FIRST_FAULT_S = 600.0
LONGEST_FAULT_S = 86_400.0
CRASHES = 3
FIRST_CRASH_S = 5.0
LONGEST_CRASH_S = 300.0
# A row of crashes that is less probable than this on a sound GPU is the GPU's fault.
_IMPROBABLE = 1.001e-3
# So many outcomes of a GPU are remembered.
_WINDOW = 32
_PRIOR_JOBS, _PRIOR_CRASH = 2.0, 0.1

# Failures that may be the GPU's doing. Running out of memory, a time limit or a kill are not.
MAY_BE_THE_GPU = frozenset({FailureClass.CRASH, FailureClass.NO_HEARTBEAT})


@dataclass(frozen=True, slots=True)
class JobEnding:
    """How a job ended on a GPU: it crashed, or succeeded (``ok``), at wall-clock second ``at``."""

    job: str
    family: str | None
    ok: bool
    at: float


@dataclass(frozen=True, slots=True)
class Health:
    """The record of one GPU.

    Attributes:
        outcomes: the last crashes and successes on it, the oldest first.
        faults: GPU faults since the last success.
        times_out: how often crashes have left it out since the last success.
        failed_at: wall-clock second of the last failure that counts, None for none since the last success.
        until: wall-clock second until which it is left out, None when it is not.
        reason: why it was left out last.
    """

    outcomes: tuple[JobEnding, ...] = ()
    faults: int = 0
    times_out: int = 0
    failed_at: float | None = None
    until: float | None = None
    reason: str | None = None

    @property
    def row(self) -> tuple[JobEnding, ...]:
        """The crashes since the last success, the last of each job."""
        crashes: dict[str, JobEnding] = {}
        for outcome in reversed(self.outcomes):
            if outcome.ok:
                break
            crashes.setdefault(outcome.job, outcome)
        return tuple(reversed(crashes.values()))

    def is_out(self, now: float) -> bool:
        """Whether it is left out now. A time further ahead than any we set is of a clock that was set back."""
        return self.until is not None and now < self.until <= now + LONGEST_FAULT_S

    def is_on_trial(self, now: float) -> bool:
        """Whether crashes have left it out, it may be used again, and no job has succeeded on it since."""
        return self.times_out > 0 and not self.is_out(now)


Healths = Mapping[str, Health]  # by UUID; nothing is known of a GPU that is not in it


def after_failure(
    healths: Healths,
    gpus: Collection[str],
    job: str,
    family: str | None,
    failure: FailureClass,
    reason: str,
    *,
    now: float,
    machine: Collection[str],
    in_use: Callable[[str], bool],
) -> dict[str, Health]:
    """The states that change when a job failed on these GPUs.

    ``machine``: all GPUs that the run may use; ``in_use``: whether a job of the run runs on one now."""
    if failure is FailureClass.GPU_FAULT:
        return after_fault(healths, gpus, reason, now=now)
    if failure not in MAY_BE_THE_GPU:
        return {}
    crash = JobEnding(job, family, ok=False, at=now)
    changed = {uuid: _noted(healths.get(uuid, Health()), crash) for uuid in gpus}
    suspects = {uuid: health for uuid, health in changed.items() if len(health.row) >= CRASHES}
    if not suspects:
        return changed
    used = [healths.get(uuid, Health()) for uuid in machine if uuid not in gpus and (uuid in healths or in_use(uuid))]
    sound = [health for health in used if not health.is_out(now) and len(health.row) < CRASHES]
    for uuid, health in suspects.items():
        row = health.row
        if _probability(row, sound) <= _IMPROBABLE:
            length = min(LONGEST_CRASH_S, FIRST_CRASH_S * 2 ** min(health.times_out, 20))
            why = f"{len(row)} different jobs in a row crashed on it, and jobs elsewhere do not ({reason})"
            until = max(health.until or 0.0, now + length)
            changed[uuid] = replace(health, times_out=health.times_out + 1, until=until, reason=why)
    return changed


def after_fault(healths: Healths, gpus: Collection[str], reason: str, *, now: float) -> dict[str, Health]:
    """The states that change with a fault of these GPUs, which a job's failure or the driver itself shows."""
    changed = {}
    for uuid in gpus:
        before = healths.get(uuid, Health())
        length = min(LONGEST_FAULT_S, FIRST_FAULT_S * 2 ** min(before.faults, 20))
        until = max(before.until or 0.0, now + length)
        why = f"GPU fault ({reason})"
        changed[uuid] = replace(before, faults=before.faults + 1, failed_at=now, until=until, reason=why)
    return changed


def after_success(
    healths: Healths, gpus: Collection[str], job: str, family: str | None, *, started_at: float, now: float
) -> dict[str, Health]:
    """The states that change when a job that was started at this wall-clock second has succeeded on these GPUs."""
    success = JobEnding(job, family, ok=True, at=now)
    before = {uuid: healths.get(uuid, Health()) for uuid in gpus}
    return {
        uuid: Health(outcomes=_noted(health, success).outcomes)
        for uuid, health in before.items()
        if health.failed_at is None or health.failed_at <= started_at
    }


def excluded(healths: Healths, now: float) -> dict[str, str]:
    """The GPUs that are left out now, by UUID, with a sentence each.

    >>> health = after_fault({}, ["GPU-a"], "Xid 79", now=0.0)
    >>> excluded(health, now=60.0)
    {'GPU-a': 'left out for 9 min more: GPU fault (Xid 79)'}
    >>> excluded(health, now=600.0)
    {}
    """
    sentences = {}
    for uuid, left_s in ((uuid, at - now) for uuid, at in returns(healths, now).items()):
        step = 60 if left_s > 60 else 1  # rounded up: a GPU never comes back later than the sentence promises
        sentences[uuid] = (
            f"left out for {duration(step * math.ceil(left_s / step), parts=1)} more: {healths[uuid].reason}"
        )
    return sentences


def returns(healths: Healths, now: float) -> dict[str, float]:
    """The GPUs that are left out now, by UUID, with the wall-clock second at which each comes back."""
    return {uuid: health.until or now for uuid, health in healths.items() if health.is_out(now)}


def to_json(health: Health) -> str:
    """One GPU's state as a line of JSON."""
    return json.dumps(asdict(health), sort_keys=True)


def from_json(text: str) -> Health:
    """The state that ``to_json`` wrote. Raises ValueError for anything else."""
    values = json.loads(text)
    try:
        outcomes = tuple(JobEnding(**each) for each in values.pop("outcomes"))
        return Health(outcomes=outcomes, **values)
    except (TypeError, KeyError, AttributeError) as problem:
        raise ValueError(f"{text!r} is no state of a GPU") from problem


def _noted(health: Health, outcome: JobEnding) -> Health:
    outcomes = (*health.outcomes, outcome)[-_WINDOW:]
    return replace(health, outcomes=outcomes, failed_at=health.failed_at if outcome.ok else outcome.at)


def _probability(row: Sequence[JobEnding], sound: Sequence[Health]) -> float:
    """How probable this row of crashes is on a GPU that is no worse than the sound ones."""
    if not any(not health.row for health in sound):
        return 1.0  # jobs crash everywhere, or this is the only GPU
    elsewhere = [outcome for health in sound for outcome in health.outcomes]
    began = row[0].at
    probability = 1.0
    for crash in row:
        same_job = [outcome.ok for outcome in elsewhere if outcome.job == crash.job]
        if not all(same_job):
            continue
        family = [outcome for outcome in elsewhere if outcome.family == crash.family]
        alike = family if crash.family is not None and family else elsewhere
        share = max(_share(alike), _share([outcome for outcome in alike if outcome.at >= began]))
        probability *= min(share, _PRIOR_CRASH) if same_job else share
    return probability


def _share(outcomes: Sequence[JobEnding]) -> float:
    crashes = sum(not outcome.ok for outcome in outcomes)
    return (crashes + _PRIOR_JOBS * _PRIOR_CRASH) / (len(outcomes) + _PRIOR_JOBS)


class GpuHealth:
    """The health of each GPU, kept in the queue over restarts. Writes in the transaction of its caller."""

    def __init__(self, queue: Queue):
        self._queue = queue
        self._known: dict[str, Health] = {}
        self._reported: dict[str, float] = {}
        for uuid, text in queue.gpu_health().items():
            try:
                self._known[uuid] = from_json(text)
            except ValueError:
                logger.warning("the queue's record of %s can't be read and is dropped", uuid)

    @contextmanager
    def unless_taken_back(self) -> Iterator[None]:
        """Changes made meanwhile are undone when the transaction around them fails."""
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
        """A job has failed on these GPUs; ``machine`` and ``in_use`` as for ``after_failure``."""
        failure, reason = diagnosis.failure, diagnosis.reason
        changed = after_failure(
            self._known, gpus, job.name, job.family, failure, reason, now=now, machine=machine, in_use=in_use
        )
        self._keep(changed)

    def succeeded(self, gpus: Collection[str], job: Job, *, started_at: float, now: float) -> None:
        """A job has succeeded on these GPUs."""
        before = self._not_ahead(gpus)
        changed = after_success(before, gpus, job.name, job.family, started_at=started_at, now=now)
        # A success that clears nothing is kept in memory alone: it is no loss after a restart, and a write for each is.
        clears = {uuid for uuid in changed if before[uuid].row or before[uuid].failed_at is not None}
        self._keep({uuid: health for uuid, health in changed.items() if uuid in clears})
        self._known = self._known | before | changed

    def faulty(self, gpus: Collection[str], reason: str, *, now: float) -> None:
        """The driver reports a fault of these GPUs."""
        self._keep(after_fault(self._known, gpus, reason, now=now))

    def excluded(self, now: float) -> dict[str, str]:
        """The GPUs that are left out now, with a sentence each."""
        return excluded(self._known, now)

    def returns(self, now: float) -> dict[str, float]:
        """The GPUs that are left out now, with the wall-clock second at which each comes back."""
        return returns(self._known, now)

    def is_on_trial(self, gpus: Collection[str], now: float) -> bool:
        """Whether one of these GPUs was left out for crashes, and no job has succeeded on it since."""
        return any(self._known[uuid].is_on_trial(now) for uuid in gpus if uuid in self._known)

    def fetch_news(self, now: float) -> dict[str, str]:
        """GPUs that have been left out since the last call, with a sentence each."""
        sentences, out = self.excluded(now), self.returns(now)
        news = {uuid: sentences[uuid] for uuid, until in out.items() if self._reported.get(uuid) != until}
        self._reported |= out
        return news

    def fetch_returned(self, now: float) -> dict[str, str]:
        """GPUs that ``fetch_news`` reported as left out and that are used again, once each, with a sentence."""
        known = {uuid: self._known.get(uuid, Health()) for uuid in self._reported}
        back = {uuid: health for uuid, health in known.items() if not health.is_out(now)}
        self._reported = {uuid: until for uuid, until in self._reported.items() if uuid not in back}
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
            self._queue.save_gpu_health({uuid: to_json(health) for uuid, health in changed.items()})
        self._known = self._known | dict(changed)


def _why_back(health: Health, now: float) -> str:
    if health.until is None:
        return "a job has succeeded on it"
    return "the time is over, and the next job that fits tries it" if health.is_on_trial(now) else "the time is over"
