"""Which GPUs are left out for a while because jobs fail on them, and until when. Pure; the caller keeps the time.

* A GPU fault (Xid, uncorrectable ECC errors, fallen off the bus) leaves it out at once: 10 minutes the first time,
  twice as long each further time, at most a day.
* Three different jobs in a row that crash on it, and none that succeeds between, leave it out for 5 minutes: such a GPU
  fails fast and would eat the queue. But only while there is another GPU on which the last job did not crash; where all
  fail, the jobs are at fault and not the GPU.
* A job that was started after the last failure and succeeds clears all.

A GPU that comes back is on probation: one more crash leaves it out again. The state is plain data, to and from JSON.

>>> health = after_failure({}, ["GPU-a"], "train", FailureClass.GPU_FAULT, "Xid 79", now=0.0, machine=["GPU-a"])
>>> excluded(health, now=60.0)
{'GPU-a': 'left out for 9 min more: GPU fault (Xid 79)'}
>>> excluded(health, now=600.0)
{}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from gpuherd.jobs.failures import FailureClass

FIRST_FAULT_S = 600.0
LONGEST_FAULT_S = 86_400.0
CRASHES = 3
CRASH_S = 300.0

# Failures that may be the GPU's doing. Running out of memory, a time limit or a kill are not.
_CRASHES = frozenset({FailureClass.CRASH, FailureClass.NO_HEARTBEAT})


@dataclass(frozen=True, slots=True)
class Health:
    """What is held against one GPU.

    Attributes:
        faults: GPU faults since the last success.
        crashed: names of the different jobs that crashed in a row, the oldest first, at most ``CRASHES``.
        failed_at: wall-clock second of the last failure that counts, None for none.
        until: wall-clock second until which it is left out, None when it is not.
        reason: why it was left out last.
    """

    faults: int = 0
    crashed: tuple[str, ...] = ()
    failed_at: float | None = None
    until: float | None = None
    reason: str | None = None


Healths = Mapping[str, Health]  # by UUID; a GPU that is not in it has nothing held against it


def after_failure(
    healths: Healths,
    gpus: Collection[str],
    job: str,
    failure: FailureClass,
    reason: str,
    *,
    now: float,
    machine: Collection[str],
) -> dict[str, Health]:
    """The state after a job failed on these GPUs. ``machine``: all GPUs that the run may use."""
    if failure is FailureClass.GPU_FAULT:
        return after_fault(healths, gpus, reason, now=now)
    known = dict(healths)
    if failure not in _CRASHES:
        return known
    for uuid in gpus:
        before = known.get(uuid, Health())
        crashed = (*(name for name in before.crashed if name != job), job)[-CRASHES:]
        until, why = before.until, before.reason
        if len(crashed) == CRASHES and _is_alone(known, gpus, machine, now):
            until = max(until or 0.0, now + CRASH_S)
            why = f"{CRASHES} different jobs in a row crashed on it ({reason})"
        known[uuid] = Health(before.faults, crashed, now, until, why)
    return known


def after_fault(healths: Healths, gpus: Collection[str], reason: str, *, now: float) -> dict[str, Health]:
    """The state after a fault of these GPUs, told by a job's failure or by the driver itself."""
    known = dict(healths)
    for uuid in gpus:
        before = known.get(uuid, Health())
        length = min(LONGEST_FAULT_S, FIRST_FAULT_S * 2 ** min(before.faults, 20))
        until = max(before.until or 0.0, now + length)
        known[uuid] = Health(before.faults + 1, before.crashed, now, until, f"GPU fault ({reason})")
    return known


def after_success(healths: Healths, gpus: Collection[str], *, started_at: float) -> dict[str, Health]:
    """The state after a job that was started at this wall-clock second has succeeded on these GPUs."""
    return {
        uuid: health
        for uuid, health in healths.items()
        if uuid not in gpus or (health.failed_at is not None and health.failed_at > started_at)
    }


def excluded(healths: Healths, now: float) -> dict[str, str]:
    """The GPUs that are left out now, by UUID, with a sentence each."""
    return {
        uuid: f"left out for {_minutes(health.until - now)} more: {health.reason}"
        for uuid, health in healths.items()
        if health.until is not None and now < health.until <= now + LONGEST_FAULT_S
    }


def next_return(healths: Healths, now: float) -> float | None:
    """The wall-clock second at which the next GPU that is left out comes back, None when none is."""
    return min((healths[uuid].until or now for uuid in excluded(healths, now)), default=None)


def to_json(health: Health) -> str:
    """One GPU's state as a line of JSON."""
    return json.dumps(asdict(health), sort_keys=True)


def from_json(text: str) -> Health:
    """The state that ``to_json`` wrote. Raises ValueError for anything else."""
    values = json.loads(text)
    try:
        return Health(**{**values, "crashed": tuple(values["crashed"])})
    except (TypeError, KeyError) as problem:
        raise ValueError(f"{text!r} is no state of a GPU") from problem


def _is_alone(healths: Healths, gpus: Collection[str], machine: Collection[str], now: float) -> bool:
    """Whether jobs crash on these GPUs only: another one is in use, and the last job on it did not crash."""
    out = excluded(healths, now)
    others = [uuid for uuid in machine if uuid not in gpus and uuid not in out]
    return any(not healths.get(uuid, Health()).crashed for uuid in others)


def _minutes(seconds: float) -> str:
    minutes = -int(-seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
