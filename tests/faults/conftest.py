"""A dispatcher in a process of its own, so that a test can kill it, and jobs that write down when they really ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.patience import wait_until

from gpuherd.engines.process_tree import tagged
from gpuherd.jobs import Queue
from gpuherd.standin.machine import SimulatedMachine

# Runs the jobs of a JSON file; its exit code is the outcome's.
_DISPATCHER = """
import ctypes, json, os, signal, sys
# A test run in the background of something may itself have it ignored.
signal.signal(signal.SIGINT, signal.SIG_IGN if "ignore" in sys.argv else signal.default_int_handler)
from pathlib import Path
from gpuherd.errors import GpuherdError
from gpuherd.jobs import GpuOptions, Job, RunDirectory, run_jobs
plan = json.loads(Path(sys.argv[1]).read_text())
if plan["uid"] is not None:
    # All that is imported late must be in before: another user may not be let into our folder of Python.
    import difflib, encodings.ascii, getpass, hashlib, psutil, pwd, statistics, tempfile, tomllib
    import gpuherd.gpus.query, gpuherd.jobs.gpu.watch, gpuherd.ledger.sampler, gpuherd.ledger.shares
    from gpuherd.standin import driver
    driver.load()
    os.setgroups([]), os.setgid(plan["uid"]), os.setuid(plan["uid"])
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which a change of user takes away and exec gives back
jobs = [Job(**{**job, "argv": tuple(job["argv"]), "needs": tuple(job.get("needs", ()))}) for job in plan["jobs"]]
try:
    outcome = run_jobs(jobs, GpuOptions(**plan["options"]), RunDirectory(plan["root"]), grace_s=plan["grace_s"],
                       on_event=lambda event: print(event.kind, event.text, flush=True))
except GpuherdError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
sys.exit(outcome.exit_code)
"""

# "$1" is the job's name, "$2" the file of events, "$3" its result, "$4" how long it runs. One short write a line, with
# O_APPEND: the order of the lines is the order in which things happened.
_JOB = 'echo "start $1 $CUDA_VISIBLE_DEVICES" >>"$2"; sleep "$4"; echo "end $1 $CUDA_VISIBLE_DEVICES" >>"$2"; : >"$3"'


@dataclass
class User:
    """Somebody with a run folder, who starts gpuherd on it."""

    root: Path
    events: Path
    options: dict[str, object] = field(default_factory=lambda: {"max_checks": 2, "check_interval": 0.02})
    grace_s: float = 0.5
    uid: int | None = None

    def with_uid(self, uid: int, place: Path) -> User:
        """The user under a uid of their own, with a home in this place; the common events lie there too."""
        home = place / self.root.name
        home.mkdir()
        os.chown(home, uid, uid)
        self.root, self.events, self.uid = home / home.name, place / "events", uid
        return self

    def job(self, name: str, seconds: float = 0.05, **more: object) -> dict[str, object]:
        """A job that writes its start and end into the common file."""
        result = str(self.root.parent / f"{self.root.name}-{name}.result")
        words = ["/bin/sh", "-c", _JOB, "job", f"{self.root.name}-{name}", str(self.events), result, str(seconds)]
        return {"name": name, "argv": words, "result": result, "retries": 1, **more}

    def start(self, jobs: list[dict[str, object]], *, ignore_interrupt: bool = False) -> subprocess.Popen[str]:
        """Starts gpuherd on these jobs; what it tells comes on its standard output."""
        plan = self.root.parent / f"{self.root.name}.json"
        wanted = {
            "jobs": jobs,
            "options": self.options,
            "root": str(self.root),
            "grace_s": self.grace_s,
            "uid": self.uid,
        }
        plan.write_text(json.dumps(wanted))
        words = [sys.executable, "-c", _DISPATCHER, str(plan), *(["ignore"] if ignore_interrupt else [])]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=dict(os.environ))

    def run(self, jobs: list[dict[str, object]]) -> tuple[int, str]:
        """The same, to the end: exit code and what was told."""
        process = self.start(jobs)
        told, _ = process.communicate(timeout=60)
        return process.returncode, told

    def lines(self) -> list[list[str]]:
        """The common file: kind, job, GPUs."""
        return [line.split() for line in self.events.read_text().splitlines()] if self.events.exists() else []

    def processes(self) -> list[int]:
        """Live processes of this run's jobs."""
        queue = Queue(self.root / "queue.sqlite")
        tag = queue.tag
        queue.close()
        return [found.process.pid for found in tagged(f"{tag}/")]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for something to come true; fails when it does not."""
        wait_until(condition, every_s=0.005)


def overlaps(lines: list[list[str]]) -> list[str]:
    """GPUs that were given to a second job while a first one ran on them, by the jobs' own account."""
    held: dict[str, str] = {}
    found = []
    for line in lines:
        kind, job, gpus = line[0], line[1], line[2] if len(line) > 2 else ""
        for gpu in filter(None, gpus.split(",")):
            if kind == "start" and held.get(gpu) is not None:
                found.append(f"GPU {gpu}: {job} began while {held[gpu]} ran")
            held[gpu] = job if kind == "start" else ""
            if kind == "end":
                del held[gpu]
    return found


@pytest.fixture
def new_user(tmp_path: Path) -> Iterator[Callable[[str], User]]:
    yield lambda name: User(tmp_path / name, tmp_path / "events")


@pytest.fixture
def find_overlaps() -> Callable[[list[list[str]]], list[str]]:
    return overlaps


@pytest.fixture
def four_gpus(standin: Callable[..., SimulatedMachine]) -> SimulatedMachine:
    return standin("4x40GB")
