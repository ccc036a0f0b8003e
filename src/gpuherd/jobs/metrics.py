"""The figures of a run: computed from the queue's records alone, so that they stay right over any number of restarts.

Times are seconds. A job's wait is the time in which it could have run, a dispatcher was there, and it did not run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import mean, median
from typing import Any

from gpuherd.jobs.records import AttemptRow, AttemptState, Counts


def metrics(
    counts: Counts, attempts: Sequence[AttemptRow], runs: Sequence[tuple[float, float]], now: float
) -> dict[str, Any]:
    """What goes into gpu_metrics.json, ready for JSON. A figure that can't be given is None.

    Args:
        counts: jobs of the latest submission by state.
        attempts: all attempts of the queue.
        runs: wall-clock start and end of each dispatcher's run.
        now: wall-clock second, for the time stamp.
    """
    waits: dict[str, float] = defaultdict(float)
    for attempt in attempts:
        waits[attempt.job] += attempt.wait_s
    runtime = sum(end - start for start, end in runs)
    ended = counts.done + counts.failed
    lengths = [a.run_s for a in attempts if a.state is AttemptState.DONE and a.run_s is not None]
    failed = [a for a in attempts if a.state is AttemptState.FAILED]
    busy = _busy(attempts)
    return {
        "total_jobs": counts.total,
        "successful_jobs": counts.done,
        "failed_jobs": counts.failed,
        "cancelled_jobs": counts.cancelled,
        "waiting_jobs": counts.waiting,
        "success_rate": counts.done / ended if ended else None,
        "failure_rate": counts.failed / ended if ended else None,
        "start_time": _stamp(runs[0][0]) if runs else None,
        "timestamp": _stamp(now),
        "total_runtime": round(runtime, 3),
        "runs": len(runs),
        "total_wait_time": round(sum(waits.values()), 3),
        "avg_wait_time": round(mean(waits.values()), 3) if waits else None,
        "max_wait_time": round(max(waits.values()), 3) if waits else None,
        "attempts": len(attempts),
        "failed_attempts": len(failed),
        "failed_attempts_by_class": dict(Counter(a.failure_class or "unknown" for a in failed)),
        "job_run_time": _summary(lengths),
        "gpu_hours": round(sum(busy.values()) / 3600, 6),
        "gpus": _gpus(attempts, busy, runtime),
    }


def _busy(attempts: Sequence[AttemptRow]) -> Mapping[str, float]:
    """Seconds in which an attempt ran, by GPU. No two attempts are on one GPU at a time, so that they add up."""
    busy: dict[str, float] = defaultdict(float)
    for attempt in attempts:
        for uuid in attempt.gpus:
            busy[uuid] += attempt.run_s or 0.0
    return busy


def _gpus(attempts: Sequence[AttemptRow], busy: Mapping[str, float], runtime: float) -> dict[str, Any]:
    labels = {uuid: label for a in attempts for uuid, label in zip(a.gpus, a.labels, strict=True)}
    starts = Counter(uuid for a in attempts for uuid in a.gpus)
    return {
        labels[uuid]: {
            "uuid": uuid,
            "attempts": starts[uuid],
            "busy_seconds": round(busy[uuid], 3),
            "busy_share": round(min(1.0, busy[uuid] / runtime), 4) if runtime > 0 else None,
        }
        for uuid in sorted(labels, key=lambda uuid: labels[uuid])
    }


def _summary(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    figures = {"mean": mean(seconds), "median": median(seconds), "min": min(seconds), "max": max(seconds)}
    return {name: round(value, 3) for name, value in figures.items()}


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
