"""What jobs leave behind is gone within two seconds, processes and GPU memory, also when it hides.

A job of 0.1 s starts four processes that outlive it, each in a session of its own and deaf to SIGTERM: one forked
twice, one that has emptied its environment, one that does so and whose parent is gone as well, and one that forks and
ends in a loop for ever. The first three hold memory on the job's stand-in GPU. Measured is the time from the job's end,
as the dispatcher tells it, until all process groups are empty and the memory is back.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuherd.errors import GpuherdError
from gpuherd.jobs import Job, RunDirectory, run_jobs
from gpuherd.jobs.options import DispatchOptions
from gpuherd.jobs.records import Event, EventKind
from gpuherd.standin.machine import SimulatedMachine

GPUS = 8
MEMORY_MB = 10_000
WITHIN_S = 2.0

# "$1" names the file that each process adds its pid to, "$2" the folder with the programs. The GPU's label goes first,
# for those who have no environment any more.
_JOB = """
echo "gpu $CUDA_VISIBLE_DEVICES" >>"$1"
(setsid sh "$2/stay" "$1" &)
env -i PATH="$PATH" setsid sh "$2/stay" "$1" &
(env -i PATH="$PATH" setsid sh "$2/stay" "$1" &)
setsid sh "$2/fork" "$1" &
sleep 0.1
"""
_STAY = """
trap '' TERM HUP INT
echo "holds $$" >>"$1"
while :; do sleep 1; done
"""
_FORK = """
trap '' TERM HUP INT
[ -n "$2" ] || echo "forks $$" >>"$1"
sleep 0.01
[ -e "$1" ] || exit
sh "$0" "$1" again &
"""


def run(*, quick: bool) -> dict[str, Any]:
    """All figures; times in seconds."""
    with tempfile.TemporaryDirectory(prefix="gpuherd-cleanup-") as folder:
        gone_s = clean_up(50 if quick else 1000, Path(folder))
    return {
        "jobs": len(gone_s),
        "processes_left_by_each": 4,
        "gone_within_2_s": sum(seconds <= WITHIN_S for seconds in gone_s),
        "p50_s": statistics.median(gone_s),
        "max_s": max(gone_s),
    }


def clean_up(jobs: int, folder: Path) -> list[float]:
    """Runs the jobs. For each the seconds until nothing of it was left."""
    (folder / "stay").write_text(_STAY)
    (folder / "fork").write_text(_FORK)
    machine = SimulatedMachine.create(folder / "machine", f"{GPUS}x40GB")
    machine.activate()
    former = os.environ.get("GPUHERD_LEASE_DIR")
    os.environ["GPUHERD_LEASE_DIR"] = str(folder / "leases")
    observer = _Observer(machine, folder)
    try:
        with observer:
            outcome = run_jobs(
                [_job(number, folder) for number in range(jobs)],
                DispatchOptions(max_checks=1, check_interval=0.05, max_gpus=GPUS),
                RunDirectory(folder / "run"),
                on_event=observer.told,
            )
            observer.wait(jobs)
        assert outcome.done == jobs, outcome
    finally:
        _end_what_is_left(folder)
        machine.deactivate()
        if former is None:
            del os.environ["GPUHERD_LEASE_DIR"]
        else:
            os.environ["GPUHERD_LEASE_DIR"] = former
    return observer.gone_s


def _job(number: int, folder: Path) -> Job:
    words = (str(folder / f"{number}.pids"), str(folder))
    return Job(name=f"job-{number}", argv=("/bin/sh", "-c", _JOB, "job", *words), gpus=1)


class _Observer(threading.Thread):
    """Gives the processes their memory, and looks how long they are there after the end of their job."""

    def __init__(self, machine: SimulatedMachine, folder: Path):
        super().__init__(daemon=True)
        self._machine = machine
        self._folder = folder
        self._over = threading.Event()
        self._ended: dict[str, float] = {}
        self._given: set[int] = set()
        self.gone_s: list[float] = []

    def __enter__(self) -> _Observer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def told(self, event: Event) -> None:
        """A job has ended."""
        if event.kind is EventKind.DONE and event.job is not None:
            self._ended[event.job.removeprefix("job-")] = time.monotonic()

    def wait(self, jobs: int) -> None:
        """Until all have been seen to go, or for as long as none should need."""
        deadline = time.monotonic() + 5 * WITHIN_S
        while len(self.gone_s) < jobs and time.monotonic() < deadline:
            time.sleep(0.01)
        self.gone_s += [5 * WITHIN_S] * (jobs - len(self.gone_s))

    def run(self) -> None:
        gone: set[str] = set()
        while not self._over.is_set():
            ended = dict(self._ended)  # before the look: what was left was there by then
            alive = _live_groups()
            for path in self._folder.glob("*.pids"):
                job = path.stem
                if job in gone:
                    continue
                if alive.isdisjoint(self._read(path)) and job in ended:
                    self.gone_s.append(time.monotonic() - ended[job])
                    gone.add(job)
                    path.unlink()
            time.sleep(0.02)

    def _read(self, path: Path) -> list[int]:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        gpu = next((words[1] for words in lines if words[0] == "gpu"), "")
        for words in lines:
            pid = int(words[1])
            if words[0] == "holds" and pid not in self._given:
                self._given.add(pid)
                self._give(gpu, pid)
        return [int(words[1]) for words in lines if words[0] != "gpu"]

    def _give(self, gpu: str, pid: int) -> None:
        try:
            self._machine.occupy(gpu, MEMORY_MB, pid=pid)
        except GpuherdError:  # it has been ended already
            return


def _end_what_is_left(folder: Path) -> None:
    """Ends the process groups that are still there: one that forks for ever would slow all that comes after."""
    for path in folder.glob("*.pids"):
        for line in path.read_text(encoding="utf-8").splitlines():
            kind, word = line.split()
            if kind != "gpu":
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(int(word), signal.SIGKILL)


def _live_groups() -> set[int]:
    """The process groups in which a process lives; a zombie does not, however long init takes to bury it."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if state not in "ZX":
            found.add(int(group))
    return found
