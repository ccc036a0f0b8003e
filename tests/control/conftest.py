"""A dispatcher at work in a process of its own, and the command line as users call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forking
from tests.patience import wait_until

from gpuherd.errors import UsageError
from gpuherd.jobs import JobState, RunDirectory
from gpuherd.jobs.monitor.job_status import EVERYTHING
from gpuherd.jobs.monitor.status import RunStatus, read_status
from gpuherd.jobs.records import JobStatus

_DISPATCHER = """
import json, sys
from gpuherd.jobs import Job, RunDirectory, run_jobs
from gpuherd.jobs.options import DispatchOptions
plan = json.loads(sys.argv[1])
jobs = [Job(**{**job, "argv": tuple(job["argv"]), "needs": tuple(job.get("needs", ()))}) for job in plan["jobs"]]
outcome = run_jobs(jobs, DispatchOptions(**plan["options"]), RunDirectory(plan["root"]), grace_s=0.3,
                   on_event=lambda event: print(event.kind, event.text, flush=True))
sys.exit(outcome.exit_code)
"""


def shell(name: str, script: str, **more: Any) -> dict[str, Any]:
    """A job that a shell runs; ``gpus`` is 0 unless said."""
    return {"name": name, "argv": ["/bin/sh", "-c", script], "gpus": 0, "retries": 0, **more}


@dataclass
class Bench:
    """A run folder with a dispatcher that works on it."""

    root: Path
    options: dict[str, Any] = field(default_factory=lambda: {"max_checks": 2, "check_interval": 0.02, "cpu_jobs": 4})
    process: subprocess.Popen[str] | None = None

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.root)

    def start(self, *jobs: dict[str, Any]) -> None:
        """Starts gpuherd on these jobs and waits until it works on them."""
        plan = json.dumps({"jobs": jobs, "options": self.options, "root": str(self.root)})
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DISPATCHER, plan], stdout=subprocess.DEVNULL, text=True, env=dict(os.environ)
        )
        self.wait_until(self._is_at_work)

    def _is_at_work(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            return True  # done already: its jobs were short
        try:
            return self.status().dispatcher is not None
        except UsageError:
            return False  # its queue is still to be made

    def status(self) -> RunStatus:
        return read_status(self.run, EVERYTHING)

    def job(self, name: str) -> JobStatus:
        return next(job for job in self.status().jobs if job.name == name)

    def wait_for(self, name: str, state: JobState) -> None:
        """Waits until the job is in this state."""
        self.wait_until(lambda: self.job(name).state is state)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for something to come true; fails when it does not."""
        wait_until(condition)

    def ends(self) -> int:
        """Waits for gpuherd's end; its exit code."""
        assert self.process is not None
        return self.process.wait(timeout=60)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "run")
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.terminate()
        made.process.wait(timeout=60)


@pytest.fixture
def job() -> Callable[..., dict[str, Any]]:
    return shell


@dataclass(frozen=True)
class Said:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def gpuherd(tmp_path: Path, forking_gpuherd: Forking) -> Callable[..., Said]:
    """``gpuherd("status", "run")`` as a user calls it, in an empty home."""

    def call(*words: str, **variables: str) -> Said:
        environment = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "100", **variables}
        done = forking_gpuherd.start(module="gpuherd", words=words, env=environment).end()
        return Said(done.returncode, done.stdout, done.stderr)

    return call
