"""What a job costs on Ray: the same commands as plain Ray tasks and as jobs of gpuherd, on one cluster, in one run.

The cluster has two nodes on this machine with 4 GPUs each that are only counted. A plain task runs its command by
``subprocess.run`` and does nothing else: once with Ray's defaults, by which a task with GPUs gets a process of its own,
and once in workers that are used again (``max_calls=0``), which is only right where no task touches a GPU itself. Ours
is measured twice: the engine alone with a batch (claims, limits, logs, reports and a guardian for each job), and
``run_jobs`` with its queue, which follows them. All take turns, so that what else goes on here meets them alike.

A job's overhead is what it holds a GPU longer than its command takes.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gpuherd.engines.base import Batch, End, Parcel, Phase, Placement, Ticket
from gpuherd.engines.options import EngineOptions
from gpuherd.engines.ray.engine import RayEngine
from gpuherd.jobs import Job, RunDirectory, run_jobs
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.remote.agent import join, lead
from gpuherd.jobs.remote.protocol import Manifest, Order, portable, to_json

PLACES = 8
_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 4, "num_gpus": 4, "object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
_PLAIN = """
import json, subprocess, sys, time
import ray
address, argv, count, more = json.loads(sys.argv[1])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
@ray.remote(num_gpus=1, max_retries=0, **more)
def run(argv):
    return subprocess.run(argv).returncode
ray.get([run.remote(argv) for _ in range(8)])
began = time.monotonic()
codes = ray.get([run.remote(argv) for _ in range(count)])
print("took", time.monotonic() - began)
sys.exit(any(codes))
"""


def run(*, quick: bool) -> dict[str, Any]:
    """All figures. Seconds of a whole run, milliseconds of overhead a job, and ratios of these."""
    jobs, rounds = (24, 1) if quick else (160, 3)
    figures = {}
    with _cluster() as (address, folder):
        for seconds in (0.0, 1.0):
            figures[f"jobs_of_{seconds:g}_s"] = _side_by_side(address, folder, seconds, jobs, rounds)
    return {"places": PLACES, "jobs": jobs, "rounds": rounds, **figures}


def _side_by_side(address: str, folder: Path, seconds: float, jobs: int, rounds: int) -> dict[str, Any]:
    argv = ["sleep", f"{seconds:g}"]
    ways: dict[str, Callable[[Path], float]] = {
        "ray_default": lambda _: _plain(address, argv, jobs, {}),
        "ray_reused_workers": lambda _: _plain(address, argv, jobs, {"max_calls": 0}),
        "gpuherd_engine": lambda place: _engine(address, argv, jobs, place),
        "gpuherd_run": lambda place: _run(address, argv, jobs, place),
    }
    walls: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            place = folder / f"{name}-{seconds:g}-{number}"
            place.mkdir()
            walls[name].append(way(place))
    wall_s = {name: statistics.median(found) for name, found in walls.items()}
    overhead_ms = {name: 1000 * (wall * PLACES / jobs - seconds) for name, wall in wall_s.items()}
    pairs = [
        (ours, plain) for ours in ("gpuherd_engine", "gpuherd_run") for plain in ("ray_default", "ray_reused_workers")
    ]
    return {
        "wall_s": wall_s,
        "overhead_ms_a_job": overhead_ms,
        "overhead_ratio": {f"{a}_to_{b}": overhead_ms[a] / overhead_ms[b] for a, b in pairs},
        "wall_ratio": {
            f"{a}_to_{b}": statistics.median(x / y for x, y in zip(walls[a], walls[b], strict=True)) for a, b in pairs
        },
    }


@contextmanager
def _cluster() -> Iterator[tuple[str, Path]]:
    """A cluster's address, and a folder. Ray's sockets lie in it, and a socket's path must be short."""
    folder = Path(tempfile.mkdtemp(prefix="gpuherd-bench-", dir="/tmp"))
    kept = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    words = [sys.executable, "-c", _CLUSTER]
    environment = {**os.environ, "RAY_TMPDIR": str(folder)}
    try:
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            yield process.stdout.readline().strip(), folder
            process.stdin.close()
    finally:
        os.environ.clear()
        os.environ.update(kept)
        shutil.rmtree(folder, ignore_errors=True)


def _plain(address: str, argv: list[str], jobs: int, more: dict[str, int]) -> float:
    words = [sys.executable, "-c", _PLAIN, json.dumps([address, argv, jobs, more])]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=900)
    return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("took ")))


def _engine(address: str, argv: list[str], jobs: int, place: Path) -> float:
    engine = RayEngine(EngineOptions(engine="ray", ray_address=address), lead, join)
    try:
        _batch(engine, argv, PLACES, place / "first")
        began = time.monotonic()
        _batch(engine, argv, jobs, place / "jobs")
        return time.monotonic() - began
    finally:
        engine.close()


def _batch(engine: RayEngine, argv: list[str], jobs: int, place: Path) -> None:
    """Hands them over and waits for them."""
    place.mkdir()
    name = f"b-{secrets.token_hex(4)}"
    orders = tuple(
        Order(
            attempt=number,
            tag=f"{name}/{number}",
            job=Job(name=f"{number}", argv=tuple(argv)),
            log=str(place / f"{number}.log"),
            progress=str(place / f"{number}.progress"),
            claim=str(place / f"{number}.claim"),
            ended=str(place / f"{number}.ended"),
            gpus=1,
        )
        for number in range(jobs)
    )
    manifest = place / "manifest.json"
    manifest.write_text(to_json(Manifest(batch=name, engine="ray", environment=portable(os.environ), orders=orders)))
    parcels = tuple(Parcel(attempt=number, title=f"job {number}") for number in range(jobs))
    engine.submit(
        Batch(name=name, placement=Placement(gpus=1), parcels=parcels, command=(str(manifest),), folder=place)
    )
    tickets = [Ticket(number, name, number) for number in range(jobs)]
    while tickets:
        seen = engine.look(tickets)
        ended = {attempt: each for attempt, each in seen.items() if each.phase is Phase.ENDED}
        if any(each.end is not End.OK for each in ended.values()):
            raise SystemExit(f"a job did not succeed: {next(iter(ended.values()))}")
        tickets = [each for each in tickets if each.attempt not in ended]
        time.sleep(0.02)


def _run(address: str, argv: list[str], jobs: int, place: Path) -> float:
    """From the first start in a used worker to the last end, by the queue: what comes before is told of nobody else."""
    plan = [Job(name=f"job-{number}", argv=tuple(argv), gpus=1) for number in range(jobs + PLACES)]
    outcome = run_jobs(plan, DispatchOptions(engine="ray", ray_address=address), RunDirectory(place))
    if outcome.exit_code != 0:
        raise SystemExit("a job did not succeed")
    with closing(sqlite3.connect(place / "queue.sqlite")) as queue:
        spans = queue.execute("SELECT started_at, ended_at FROM attempts ORDER BY started_at").fetchall()
    return float(max(ended for _, ended in spans) - spans[PLACES][0])
