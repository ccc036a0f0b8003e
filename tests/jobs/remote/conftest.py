"""A cluster of the tests' own, and runs that hand their jobs to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.remote.process_engine import Orders, ProcessEngine, State
from tests.patience import wait_until

from gpuherd.jobs import DispatchOptions, Event, EventKind, Job, Outcome, Queue, RunDirectory, run_jobs
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import ControlKind, Request, Response
from gpuherd.jobs.remote import dispatcher as handover
from gpuherd.jobs.remote import dispatcher as opening

_FOLLOWER = Path(__file__).parent / "follower.py"


class Cluster:
    """The engine's folder, and what a test asks of it."""

    def __init__(self, root: Path):
        self.root = root
        self.orders = Orders(State(root))
        self.engines: list[ProcessEngine] = []
        self.settings: dict[str, Any] = {}

    def engine(self, name: str = "slurm") -> ProcessEngine:
        self.engines.append(ProcessEngine(self.root, name, **self.settings))
        return self.engines[-1]

    def handle(self, title: str) -> str:
        """The latest of the job with this title."""
        return next(
            f"{batch['name']}_{batch['titles'].index(title)}"
            for batch in reversed(self.orders.batches())
            if title in batch["titles"]
        )

    def output(self, title: str) -> Path:
        """What the engine's own words of it go into."""
        batch = next(batch for batch in reversed(self.orders.batches()) if title in batch["titles"])
        return Path(batch["outputs"][batch["titles"].index(title)])

    def told(self, title: str) -> Mapping[str, Any]:
        """What the engine says of the latest of the job with this title."""
        return self.orders.state.parcel(self.handle(title))

    def close(self) -> None:
        """Ends what still runs there."""
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with suppress(OSError):
                    if f"PROCESS_ENGINE={self.root}".encode() in (process / "environ").read_bytes().split(b"\0"):
                        os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that ``--engine slurm`` and ``--engine ray`` find in place of the real ones."""
    made = Cluster(tmp_path / "cluster")
    monkeypatch.setattr(handover, "REPORT_DELAY_S", 0.5)
    monkeypatch.setattr(opening, "make", lambda options: made.engine(options.engine))
    yield made
    made.close()


class Run:
    """A run folder, a run in a thread, and what was told."""

    def __init__(self, root: Path):
        self.directory = RunDirectory(root)
        self.events: list[Event] = []
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def copied(self, to: Path) -> Run:
        """A copy of the whole folder, and a run in it."""
        shutil.copytree(self.directory.root, to, ignore=lambda *_: ["control.fifo"])
        return Run(to)

    def __call__(self, jobs: list[Job], engine: str = "slurm", **options: Any) -> Outcome:
        wanted = DispatchOptions(engine=engine, **options)
        self.outcome = run_jobs(jobs, wanted, self.directory, on_event=self.events.append, grace_s=0.3)
        return self.outcome

    def start(self, jobs: list[Job], **options: Any) -> None:
        self.outcome, self.error = None, None
        self._thread = threading.Thread(target=self._run, args=(jobs,), kwargs=options)
        self._thread.start()

    def _run(self, jobs: list[Job], **options: Any) -> None:
        try:
            self(jobs, **options)
        except BaseException as error:  # told by ``join``
            self.error = error

    def join(self) -> Outcome:
        assert self._thread is not None
        self._thread.join(100)
        if self.error is not None:
            raise self.error
        assert self.outcome is not None, "it still runs"
        return self.outcome

    def ask(self, kind: ControlKind, *jobs: str, **settings: str) -> Response:
        return send(self.directory, Request(kind, jobs=jobs, settings=settings))

    def told(self, kind: EventKind) -> list[str]:
        return [event.text for event in self.events if event.kind is kind]

    def wait_for(self, kind: EventKind, count: int = 1) -> None:
        wait_until(lambda: len(self.told(kind)) >= count or self.error is not None, told=lambda: self.events)
        assert self.error is None, self.error

    def states(self) -> dict[str, str]:
        with Queue(self.directory.queue, check=False) as queue:
            return {name: str(state) for name, state in queue.states().items()}

    def handle(self, job: str) -> str | None:
        """The engine's word for a job that it has, as the queue knows it."""
        if not self.directory.queue.exists():
            return None
        with Queue(self.directory.queue, check=False) as queue:
            found = [each.handed for each in queue.running() if each.queued.job.name == job]
        return found[0].handle if found and found[0] is not None else None

    def attempts(self, job: str) -> list[int]:
        """The numbers of the attempts of a job."""
        with Queue(self.directory.queue, check=False) as queue:
            return [attempt.number for attempt in queue.attempts() if attempt.job == job]

    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.directory.gpu_metrics.read_text())
        return found


@pytest.fixture
def run(tmp_path: Path, cluster: Cluster) -> Iterator[Run]:
    """Ended before the cluster is, without which it would wait."""
    made = Run(tmp_path / "run")
    yield made
    if made._thread is not None and made._thread.is_alive():
        made.ask(ControlKind.STOP)
        made._thread.join(60)


class Follower:
    """A follower in a process of its own (``follower.py``), to be killed."""

    def __init__(self, run: Run, cluster: Cluster, folder: Path, grace_s: float = 0.3):
        self._run = run
        self._cluster = cluster
        self._plan = folder / "plan.json"
        self._out = folder / "follower.out"
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, jobs: list[Job], engine: str = "slurm", *, dies: tuple[str, str] | None = None, **options: Any
    ) -> Follower:
        """``dies``: where (``module:Class.method``), and "before" or "after"."""
        plan = {
            "dies": dies,
            "root": str(self._run.directory.root),
            "cluster": str(self._cluster.root),
            "jobs": [asdict(job) for job in jobs],
            "options": {"engine": engine, **options},
            "engine": self._cluster.settings,
            "grace_s": self._grace_s,
        }
        self._plan.write_text(json.dumps(plan))
        with self._out.open("wb") as out:
            words = [sys.executable, str(_FOLLOWER), str(self._plan)]
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        return self

    def out(self) -> str:
        return self._out.read_text()

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.out(), told=self.out)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def alive(self) -> bool:
        assert self._process is not None
        return self._process.poll() is None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.join()

    def join(self, within_s: float = 100) -> int:
        assert self._process is not None
        return self._process.wait(within_s)


MakeJob = Callable[..., Job]


@pytest.fixture
def sh(tmp_path: Path) -> MakeJob:
    """``sh("a", "echo hello")``: a job that runs a script."""

    def make(name: str, script: str = "true", **more: Any) -> Job:
        return Job(name=name, argv=("/bin/sh", "-c", script), **{"gpus": 0, **more})

    return make
