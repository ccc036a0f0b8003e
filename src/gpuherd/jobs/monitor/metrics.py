"""The figures of a run, computed from the queue's records alone."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpuherd.jobs import clock
from gpuherd.jobs.dispatcher_state import InEngine
from gpuherd.jobs.monitor.job_status import Page
from gpuherd.jobs.monitor.status import status_of
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.queue.submission import process_of
from gpuherd.jobs.records import AttemptRow, AttemptState, Counts
from gpuherd.jobs.run_dir import RunDirectory

# The figures of a run: computed from the queue's records alone, so that they stay right over any number of restarts.
#
# Times are seconds. A job's wait is the time in which it could have run, a dispatcher was there, and it did not run.
# Its turnaround goes from when it could first run to the end of its last attempt. A GPU-hour is one GPU held for an
# hour, whatever it did in it.


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
    by_class = Counter(a.failure_class or "unknown" for a in failed)
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
        "avg_wait_time": round(sum(waits.values()) / len(waits), 3) if waits else None,
        "max_wait_time": round(max(waits.values()), 3) if waits else None,
        "attempts": len(attempts),
        "failed_attempts": len(failed),
        "failed_attempts_by_class": dict(by_class),
        "retries_by_class": _retries(attempts),
        "job_run_time": _summary(lengths),
        "job_wait_time": _summary(list(waits.values())),
        "job_turnaround": _summary(_turnarounds(attempts)),
        "gpu_hours": round(sum(busy.values()) / 3600, 6),
        "gpu_hours_by_outcome": _hours_by_outcome(attempts),
        "gpus": _gpus(attempts, busy, runtime),
        "attempts_by_engine": dict(Counter(attempt.engine for attempt in attempts)),
        "attempts_by_node": dict(Counter(attempt.node for attempt in attempts if attempt.node is not None)),
    }


def _retries(attempts: Sequence[AttemptRow]) -> dict[str, int]:
    """How many attempts were made because the one before had failed, by the class of that failure."""
    retries: Counter[str] = Counter()
    before: dict[str, AttemptRow] = {}
    for attempt in attempts:
        last = before.get(attempt.job)
        if last is not None and last.state is AttemptState.FAILED:
            retries[last.failure_class or "unknown"] += 1
        before[attempt.job] = attempt
    return dict(retries)


def _turnarounds(attempts: Sequence[AttemptRow]) -> list[float]:
    """One length for each job whose last attempt has succeeded."""
    first: dict[str, AttemptRow] = {}
    last: dict[str, AttemptRow] = {}
    for attempt in attempts:
        first.setdefault(attempt.job, attempt)
        last[attempt.job] = attempt
    return [
        max(0.0, end.ended_at - (first[job].started_at - first[job].wait_s))
        for job, end in last.items()
        if end.state is AttemptState.DONE and end.ended_at is not None
    ]


def _hours_by_outcome(attempts: Sequence[AttemptRow]) -> dict[str, float]:
    hours: dict[str, float] = defaultdict(float)
    for attempt in attempts:
        hours[attempt.state.value] += len(attempt.gpus) * (attempt.run_s or 0.0) / 3600
    return {outcome: round(value, 6) for outcome, value in hours.items()}


def _busy(attempts: Sequence[AttemptRow]) -> Mapping[str, float]:
    """Seconds in which at least one attempt ran, by GPU. Jobs that shared one at a time count once."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for attempt in attempts:
        for uuid in attempt.gpus:
            spans[uuid].append((attempt.started_at, attempt.run_s or 0.0))
    shared = {uuid for attempt in attempts if attempt.shared_mb is not None for uuid in attempt.gpus}
    # Only where jobs shared a GPU are wall-clock times looked at: somebody may have set that clock meanwhile.
    return {uuid: _covered(of) if uuid in shared else sum(s for _, s in of) for uuid, of in spans.items()}


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that spans of (start, length) cover together."""
    covered, until = 0.0, float("-inf")
    for start, length in sorted(spans):
        covered += max(0.0, start + length - max(start, until))
        until = max(until, start + length)
    return covered


def _gpus(attempts: Sequence[AttemptRow], busy: Mapping[str, float], runtime: float) -> dict[str, Any]:
    starts = Counter(uuid for a in attempts for uuid in a.gpus)
    # What is not ours runs on while nobody of ours is there: a share of our own time would mean nothing.
    elsewhere = {uuid for a in attempts if a.node is not None for uuid in a.gpus}
    return {
        label: {
            "uuid": uuid,
            "attempts": starts[uuid],
            "busy_seconds": round(busy[uuid], 3),
            "busy_share": round(min(1.0, busy[uuid] / runtime), 4) if runtime > 0 and uuid not in elsewhere else None,
        }
        for label, uuid in _by_label(attempts)
    }


def _by_label(attempts: Sequence[AttemptRow]) -> list[tuple[str, str]]:
    """Labels and UUIDs, 2 before 10. A GPU whose label is another's by now (it was replaced) stands under its UUID."""
    labels = {uuid: label for a in attempts for uuid, label in zip(a.gpus, a.labels, strict=True)}
    holders = {label: uuid for a in attempts for uuid, label in zip(a.gpus, a.labels, strict=True)}
    named = [(label if holders[label] == uuid else uuid, uuid) for uuid, label in labels.items()]
    return sorted(named, key=lambda each: (len(each[0]), each[0]))


def _summary(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    from statistics import mean, median  # large, and a dispatcher that waits for days needs it once

    ordered = sorted(seconds)
    figures = {"mean": mean(ordered), "median": median(ordered), "min": ordered[0], "max": ordered[-1]}
    figures |= {f"p{percent}": percentile(ordered, percent) for percent in (90, 95, 99)}
    return {name: round(value, 3) for name, value in figures.items()}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile of values in ascending order: the least that ``percent`` % of them don't exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([1.0, 2.0, 3.0, 4.0], 95)
    (2.0, 4.0)
    """
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


# The figures of a queue that can be read often: sums that SQLite makes, however many attempts there were.
#
# For Prometheus, which asks every few seconds. ``metrics`` tells more, from every single attempt, once at the end.
# Seconds everywhere; what runs still counts up to now.

_QUANTILES = (0.5, 0.9, 0.95, 0.99)
_NOTHING = Page(limit=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How long something took: of ``count`` values the sum and quantiles (none of no values)."""

    count: int
    total: float
    quantiles: Mapping[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFigures:
    """A GPU's part: seconds in which an attempt held it, attempts begun on it, and how many run there now."""

    label: str
    busy_s: float
    attempts: int
    running: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """All that is told of a queue.

    ``ended``: attempts that have ended, by state and class of failure ("" for none). ``gpu_s_by_state``: how long
    these held GPUs, summed over GPUs. ``gpus`` by UUID. ``in_engine``: what an engine beyond this machine has now.
    """

    counts: Counts
    paused: int
    at_work: bool
    eta_s: float | None
    ended: Mapping[tuple[str, str], int]
    gpu_s_by_state: Mapping[str, float]
    wait: Spread
    run: Spread
    gpus: Mapping[str, GpuFigures]
    in_engine: InEngine | None = None


def read_figures(run: RunDirectory, reader: QueueReader) -> Figures:
    """The queue's figures now. Raises QueueUnreadable."""
    told = status_of(run, reader, _NOTHING)
    gpus, gpu_s = _gpu_figures(reader)
    rows = reader.rows(
        "SELECT state, coalesce(class, '') AS class, count(*) AS n FROM attempts WHERE state <> 'running'"
        " GROUP BY state, class"
    )
    return Figures(
        counts=told.counts,
        paused=told.paused,
        at_work=told.dispatcher is not None,
        eta_s=told.eta_s,
        ended={(row["state"], row["class"]): row["n"] for row in rows},
        gpu_s_by_state=gpu_s,
        wait=_spread(reader, "wait_s", "1"),
        run=_spread(reader, "ended_mono - started_mono", "state = 'done' AND ended_mono IS NOT NULL"),
        gpus=gpus,
        in_engine=told.in_engine,
    )


def _gpu_figures(reader: QueueReader) -> tuple[dict[str, GpuFigures], dict[str, float]]:
    """By GPU, and GPU-seconds of ended attempts by state. A set of GPUs is one row, so that few are taken apart."""
    rows = reader.rows(
        "SELECT gpus, labels, state, count(*) AS n, total(max(0, coalesce(ended_mono, started_mono) - started_mono))"
        " AS s FROM attempts GROUP BY gpus, labels, state ORDER BY max(id)"
    )
    labels: dict[str, str] = {}
    busy: dict[str, float] = defaultdict(float)
    attempts: dict[str, int] = defaultdict(int)
    running: dict[str, int] = defaultdict(int)
    by_state: dict[str, float] = defaultdict(float)
    for row in rows:
        uuids = json.loads(row["gpus"])
        if row["state"] != AttemptState.RUNNING:
            by_state[row["state"]] += row["s"] * len(uuids)
        for uuid, label in zip(uuids, json.loads(row["labels"]), strict=True):
            labels[uuid] = label
            busy[uuid] += row["s"]
            attempts[uuid] += row["n"]
            running[uuid] += row["n"] if row["state"] == AttemptState.RUNNING else 0
    for uuid, seconds in _still_busy(reader):
        busy[uuid] += seconds
    gpus = {
        uuid: GpuFigures(label=label, busy_s=busy[uuid], attempts=attempts[uuid], running=running[uuid])
        for uuid, label in labels.items()
    }
    return gpus, dict(by_state)


def _still_busy(reader: QueueReader) -> Iterator[tuple[str, float]]:
    """For each GPU of each attempt that runs how long it has done so. One that is recorded as running, and has ended
    while no dispatcher was there, counts once its end is known.
    """
    now, wall = clock.mono(), clock.wall()
    for row in reader.rows("SELECT * FROM attempts WHERE state = 'running'"):
        process = process_of(row)
        # Beyond this machine by the wall clock: there it goes on while this one is started anew.
        ran_s = wall - row["started_at"] if process is None else now - row["started_mono"]
        if process is None or process.is_alive():
            for uuid in json.loads(row["gpus"]):
                yield uuid, max(0.0, ran_s)


def _spread(reader: QueueReader, value: str, where: str) -> Spread:
    # Both are words of this module's own.
    row = reader.one(f"SELECT count(*), total({value}) FROM attempts WHERE {where}")  # noqa: S608
    count, total = (0, 0.0) if row is None else (int(row[0]), float(row[1]))
    quantiles = {}
    for quantile in _QUANTILES if count else ():
        rank = max(0, -int(-quantile * count // 1) - 1)
        found = reader.one(
            f"SELECT {value} FROM attempts WHERE {where} ORDER BY 1 LIMIT 1 OFFSET ?",  # noqa: S608
            (rank,),
        )
        if found is not None:
            quantiles[quantile] = float(found[0])
    return Spread(count=count, total=total, quantiles=quantiles)
