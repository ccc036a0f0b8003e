"""Metrics of a queue, computed once from its records: right over any number of restarts of the dispatcher.

``read_metrics`` reads sums that SQLite makes, however many attempts there were; ``prometheus`` formats them for a
scraper, ``gpu_metrics`` for gpu_metrics.json. Seconds everywhere. A wait is the time in which a job could have run, a
dispatcher was there, and it did not run. A turnaround goes from when a job could first run to the end of its last
attempt. A GPU-hour is one GPU held for an hour, whatever was done on it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gpuherd.jobs.monitor.job_status import JobSelection, ran_s
from gpuherd.jobs.monitor.status import RunStatus, status_of
from gpuherd.jobs.queue.reader import QueueReader
from gpuherd.jobs.records import AttemptState
from gpuherd.jobs.run_dir import RunDirectory

_RUN_S = "max(0.0, ended_mono - started_mono)"
_DONE = "state = 'done' AND ended_mono IS NOT NULL"


@dataclass(frozen=True, slots=True)
class Durations:
    """Lengths of time in ascending order."""

    ordered: Sequence[float] = ()

    def quantile(self, percent: int) -> float:
        """The nearest-rank percentile: the least value that ``percent`` % of the values don't exceed.

        >>> [Distribution([1.0, 2.0, 3.0, 4.0]).quantile(percent) for percent in (50, 95)]
        [2.0, 4.0]
        """
        return self.ordered[max(0, -(-percent * len(self.ordered) // 100) - 1)]

    def summary(self) -> dict[str, float] | None:
        """For JSON; None for no values."""
        if not self.ordered:
            return None
        from statistics import mean, median  # large, and a dispatcher that waits for days needs it once

        figures = {"mean": mean(self.ordered), "median": median(self.ordered)}
        figures |= {"min": self.ordered[0], "max": self.ordered[-1]}
        figures |= {f"p{percent}": self.quantile(percent) for percent in (90, 95, 99)}
        return {name: round(value, 3) for name, value in figures.items()}


@dataclass(slots=True)
class GpuMetrics:
    """A GPU's part in a queue.

    Attributes:
        label: its latest.
        attempts, running: attempts begun on it, and those that run there now.
        ended_s: time that ended attempts held it, summed over attempts; ``running_s``: the same of running ones so far.
        shared: attempts shared it. ``remote``: it is of another machine.
    """

    label: str = ""
    attempts: int = 0
    running: int = 0
    ended_s: float = 0.0
    running_s: float = 0.0
    shared: bool = False
    remote: bool = False

    @property
    def busy_s(self) -> float:
        """Time that attempts held it, summed over attempts, up to now."""
        return self.ended_s + self.running_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Metrics of a queue.

    Attributes:
        status: without jobs.
        ended: attempts that have ended, by state and class of failure ("" for none).
        gpu_s_by_state: how long ended attempts held GPUs, by state, summed over GPUs.
        wait: waits of attempts. ``run``: run times of those that succeeded.
        gpus: by UUID.
    """

    status: RunStatus
    ended: Mapping[tuple[str, str], int] = field(default_factory=dict)
    gpu_s_by_state: Mapping[str, float] = field(default_factory=dict)
    wait: Durations = Durations()
    run: Durations = Durations()
    gpus: Mapping[str, GpuMetrics] = field(default_factory=dict)


def read_metrics(run: RunDirectory, reader: QueueReader) -> Metrics:
    """The metrics now. Raises QueueUnreadable."""
    gpus, gpu_s = _gpus(reader)
    ended = reader.rows(
        "SELECT state, coalesce(class, '') AS class, count(*) AS n FROM attempts WHERE state <> 'running'"
        " GROUP BY state, class ORDER BY min(id)"
    )
    return Metrics(
        status=status_of(run, reader, JobSelection(limit=0)),
        ended={(row["state"], row["class"]): row["n"] for row in ended},
        gpu_s_by_state=gpu_s,
        wait=_distribution(reader, "SELECT wait_s FROM attempts ORDER BY 1"),
        run=_distribution(reader, f"SELECT {_RUN_S} FROM attempts WHERE {_DONE} ORDER BY 1"),  # noqa: S608
        gpus=gpus,
    )


def _distribution(reader: QueueReader, query: str) -> Durations:
    return Durations([float(row[0]) for row in reader.each(query)])


def _gpus(reader: QueueReader) -> tuple[dict[str, GpuMetrics], dict[str, float]]:
    """By GPU, and GPU-seconds of ended attempts by state. A set of GPUs is one row, so that few are taken apart."""
    rows = reader.rows(
        "SELECT gpus, labels, state, count(*) AS n, count(node) AS remote, count(shared_mb) AS shared,"  # noqa: S608
        f" total(CASE WHEN ended_mono IS NOT NULL THEN {_RUN_S} END) AS s"
        " FROM attempts GROUP BY gpus, labels, state ORDER BY max(id)"
    )
    gpus: dict[str, GpuMetrics] = defaultdict(GpuMetrics)
    by_state: dict[str, float] = defaultdict(float)
    for row in rows:
        uuids, running = json.loads(row["gpus"]), row["state"] == AttemptState.RUNNING
        if not running:
            by_state[row["state"]] += row["s"] * len(uuids)
        for uuid, label in zip(uuids, json.loads(row["labels"]), strict=True):
            gpu = gpus[uuid]
            gpu.label = label
            gpu.ended_s += row["s"]
            gpu.attempts += row["n"]
            gpu.running += row["n"] if running else 0
            gpu.shared |= row["shared"] > 0
            gpu.remote |= row["remote"] > 0
    # An attempt that is recorded as running, and has ended while no dispatcher was there, counts once its end is known.
    for row in reader.rows("SELECT * FROM attempts WHERE state = 'running'"):
        for uuid in json.loads(row["gpus"]):
            gpus[uuid].running_s += ran_s(row) or 0.0
    return dict(gpus), dict(by_state)


# --- gpu_metrics.json ---------------------------------------------------------------------------------------------

# By the attempts of a job in their order.
_TURNAROUNDS = """
SELECT max(0.0, ended_at - ready_at) FROM (
    SELECT state, ended_at, first_value(started_at - wait_s) OVER (PARTITION BY job ORDER BY number) AS ready_at,
        row_number() OVER (PARTITION BY job ORDER BY number DESC) AS from_last
    FROM attempts)
WHERE from_last = 1 AND state = 'done' AND ended_at IS NOT NULL ORDER BY 1
"""
_RETRIES = """
SELECT coalesce(class_before, 'unknown'), count(*) FROM (
    SELECT lag(state) OVER by_number AS state_before, lag(class) OVER by_number AS class_before
    FROM attempts WINDOW by_number AS (PARTITION BY job ORDER BY number))
WHERE state_before = 'failed' GROUP BY 1
"""


def gpu_metrics(
    run: RunDirectory, reader: QueueReader, runs: Sequence[tuple[float, float]], now: float
) -> dict[str, Any]:
    """The contents of gpu_metrics.json, ready for JSON. A figure that is not known is None.

    Args:
        runs: wall-clock start and end of each dispatcher's run.
        now: wall-clock second, for the time stamp.
    """
    metrics = read_metrics(run, reader)
    counts, gpus = metrics.status.counts, metrics.gpus
    waits = _distribution(reader, "SELECT total(wait_s) FROM attempts GROUP BY job ORDER BY 1")
    failed = {failure or "unknown": n for (state, failure), n in metrics.ended.items() if state == "failed"}
    runtime_s, ended = sum(end - start for start, end in runs), counts.done + counts.failed
    busy_s = _busy_s(reader, gpus)
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
        "total_runtime": round(runtime_s, 3),
        "runs": len(runs),
        "total_wait_time": round(sum(waits.ordered), 3),
        "avg_wait_time": round(sum(waits.ordered) / len(waits.ordered), 3) if waits.ordered else None,
        "max_wait_time": round(waits.ordered[-1], 3) if waits.ordered else None,
        "attempts": sum(metrics.ended.values()) + reader.value("SELECT count(*) FROM attempts WHERE state = 'running'"),
        "failed_attempts": sum(failed.values()),
        "failed_attempts_by_class": failed,
        "retries_by_class": {row[0]: row[1] for row in reader.rows(_RETRIES)},
        "job_run_time": metrics.run.summary(),
        "job_wait_time": waits.summary(),
        "job_turnaround": _distribution(reader, _TURNAROUNDS).summary(),
        "gpu_hours": round(sum(busy_s.values()) / 3600, 6),
        "gpu_hours_by_outcome": {state: round(s / 3600, 6) for state, s in metrics.gpu_s_by_state.items()},
        "gpus": {
            label: {
                "uuid": uuid,
                "attempts": gpus[uuid].attempts,
                "busy_seconds": round(busy_s[uuid], 3),
                # A GPU of another machine works while no dispatcher runs: a share of our time would mean nothing.
                "busy_share": round(min(1.0, busy_s[uuid] / runtime_s), 4)
                if runtime_s > 0 and not gpus[uuid].remote
                else None,
            }
            for label, uuid in _by_label(gpus)
        },
        "attempts_by_engine": _counter(reader, "engine"),
        "attempts_by_node": _counter(reader, "node"),
    }


def _counter(reader: QueueReader, column: str) -> dict[str, int]:
    query = f"SELECT {column}, count(*) FROM attempts WHERE {column} IS NOT NULL GROUP BY 1 ORDER BY min(id)"  # noqa: S608
    return {row[0]: row[1] for row in reader.rows(query)}


def _busy_s(reader: QueueReader, gpus: Mapping[str, GpuMetrics]) -> dict[str, float]:
    """Seconds in which at least one ended attempt ran, by GPU. Attempts that shared one at a time count once."""
    busy_s = {uuid: gpu.ended_s for uuid, gpu in gpus.items()}
    # Wall-clock times are used only where jobs shared a GPU: that clock may have been set meanwhile.
    spans: dict[str, list[tuple[float, float]]] = {uuid: [] for uuid, gpu in gpus.items() if gpu.shared}
    if spans:
        query = f"SELECT gpus, started_at, {_RUN_S} AS s FROM attempts WHERE ended_mono IS NOT NULL"  # noqa: S608
        for row in reader.each(query):
            for uuid in json.loads(row["gpus"]):
                if uuid in spans:
                    spans[uuid].append((row["started_at"], row["s"]))
    return busy_s | {uuid: _covered(of) for uuid, of in spans.items()}


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that spans of (start, length) cover together."""
    covered, until = 0.0, float("-inf")
    for start, length in sorted(spans):
        covered += max(0.0, start + length - max(start, until))
        until = max(until, start + length)
    return covered


def _by_label(gpus: Mapping[str, GpuMetrics]) -> list[tuple[str, str]]:
    """Labels and UUIDs, 2 before 10. A GPU whose label is another's by now (it was replaced) stands under its UUID."""
    latest = {gpu.label: uuid for uuid, gpu in gpus.items()}
    named = [(gpu.label if latest[gpu.label] == uuid else uuid, uuid) for uuid, gpu in gpus.items()]
    return sorted(named, key=lambda each: (len(each[0]), each[0]))


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
