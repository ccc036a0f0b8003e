"""gpuherd's commands as a user gives them, over a real SLURM, and what they leave in a run's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from gpuherd.jobs.queue.store import Queue
from gpuherd.jobs.records import AttemptState


@contextmanager
def start(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command of gpuherd's while the context lasts; killed after it, if it is still there."""
    command = [sys.executable, "-m", "gpuherd", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*words: str, code: int = 0) -> str:
    """What a command printed, when it has ended with this code."""
    with start(*words) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == code, printed
    return printed


def write_jobs(folder: Path, jobs: Sequence[Mapping[str, object]]) -> str:
    """A job file; YAML is a superset of JSON."""
    path = folder / "jobs.yaml"
    path.write_text(json.dumps({"jobs": list(jobs)}))
    return str(path)


def sh(name: str, script: str, **more: object) -> dict[str, object]:
    return {"name": name, "command": ["bash", "-c", script], "gpus": 1, **more}


def states(out: Path) -> dict[str, str]:
    with closing(Queue(out / "queue.sqlite", check=False)) as queue:
        return {name: str(state) for name, state in queue.states().items()}


def attempts(out: Path) -> list[tuple[str, AttemptState]]:
    with closing(Queue(out / "queue.sqlite", check=False)) as queue:
        return [(each.job, each.state) for each in queue.attempts()]


def labels(out: Path) -> tuple[str, ...]:
    """What the queue calls the GPUs of the only attempt; () before there is one."""
    if not (out / "queue.sqlite").exists():
        return ()
    with closing(Queue(out / "queue.sqlite", check=False)) as queue:
        return next((each.gpus for each in queue.attempts()), ())


def handle_of(out: Path, job: str) -> str:
    with closing(Queue(out / "queue.sqlite", check=False)) as queue:
        (found,) = [each.handed for each in queue.running() if each.queued.job.name == job]
    assert found is not None
    assert found.handle is not None
    return found.handle


def runs(folder: Path) -> Counter[str]:
    """How often each job has come to its end, by the lines that they have written."""
    path = folder / "ended"
    return Counter(path.read_text().split() if path.exists() else [])


def has_handle(out: Path, job: str) -> bool:
    """Whether SLURM has the job, and the queue knows under which number."""
    if not (out / "queue.sqlite").exists():
        return False
    with closing(Queue(out / "queue.sqlite", check=False)) as queue:
        return any(
            each.queued.job.name == job and each.handed is not None and each.handed.handle is not None
            for each in queue.running()
        )
