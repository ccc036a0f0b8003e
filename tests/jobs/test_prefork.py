"""Shells that stand by for the next jobs: real runs on the stand-in's GPUs, looked at from outside."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gpuherd.engines.process_tree import everyone
from gpuherd.gpus.leases import LeaseFolder
from gpuherd.jobs import ControlKind, DispatchOptions, Job, Queue, Request, RunDirectory, run_jobs, send
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]
FAST = {"max_checks": 1, "check_interval": 0.02}
_TICKS_A_S = os.sysconf("SC_CLK_TCK")
# Works jobs off in a process of its own: argv is the folder, and the jobs' seconds.
_DISPATCHER = """
import sys
from gpuherd.jobs import DispatchOptions, Job, RunDirectory, run_jobs
jobs = [Job(name=f"j{i}", argv=("/bin/sh", "-c", f"echo j{i} >>{sys.argv[1]}/ran; sleep {seconds}"), gpus=1)
        for i, seconds in enumerate(sys.argv[2:])]
run_jobs(jobs, DispatchOptions(max_checks=1, check_interval=0.02), RunDirectory(sys.argv[1]), grace_s=0.3)
"""


def sh(name: str, script: str, **more: object) -> Job:
    return Job(name=name, argv=("/bin/sh", "-c", script), **{"gpus": 1, **more})  # type: ignore[arg-type]


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def attempts(root: Path) -> list[sqlite3.Row]:
    """The attempts of a run in the order of their start, with the jobs' names."""
    with closing(sqlite3.connect(root / "queue.sqlite")) as database:
        database.row_factory = sqlite3.Row
        return database.execute(
            "SELECT a.*, j.name FROM attempts a JOIN jobs j ON j.id = a.job ORDER BY a.started_mono"
        ).fetchall()


def early(rows: Iterable[sqlite3.Row]) -> set[str]:
    """The jobs whose shell was there long before they were started."""
    drift_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    return {row["name"] for row in rows if row["started_mono"] + drift_s - row["start_ticks"] / _TICKS_A_S > 0.1}


def shells(root: Path) -> dict[int, str]:
    """The live processes of the run's attempts, running or standing by: pid and tag."""
    if not (root / "queue.sqlite").exists():
        return {}
    with Queue(root / "queue.sqlite", check=False) as queue:
        prefix = f"{queue.tag}/"
    return {p.process.pid: p.attempt for p in everyone() if p.attempt is not None and p.attempt.startswith(prefix)}


@contextmanager
def dispatcher(root: Path, *seconds: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", _DISPATCHER, str(root), *seconds]) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_standby(root: Path, running: str) -> dict[int, str]:
    """Waits until this job runs and another's shell stands by; returns the shells that stand by."""

    def found() -> dict[int, str]:
        if not (root / "ran").exists():
            return {}
        rows = attempts(root)
        if not rows or rows[-1]["name"] != running or rows[-1]["state"] != "running":
            return {}
        started = {str(row["id"]) for row in rows}
        return {pid: tag for pid, tag in shells(root).items() if tag.rpartition("/")[2] not in started}

    seen: dict[int, str] = {}

    def there() -> bool:
        seen.clear()
        seen.update(found())
        return bool(seen)

    wait_until(there)
    return dict(seen)


def test_short_jobs_are_started_by_shells_that_stood_by(tmp_path: Path, standin: Standin) -> None:
    standin("1x40GB")
    # What a job sees: its GPU, its own log and tag, no input; and what is held, while it runs, by whom.
    script = 'read -r line; echo "$CUDA_VISIBLE_DEVICES $GPUHERD_ATTEMPT $OMP_NUM_THREADS [$line]"; sleep 0.3'
    outcome = run_jobs([sh(f"j{i}", script) for i in range(5)], DispatchOptions(**FAST), RunDirectory(tmp_path))  # type: ignore[arg-type]
    assert outcome.done == 5
    assert early(attempts(tmp_path)) >= {"j2", "j3", "j4"}
    with Queue(tmp_path / "queue.sqlite", check=False) as queue:
        tag = queue.tag
    for row in attempts(tmp_path):
        words = Path(row["log"]).read_text().split()
        assert words[:2] == ["0", f"{tag}/{row['id']}"]
        assert words[3] == "[]"
    assert shells(tmp_path) == {}


def test_a_job_whose_shell_stood_by_holds_its_gpu_and_no_other(tmp_path: Path, standin: Standin) -> None:
    standin("2x40GB")
    with dispatcher(tmp_path, "0.2", "0.2", "0.7", "0.7", "60", "60", "1") as process:
        wait_until(lambda: (tmp_path / "ran").exists() and len((tmp_path / "ran").read_text().split()) == 6)
        kept = shells(tmp_path)
        process.kill()
        process.wait()
        # The dispatcher is dead: what is locked now, the jobs hold themselves.
        leases = LeaseFolder.default()
        rows = {row["name"]: row for row in attempts(tmp_path)}
        assert {"j4", "j5"} <= early(rows.values())
        (first,), (second,) = json.loads(rows["j4"]["gpus"]), json.loads(rows["j5"]["gpus"])
        assert first != second
        # The shell of each had both lock files open.
        assert leases.is_held(first)
        assert leases.is_held(second)
        os.killpg(rows["j4"]["pid"], signal.SIGKILL)
        wait_until(lambda: not leases.is_held(first))
        assert leases.is_held(second)
        os.killpg(rows["j5"]["pid"], signal.SIGKILL)
        wait_until(lambda: not leases.is_held(second))
        wait_until(lambda: not any(pid in kept for pid in shells(tmp_path)))


def test_what_stands_by_ends_with_a_killed_dispatcher_and_its_job_runs_once(tmp_path: Path, standin: Standin) -> None:
    standin("1x40GB")
    with dispatcher(tmp_path, "0.2", "3", "0", "0") as process:
        waiting = wait_for_standby(tmp_path, running="j1")
        process.kill()
        process.wait()
        wait_until(lambda: not waiting.keys() & shells(tmp_path).keys())
    assert (tmp_path / "ran").read_text().split() == ["j0", "j1"]
    with dispatcher(tmp_path, "0.2", "3", "0", "0") as process:
        assert process.wait(60) == 0
    assert (tmp_path / "ran").read_text().split() == ["j0", "j1", "j2", "j3"]


def test_a_shell_that_is_killed_while_it_stands_by_costs_its_job_nothing(tmp_path: Path, standin: Standin) -> None:
    standin("1x40GB")
    with dispatcher(tmp_path, "0.2", "2", "0.1", "0.1") as process:
        for pid in wait_for_standby(tmp_path, running="j1"):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(60) == 0
    assert [(row["name"], row["state"]) for row in attempts(tmp_path)] == [(f"j{i}", "done") for i in range(4)]


def test_a_job_that_is_cancelled_while_its_shell_stands_by_does_not_run(tmp_path: Path, standin: Standin) -> None:
    standin("1x40GB")
    with dispatcher(tmp_path, "0.2", "4", "0", "0") as process:
        waiting = wait_for_standby(tmp_path, running="j1")
        assert send(RunDirectory(tmp_path), Request(ControlKind.CANCEL, ("j2",)), wait_s=20).ok
        assert send(RunDirectory(tmp_path), Request(ControlKind.CANCEL, ("j3",)), wait_s=20).ok
        wait_until(lambda: not waiting.keys() & shells(tmp_path).keys())
        # Nothing of them is left where people look.
        assert not list((tmp_path / "logs").glob("j[23].*"))
        process.wait(60)
    assert (tmp_path / "ran").read_text().split() == ["j0", "j1"]


def test_a_lock_file_that_is_removed_while_a_shell_stands_by(tmp_path: Path, standin: Standin) -> None:
    """The job holds the lock that others see, not the one that its shell has open."""
    standin("1x40GB")
    leases = LeaseFolder.default()
    with dispatcher(tmp_path, "0.2", "1.5", "1.5") as process:
        wait_for_standby(tmp_path, running="j1")
        (uuid,) = json.loads(attempts(tmp_path)[0]["gpus"])
        leases.paths(uuid)[0].unlink()
        wait_until(lambda: len((tmp_path / "ran").read_text().split()) == 3)
        assert leases.is_held(uuid)
        assert process.wait(60) == 0
    assert [(row["name"], row["state"]) for row in attempts(tmp_path)] == [(f"j{i}", "done") for i in range(3)]
    assert not leases.is_held(uuid)


def test_long_jobs_leave_no_shell_standing_by(tmp_path: Path, standin: Standin) -> None:
    """No job of the run has been short yet: who knows when the next is needed?"""
    standin("1x40GB")
    with dispatcher(tmp_path, "2", "0") as process:
        wait_until(lambda: (tmp_path / "ran").exists())
        seen = set()
        while (tmp_path / "ran").read_text().split() == ["j0"]:
            seen |= {tag.rpartition("/")[2] for tag in shells(tmp_path).values()}
            time.sleep(0.05)
        assert process.wait(60) == 0
    assert attempts(tmp_path)[0]["name"] == "j0"
    assert seen <= {"1", "2"}
    assert early(attempts(tmp_path)) == set()
