"""A run's attempts in the ledger: what it says agrees with the queue, also where several share a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gpuherd.jobs import GpuOptions, Job, RunDirectory, run_jobs
from gpuherd.jobs.gpu.recording import AttemptLedger
from gpuherd.jobs.gpu.watch import GpuWatch
from gpuherd.jobs.monitor.status import opened
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.queue.store import Queue
from gpuherd.ledger.files import logs_in
from gpuherd.ledger.reader import Ledger, believed
from gpuherd.ledger.records import Kind, Use, line_of
from gpuherd.standin.machine import SimulatedMachine

FAST = GpuOptions(max_checks=2, check_interval=0.02)


def ledger() -> Ledger:
    found = Ledger.existing()
    assert found is not None
    return found


def uses(kind: Kind | None = None) -> list[Use]:
    records = believed(ledger().read(), os.geteuid())
    return [record.use for record in records if kind in (None, record.use.kind)]


def held_by_queue(run: RunDirectory) -> dict[int, float]:
    """By attempt, seconds times GPUs."""
    with opened(run) as reader:
        rows = reader.rows("SELECT id, gpus, ended_mono - started_mono AS s FROM attempts WHERE gpus <> '[]'")
    return {row["id"]: row["s"] * row["gpus"].count("GPU-") for row in rows}


def held_by_ledger() -> dict[int, float]:
    found: dict[int, float] = defaultdict(float)
    for use in uses(Kind.JOB):
        found[int(use.id.split("/")[1])] += use.held_s
    return found


def test_two_hundred_fast_jobs_and_strangers_add_up(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    machine = standin("5x40GB", attribute=True)
    stranger = subprocess.Popen(["sleep", "100"])
    machine.occupy(4, 9_000, pid=stranger.pid)
    machine.set_utilisation(4, 50)
    began = time.time()
    try:
        run = RunDirectory(tmp_path / "a-study")
        jobs = [Job(name=f"j{i}", argv=("true",), gpus=1 + i % 2) for i in range(200)]
        assert run_jobs(jobs, FAST, run).complete
    finally:
        stranger.kill()
        stranger.wait()
    ended = time.time()
    theirs = held_by_queue(run)
    ours = held_by_ledger()
    assert len(theirs) == 200
    assert ours.keys() == theirs.keys()
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=0.01)
    for attempt, seconds in theirs.items():
        assert ours[attempt] == pytest.approx(seconds, abs=0.003)
    of_jobs = uses(Kind.JOB)
    assert {use.project for use in of_jobs} == {"a-study"}
    assert {use.command for use in of_jobs} == {"true"}
    assert {use.uid for use in of_jobs} == {os.geteuid()}
    # No GPU's hours exceed the clock.
    by_gpu: dict[str, float] = defaultdict(float)
    for use in uses():
        by_gpu[use.gpu] += use.held_s
    assert max(by_gpu.values()) <= ended - began
    assert len(logs_in(ledger().folder)) == 1


def test_jobs_that_share_a_gpu_have_parts_of_it(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    standin("1x40GB", attribute=True)
    run = RunDirectory(tmp_path / "run")
    jobs = [
        Job(name=f"j{i}", argv=("sleep", str(0.2 + 0.1 * i)), memory_mb=5_000, share=True, project=f"p{i % 2}")
        for i in range(6)
    ]
    options = DispatchOptions(max_checks=2, check_interval=0.02, share=True)
    assert run_jobs(jobs, options, run).complete
    found = uses(Kind.JOB)
    with opened(run) as reader:
        rows = reader.rows("SELECT started_mono AS b, ended_mono AS e FROM attempts")
    ends = sorted((row["b"], row["e"]) for row in rows)
    assert any(later < end for (_, end), (later, _) in pairwise(ends)), "none ran beside another"
    covered, until = 0.0, 0.0
    for begin, end in ends:
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    assert sum(use.held_s for use in found) == pytest.approx(covered, rel=0.01)
    assert {use.project for use in found} == {"p0", "p1"}


def test_a_long_job_is_measured_and_seen_while_it_runs(
    standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    machine = standin("1x40GB", attribute=True)
    machine.set_utilisation(0, 50)
    machine.set_power(0, 200)
    run = RunDirectory(tmp_path / "run")
    seen: list[Use] = []
    script = "import time; time.sleep(4.6)"
    look = Job(name="long", argv=(sys.executable, "-S", "-c", script), project="theory")

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            found = Ledger.existing()
            seen.extend(record.use for record in (found.open_uses() if found else ()))
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    assert run_jobs([look], FAST, run).complete
    thread.join()
    (use,) = uses(Kind.JOB)
    assert use.project == "theory"
    assert use.job == "long"
    assert use.computing_s == pytest.approx(use.held_s / 2, rel=0.02)
    assert use.energy_j == pytest.approx(use.held_s * 200, rel=0.02)
    assert seen
    assert seen[0].id == use.id
    assert seen[0].held_s < use.held_s
    assert ledger().open_uses() == ()


def test_what_the_ledger_lacks_is_appended_at_the_next_start(
    standin: Callable[..., SimulatedMachine], tmp_path: Path
) -> None:
    standin("2x40GB")
    run = RunDirectory(tmp_path / "run")
    jobs = [Job(name=f"j{i}", argv=("true",)) for i in range(5)]
    run_jobs(jobs, FAST, run)
    before = {use.id: use.held_s for use in uses()}
    (log,) = logs_in(ledger().folder)
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:2]))
    jobs.append(Job(name="one-more", argv=("true",)))
    run_jobs(jobs, FAST, run)
    after = {use.id: use.held_s for use in uses()}
    assert len(after) == 6
    for name, held_s in before.items():
        assert after[name] == pytest.approx(held_s, abs=0.003)
    # And not again.
    size = log.path.stat().st_size
    run_jobs(jobs, FAST, run)
    assert log.path.stat().st_size == size


def test_to_compare_a_long_queue_takes_milliseconds(standin: Callable[..., SimulatedMachine], tmp_path: Path) -> None:
    standin("1x40GB")
    run = RunDirectory(tmp_path / "run")
    run_jobs([Job(name="a", argv=("true",))], FAST, run)
    with closing(Queue(run.queue)) as queue:
        queue._db.execute(
            "WITH RECURSIVE n (i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)"
            " INSERT INTO attempts (id, job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
            " started_at, started_mono, ended_at, ended_mono)"
            " SELECT i, job, i, run, 'done', gpus, labels, pid, start_ticks, boot, log, 0,"
            " started_at, started_mono, ended_at, ended_mono FROM attempts, n WHERE id = 1"
        )
        (log,) = logs_in(ledger().folder)
        one = uses()[0]
        tag = one.id.split("/")[0]
        with log.path.open("ab") as file:
            file.write(b"".join(line_of(replace(one, id=f"{tag}/{i}/0")) for i in range(98_000, 100_001)))
        recording = AttemptLedger(queue.tag, run.root, GpuWatch(FAST, queue.tag, at_once=False))
        taken = []
        for _ in range(5):
            began = time.process_time()
            assert recording.catch_up(queue) == 0
            taken.append(time.process_time() - began)
        recording.close()
    assert min(taken) < 0.05
