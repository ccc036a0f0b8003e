"""The figures of a queue that can be read often: sums that SQLite makes, however many attempts there were.

For Prometheus, which asks every few seconds. ``metrics`` tells more, from every single attempt, once at the end.
Seconds everywhere; what runs still counts up to now.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuherd.jobs import clock
from gpuherd.jobs.reader import QueueReader
from gpuherd.jobs.records import AttemptState, Counts
from gpuherd.jobs.rows import process_of
from gpuherd.jobs.rundir import RunDirectory
from gpuherd.jobs.runstatus import Page
from gpuherd.jobs.status import status_of
from gpuherd.jobs.whereabouts import InEngine

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
    gpus, gpu_s = _gpus(reader)
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


def _gpus(reader: QueueReader) -> tuple[dict[str, GpuFigures], dict[str, float]]:
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
