"""The figures of gpu_metrics.json from known attempts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.attempts import attempt_of

from gpuherd.engines.local.process import Exit
from gpuherd.jobs import DispatchOptions, Job, Queue, RunDirectory, run_jobs
from gpuherd.jobs.attempts.supervise import lost
from gpuherd.jobs.monitor.metrics import Durations, gpu_metrics
from gpuherd.jobs.monitor.status import opened
from gpuherd.jobs.records import QueuedJob
from gpuherd.standin.machine import SimulatedMachine


@dataclass(frozen=True)
class Row:
    """An attempt of a queue that is made up. ``run_s`` is None for one without an end."""

    job: str
    state: str
    gpus: str
    wait_s: float
    run_s: float | None
    number: int = 1
    uuids: tuple[str, ...] = ()
    started_at: float = 0.0
    shared_mb: int | None = None

    def write(self, db: sqlite3.Connection) -> None:
        labels = list(filter(None, self.gpus.split(",")))
        uuids = self.uuids or [f"GPU-{label}" for label in labels]
        ended = (None, None) if self.run_s is None else (self.started_at + self.run_s, 1.0 + self.run_s)
        db.execute(
            "INSERT INTO attempts (job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
            " started_at, started_mono, ended_at, ended_mono, class, shared_mb)"
            " VALUES ((SELECT id FROM jobs WHERE name = ?), ?, 1, ?, ?, ?, 1, 1, 'b', 'l', ?, ?, 1, ?, ?, ?, ?)",
            (
                self.job,
                self.number,
                self.state,
                json.dumps(list(uuids)),
                json.dumps(labels),
                self.wait_s,
                self.started_at,
                *ended,
                "crash" if self.state == "failed" else None,
                self.shared_mb,
            ),
        )


@pytest.fixture
def figures(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """gpu_metrics.json of a queue with these jobs, by state, and these attempts."""

    def figures_of(
        jobs: Mapping[str, str], attempts: Sequence[Row], runs: Sequence[tuple[float, float]], now: float
    ) -> dict[str, Any]:
        run = RunDirectory(tmp_path)
        run.create()
        with Queue(run.queue) as queue:
            queue.submit([Job(name=name, argv=("true",)) for name in jobs])
            queue.begin_run(0.0, 0.0)
        with closing(sqlite3.connect(run.queue)) as db, db:
            for name, state in jobs.items():
                db.execute("UPDATE jobs SET state = ? WHERE name = ?", (state, name))
            for attempt in attempts:
                attempt.write(db)
        with opened(run) as reader:
            return gpu_metrics(run, reader, runs, now)

    return figures_of


Figures = Callable[..., dict[str, Any]]


def test_the_figures(figures: Figures) -> None:
    attempts = [
        Row("a", "failed", "0", 2.0, 10.0),
        Row("a", "done", "1", 1.0, 20.0, 2),
        Row("b", "done", "0,1", 6.0, 30.0),
        Row("c", "requeued", "0", 0.0, None),
    ]
    jobs = {"a": "done", "b": "done", "c": "waiting", "d": "failed"}
    got = figures(jobs, attempts, [(1000.0, 1050.0), (2000.0, 2050.0)], 3000.0)
    assert (got["total_jobs"], got["successful_jobs"], got["failed_jobs"]) == (4, 2, 1)
    assert got["success_rate"] == 2 / 3
    assert got["failure_rate"] == 1 / 3
    assert (got["total_wait_time"], got["avg_wait_time"], got["max_wait_time"]) == (9.0, 3.0, 6.0)
    assert (got["total_runtime"], got["runs"]) == (100.0, 2)
    assert got["failed_attempts_by_class"] == {"crash": 1}
    times = {"mean": 25.0, "median": 25.0, "min": 20.0, "max": 30.0, "p90": 30.0, "p95": 30.0, "p99": 30.0}
    assert got["job_run_time"] == times
    assert got["job_wait_time"]["median"] == 3.0 and got["job_wait_time"]["p95"] == 6.0
    # From when a could first run, 2 s before its first attempt at 0, to its end at 20; b likewise.
    assert got["job_turnaround"]["min"] == 22.0 and got["job_turnaround"]["max"] == 36.0
    assert got["retries_by_class"] == {"crash": 1}
    assert got["gpu_hours_by_outcome"] == {"failed": 0.002778, "done": 0.022222, "requeued": 0.0}
    assert got["gpus"]["0"] == {"uuid": "GPU-0", "attempts": 3, "busy_seconds": 40.0, "busy_share": 0.4}
    assert got["gpus"]["1"]["busy_share"] == 0.5
    assert got["gpu_hours"] == 0.025
    assert (got["start_time"], got["timestamp"]) == ("1970-01-01T00:16:40+00:00", "1970-01-01T00:50:00+00:00")
    json.dumps(got)


def test_a_run_without_jobs_has_no_figures_rather_than_noughts(figures: Figures) -> None:
    got = figures({}, [], [], 0.0)
    assert got["success_rate"] is got["avg_wait_time"] is got["job_run_time"] is got["start_time"] is None


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [Durations(values).quantile(p) for p in (1, 50, 90, 99, 100)] == [1.0, 50.0, 90.0, 99.0, 100.0]
    assert Durations([7.0]).quantile(1) == Durations([7.0]).quantile(99) == 7.0


def test_a_requeue_is_no_retry_and_an_unfinished_job_has_no_turnaround(figures: Figures) -> None:
    attempts = [Row("a", "requeued", "0", 0.0, 1.0), Row("a", "failed", "0", 0.0, 1.0, 2)]
    got = figures({"a": "failed"}, attempts, [(0.0, 10.0)], 10.0)
    assert (got["retries_by_class"], got["job_turnaround"]) == ({}, None)


def test_a_shared_gpu_is_busy_once(figures: Figures) -> None:
    def shared(job: str, start: float, run_s: float) -> Row:
        return Row(job, "done", "0", 0.0, run_s, started_at=start, shared_mb=1000)

    attempts = [shared("a", 0.0, 10.0), shared("b", 5.0, 2.0), shared("c", 8.0, 12.0), shared("d", 30.0, 5.0)]
    got = figures(dict.fromkeys("abcd", "done"), attempts, [(0.0, 50.0)], 50.0)
    assert got["gpus"]["0"]["busy_seconds"] == 25.0
    assert got["gpu_hours"] == round(25 / 3600, 6)


def test_gpus_that_had_one_label_after_another(figures: Figures) -> None:
    """A GPU was replaced: what was done on the old one is not lost."""
    old, new = Row("a", "done", "0", 0.0, 10.0), Row("b", "done", "0", 0.0, 20.0, uuids=("GPU-new",))
    other = Row("c", "done", "10", 0.0, 1.0), Row("d", "done", "2", 0.0, 1.0)
    got = figures(dict.fromkeys("abcd", "done"), [old, new, *other], [(0.0, 100.0)], 100.0)
    assert [(label, gpu["uuid"]) for label, gpu in got["gpus"].items()] == [
        ("0", "GPU-new"),
        ("2", "GPU-2"),
        ("10", "GPU-10"),
        ("GPU-0", "GPU-0"),
    ]
    assert sum(gpu["busy_seconds"] for gpu in got["gpus"].values()) == 32.0


def test_a_run_that_was_killed_ends_before_the_next_begins(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    with Queue(run.queue) as queue:
        queue.submit([Job(name="a", argv=("true",))])
        queue.begin_run(1000.0, 0.0)  # killed at once
        queue.begin_run(5000.0, 4000.0)
        with sqlite3.connect(run.queue) as db:  # its job, as the second recorded its end
            db.execute(
                "INSERT INTO attempts (job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
                " started_at, started_mono, ended_at, ended_mono)"
                " VALUES (1, 1, 1, 'done', '[]', '[]', 1, 1, 'b', 'l', 0, 1001, 1, 5001, 4001)"
            )
        db.close()
        assert queue.runs() == ((1000.0, 5000.0), (5000.0, 5000.0))


def test_an_end_that_nobody_saw_is_dated_back_to_when_it_was() -> None:
    """By the job's status file: hours without a dispatcher are not the job's."""
    queued = QueuedJob(1, Job(name="a", argv=("true",)), 0, 1, 0.0, frozenset(), 0.0)
    record = attempt_of(queued, 1, started_at=1000.0, started_mono=50.0)
    end = lost(record, Exit(started=True, code=0, ran_s=7.0), None, now=7050.0, at=8000.0)
    assert (end.mono, end.at) == (57.0, 1007.0)


def test_the_figures_of_a_real_run_are_those_of_its_attempts(
    tmp_path: Path, standin: Callable[[str], SimulatedMachine]
) -> None:
    """Retries, several GPUs a job, sharing; each figure once more, from the table alone."""
    standin("2x40GB")
    jobs = [
        Job(name="both", argv=("sleep", "0.5"), gpus=2),
        Job(name="twice", argv=("sh", "-c", f"[ -e {tmp_path}/x ] || {{ touch {tmp_path}/x; exit 1; }}"), retries=1),
        *(Job(name=f"s{i}", argv=("sleep", "0.4"), memory_mb=9_000, share=True) for i in range(4)),
        Job(name="bad", argv=("sh", "-c", "exit 65")),
    ]
    options = DispatchOptions(max_checks=1, check_interval=0.02, share=True)
    run = RunDirectory(tmp_path / "run")
    run_jobs(jobs, options, run)
    got = json.loads(run.gpu_metrics.read_text())
    with closing(sqlite3.connect(run.queue)) as db:
        rows = db.execute(
            "SELECT j.name, a.state, a.gpus, a.wait_s, a.started_at, a.ended_at, a.ended_mono - a.started_mono, a.class"
            " FROM attempts a JOIN jobs j ON j.id = a.job ORDER BY a.id"
        ).fetchall()
        ((began, ended),) = db.execute("SELECT started_at, ended_at FROM runs").fetchall()
    assert (got["successful_jobs"], got["failed_jobs"], got["attempts"]) == (6, 1, len(rows)) == (6, 1, 8)
    assert got["retries_by_class"] == {"crash": 1}
    assert got["failed_attempts_by_class"] == {"crash": 1, "bad input": 1}
    waits = [sum(row[3] for row in rows if row[0] == job.name) for job in jobs]
    assert got["total_wait_time"] == pytest.approx(sum(waits), abs=0.002)
    assert got["max_wait_time"] == pytest.approx(max(waits), abs=0.002)
    turnarounds = [
        max(row[5] for row in rows if row[0] == job.name) - min(row[4] - row[3] for row in rows if row[0] == job.name)
        for job in jobs[:-1]
    ]
    assert got["job_turnaround"]["max"] == pytest.approx(max(turnarounds), abs=0.002)
    assert got["job_turnaround"]["mean"] == pytest.approx(sum(turnarounds) / 6, abs=0.002)
    busy = {uuid: 0.0 for row in rows for uuid in json.loads(row[2])}
    for uuid in busy:
        marks = sorted({mark for row in rows if uuid in json.loads(row[2]) for mark in (row[4], row[4] + row[6])})
        for begin, end in pairwise(marks):
            held = any(row[4] <= begin and end <= row[4] + row[6] for row in rows if uuid in json.loads(row[2]))
            busy[uuid] += end - begin if held else 0.0
    assert {gpu["uuid"]: gpu["busy_seconds"] for gpu in got["gpus"].values()} == pytest.approx(busy, abs=0.002)
    for gpu in got["gpus"].values():
        assert gpu["busy_share"] == pytest.approx(busy[gpu["uuid"]] / (ended - began), abs=0.002)
    assert got["gpu_hours"] == pytest.approx(sum(busy.values()) / 3600, abs=1e-5)
    gpu_s = sum(len(json.loads(row[2])) * row[6] for row in rows if row[1] == "done")
    assert got["gpu_hours_by_outcome"]["done"] == pytest.approx(gpu_s / 3600, abs=1e-5)
