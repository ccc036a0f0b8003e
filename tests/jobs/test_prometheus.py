"""Metrics as a scraper gets them, from a queue whose figures are known."""

from __future__ import annotations

import http.client
import os
import re
import socket
import sqlite3
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from gpuherd.engines.process_tree import ProcessId, identify
from gpuherd.errors import UsageError
from gpuherd.jobs import GpuOptions, Job, Queue, RunDirectory, clock, run_jobs
from gpuherd.jobs.monitor.metrics import GpuMetrics, Metrics, read_metrics
from gpuherd.jobs.monitor.prometheus import MetricsServer, exposition
from gpuherd.jobs.monitor.status import RunStatus, opened
from gpuherd.jobs.records import Counts

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (\S+)')


def samples(text: str) -> dict[tuple[str, str], float]:
    """Every sample, with the text checked against the format line by line."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP gpuherd_[a-z_]+ .+|TYPE gpuherd_[a-z_]+ (gauge|counter|summary))", line)
            continue
        told = SAMPLE.fullmatch(line)
        assert told is not None, line
        labels = sorted((told[2] or "").split(","))  # their order means nothing
        found[told[1], ",".join(labels)] = float(told[3])
    return found


def get(address: str) -> tuple[int, str, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, "", problem.read().decode()


def test_a_run_as_it_is_scraped(tmp_path: Path) -> None:
    jobs = [Job(name=f"j{i}", argv=("true",), gpus=0) for i in range(3)]
    bad = Job(name="bad", argv=("sh", "-c", "exit 65"), gpus=0)
    run = RunDirectory(tmp_path)
    run_jobs([*jobs, bad], GpuOptions(cpu_jobs=2), run)
    with MetricsServer(run, 0) as server:
        status, kind, text = get(f"http://127.0.0.1:{server.port}/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        found = samples(text)
        assert get(f"http://127.0.0.1:{server.port}/")[0] == 200
        assert get(f"http://127.0.0.1:{server.port}/secret")[0] == 404
        with pytest.raises(UsageError, match="choose another"):
            MetricsServer(run, server.port)
    assert found["gpuherd_jobs", 'state="done"'] == 3
    assert found["gpuherd_jobs", 'state="failed"'] == 1
    assert found["gpuherd_dispatcher_up", ""] == 0
    assert found["gpuherd_attempts_total", 'class="",outcome="done"'] == 3
    assert found["gpuherd_attempts_total", 'class="bad input",outcome="failed"'] == 1
    assert found["gpuherd_job_run_seconds_count", ""] == 3
    assert (
        0 <= found["gpuherd_job_run_seconds", 'quantile="0.5"'] <= found["gpuherd_job_run_seconds", 'quantile="0.99"']
    )


def test_gpus_and_outcomes(tmp_path: Path) -> None:
    """Two attempts on two GPUs, 10 s and 20 s, and one on one of them that failed after 5 s."""
    run = RunDirectory(tmp_path)
    run.create()
    queue = Queue(run.queue)
    queue.submit([Job(name=name, argv=("true",)) for name in "abc"])
    queue.begin_run(0.0, 0.0)
    queue.close()
    with sqlite3.connect(run.queue) as db:
        for job, gpus, labels, state, length in (
            (1, '["U0","U1"]', '["0","1"]', "done", 10),
            (2, '["U0","U1"]', '["0","1"]', "done", 20),
            (3, '["U1"]', '["1"]', "failed", 5),
        ):
            db.execute(
                "INSERT INTO attempts (job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
                " started_at, started_mono, ended_mono, class) VALUES (?,1,1,?,?,?,1,1,'b','l',?,0,100,?,?)",
                (job, state, gpus, labels, float(job), 100 + length, "crash" if state == "failed" else None),
            )
    db.close()
    with MetricsServer(run, 0) as server:
        found = samples(get(f"http://127.0.0.1:{server.port}/metrics")[2])
    assert found["gpuherd_gpu_busy_seconds_total", 'gpu="0",uuid="U0"'] == 30
    assert found["gpuherd_gpu_busy_seconds_total", 'gpu="1",uuid="U1"'] == 35
    assert found["gpuherd_gpu_attempts_total", 'gpu="1",uuid="U1"'] == 3
    assert found["gpuherd_gpu_held_seconds_total", 'outcome="done"'] == 60
    assert found["gpuherd_gpu_held_seconds_total", 'outcome="failed"'] == 5
    assert found["gpuherd_job_wait_seconds", 'quantile="0.5"'] == 2
    assert found["gpuherd_job_wait_seconds_sum", ""] == 6


def test_labels_are_escaped() -> None:
    status = RunStatus(
        folder=Path('a "folder"\n\udcff'),
        at=0.0,
        counts=Counts(),
        paused=0,
        dispatcher=None,
        jobs=(),
        matching=0,
        eta_s=1.5,
    )
    gpus = {'U"\\\n': GpuMetrics(label="0:1", running_s=1.0, attempts=1, running=1)}
    text = exposition(Metrics(status=status, gpus=gpus))
    found = samples(text)
    assert found["gpuherd_gpu_running_jobs", 'gpu="0:1",uuid="U\\"\\\\\\n"'] == 1
    assert 'queue="a \\"folder\\"\\n' in text
    text.encode()


def test_a_queue_that_is_gone_is_told_to_the_scraper(tmp_path: Path) -> None:
    with MetricsServer(RunDirectory(tmp_path / "none"), 0) as server:
        status, _, text = get(f"http://127.0.0.1:{server.port}/metrics")
    assert status == 503 and "no queue" in text


def insert(run: RunDirectory, state: str, started_mono: float, ended_mono: float | None, process: ProcessId) -> None:
    """An attempt of job 1 on GPU U0."""
    with sqlite3.connect(run.queue) as db:
        db.execute(
            "INSERT INTO attempts (job, number, run, state, gpus, labels, pid, start_ticks, boot, log, wait_s,"
            " started_at, started_mono, ended_mono) VALUES (1,1,1,?,'[\"U0\"]','[\"0\"]',?,?,?,'l',0,0,?,?)",
            (state, process.pid, process.start_ticks, process.boot, started_mono, ended_mono),
        )
    db.close()


@pytest.fixture
def queued(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.create()
    with Queue(run.queue) as queue:
        queue.submit([Job(name="a", argv=("true",))])
        queue.begin_run(0.0, 0.0)
    return run


def test_a_counter_never_goes_down(queued: RunDirectory) -> None:
    """A job counts while it runs; when it has ended, its end is recorded a moment before the last scrape."""
    me = identify(os.getpid())
    assert me is not None
    insert(queued, "running", clock.mono() - 100, None, me)
    with MetricsServer(queued, 0) as server:
        address = f"http://127.0.0.1:{server.port}/metrics"
        before = samples(get(address)[2])
        with sqlite3.connect(queued.queue) as db:
            db.execute("UPDATE attempts SET state = 'done', ended_mono = started_mono + 99")
        db.close()
        after = samples(get(address)[2])
    busy = "gpuherd_gpu_busy_seconds_total", 'gpu="0",uuid="U0"'
    assert 100 <= before[busy] <= after[busy]
    counters = {key for key in before if key[0].endswith(("_total", "_count", "_sum"))}
    assert all(before[key] <= after[key] for key in counters), "none is there that may go down"
    assert after["gpuherd_gpu_held_seconds_total", 'outcome="done"'] == pytest.approx(99)


@pytest.mark.parametrize("boot", ["another", None])
def test_a_job_that_ended_while_nobody_looked_counts_when_its_end_is_known(
    queued: RunDirectory, boot: str | None
) -> None:
    me = identify(os.getpid())
    assert me is not None
    dead = replace(me, boot=boot) if boot else replace(me, start_ticks=me.start_ticks + 1)
    insert(queued, "running", 0.0, None, dead)
    with opened(queued) as reader:
        assert read_metrics(queued, reader).gpus["U0"].busy_s == 0


def test_slow_clients_shut_nobody_out_and_cost_little(queued: RunDirectory) -> None:
    with MetricsServer(queued, 0) as server, ExitStack() as stack:
        for _ in range(200):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            slow.sendall(b"GET /metr")
        assert get(f"http://127.0.0.1:{server.port}/metrics")[0] == 200
        # Most are cut off by then; those that are not are the last.
        assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) < 40


def test_other_methods(queued: RunDirectory) -> None:
    with MetricsServer(queued, 0) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        told = []
        for method, path in (("HEAD", "/metrics"), ("POST", "/metrics"), ("GET", "/metrics?x=1"), ("GET", "/x")):
            connection.request(method, path)
            answer = connection.getresponse()
            told.append((answer.status, bool(answer.read())))
            connection.close()
    assert told == [(200, False), (501, True), (200, True), (404, True)]
