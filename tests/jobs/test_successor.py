"""A dispatcher is killed at an awkward moment, and its successor finds what it left: jobs that stand still, that share
a GPU, that are being ended, and ends that are half known. Real processes and SIGKILL."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.patience import Gate, wait_until

from gpuherd.jobs import DispatchOptions, Job, Queue, RunDirectory, run_jobs
from gpuherd.jobs.control.client import send
from gpuherd.jobs.control.messages import ControlKind, Request
from gpuherd.jobs.settings import user_file
from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]

# Works off the jobs of a JSON file.
_DISPATCHER = """
import json, sys
from gpuherd.jobs import DispatchOptions, Job, RunDirectory, run_jobs
plan = json.loads(sys.argv[1])
jobs = [Job(**{**job, "argv": tuple(job["argv"])}) for job in plan["jobs"]]
outcome = run_jobs(jobs, DispatchOptions(**plan["options"]), RunDirectory(plan["root"]), grace_s=plan["grace_s"])
sys.exit(outcome.exit_code)
"""
FAST: dict[str, object] = {"max_checks": 1, "check_interval": 0.02, "cpu_jobs": 4}


class Folder:
    """A run folder, dispatchers that come and go, and what the queue says."""

    def __init__(self, root: Path):
        self.run = RunDirectory(root)

    def start(self, jobs: list[Job], *, grace_s: float = 0.3, **options: object) -> subprocess.Popen[bytes]:
        told = [{**{name: getattr(job, name) for name in _TOLD}, "argv": list(job.argv)} for job in jobs]
        plan = {"jobs": told, "options": {**FAST, **options}, "root": str(self.run.root), "grace_s": grace_s}
        return subprocess.Popen([sys.executable, "-c", _DISPATCHER, json.dumps(plan)])

    def states(self) -> dict[str, str]:
        if not self.run.queue.exists():
            return {}
        with Queue(self.run.queue, check=False) as queue:
            return {name: str(state) for name, state in queue.states().items()}

    def process_state(self, job: str) -> str:
        with Queue(self.run.queue, check=False) as queue:
            process = next(record.process for record in queue.running() if record.queued.job.name == job)
        assert process is not None
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def stands_still(self, job: str) -> bool:
        """Whether the main process is stopped (T), or waits (D) for a child that was stopped between vfork and exec."""
        return self.process_state(job) in "TD"

    def works(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether this dispatcher is at work, by what it says of itself."""
        try:
            return bool(json.loads(self.run.state_file.read_text())["pid"] == process.pid)
        except (OSError, ValueError):
            return False

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, told=self.states)

    def wait_for(self, **states: str) -> None:
        self.wait_until(lambda: states.items() <= self.states().items())


_TOLD = ("name", "gpus", "memory_mb", "share", "retries", "timeout_s", "family")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def sh(name: str, script: str, **more: object) -> Job:
    return Job(name=name, argv=("/bin/sh", "-c", script), **{"gpus": 0, **more})  # type: ignore[arg-type]


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def settings(text: str) -> None:
    user_file().parent.mkdir(parents=True, exist_ok=True)
    user_file().write_text(text)


def test_what_was_paused_for_a_full_disk_goes_on_under_a_successor_that_has_space(folder: Folder, gate: Gate) -> None:
    """Nothing changes for the successor: it never saw the disk full."""
    job = sh("j", gate.wait)
    first = folder.start([job], min_disk=1)
    folder.wait_for(j="running")
    kill(first)
    settings('[defaults]\nmin_disk = "1MB"\n')
    first = folder.start([job], min_disk=1)
    folder.wait_until(lambda: folder.works(first))
    settings('[defaults]\nmin_disk = "900000GB"\n')
    first.send_signal(signal.SIGHUP)
    folder.wait_until(lambda: folder.stands_still("j"))
    kill(first)
    assert folder.stands_still("j")
    settings("")
    gate.open()
    second = folder.start([job], min_disk=1)
    assert second.wait(60) == 0
    assert folder.states() == {"j": "done"}


def test_paused_by_a_person_it_stays_so_and_its_time_stands_still(folder: Folder, gate: Gate) -> None:
    job = sh("j", gate.wait, timeout_s=6.0, retries=0)
    first = folder.start([job])
    folder.wait_for(j="running")
    assert send(folder.run, Request(ControlKind.PAUSE, ("j",))).applied_by == "dispatcher"
    folder.wait_until(lambda: folder.stands_still("j"))
    kill(first)
    second = folder.start([job])
    folder.wait_until(lambda: folder.works(second))
    time.sleep(6.2)  # longer than its time limit
    assert folder.stands_still("j")
    gate.open()
    assert send(folder.run, Request(ControlKind.RESUME, ("j",))).changed == ("j",)
    assert second.wait(60) == 0
    with Queue(folder.run.queue) as queue:
        [row] = queue.attempts()
    assert (row.number, row.state) == (1, "done")


def test_a_resume_that_was_written_down_but_not_carried_out(folder: Folder, gate: Gate) -> None:
    """The first one dies between the two: the queue says that it runs, and its processes stand still."""
    job = sh("j", gate.wait, retries=0)
    first = folder.start([job])
    folder.wait_for(j="running")
    assert send(folder.run, Request(ControlKind.PAUSE, ("j",))).ok
    folder.wait_until(lambda: folder.stands_still("j"))
    kill(first)
    with Queue(folder.run.queue) as queue:
        assert queue.resume(("j",), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()).jobs == ("j",)
    assert folder.stands_still("j")
    gate.open()
    assert folder.start([job]).wait(60) == 0
    assert folder.states() == {"j": "done"}


def test_a_job_that_was_being_cancelled_is_ended_by_the_successor(folder: Folder) -> None:
    """The first one dies between TERM, which the job ignores, and KILL."""
    jobs = [sh("deaf", "trap '' TERM; while :; do sleep 0.05; done"), sh("after", "true")]
    first = folder.start(jobs, grace_s=600.0)
    folder.wait_for(deaf="running", after="done")
    assert send(folder.run, Request(ControlKind.CANCEL, ("deaf",))).ok
    time.sleep(0.2)
    assert folder.states()["deaf"] == "running"
    kill(first)
    # Not by the same list, which would want the job again.
    second = folder.start([], grace_s=0.2)
    second.wait(60)
    assert folder.states()["deaf"] == "cancelled"


def test_jobs_that_share_a_gpu_and_were_taken_over_are_not_crowded(folder: Folder, standin: Standin) -> None:
    standin("1x40GB")
    words = (sys.executable, "-m", "gpuherd.standin.job", "--memory-mb")
    shared = [
        Job(
            name=f"s{i}",
            argv=(*words, "14000", "--ramp", "1.0", "--hold", "3.0"),
            gpus=1,
            memory_mb=15_000,
            share=True,
            family="f",
        )
        for i in range(2)
    ]
    late = [
        Job(name=f"t{i}", argv=(*words, "9000", "--ramp", "0.1", "--hold", "0.1"), gpus=1, memory_mb=9_500, share=True)
        for i in range(2)
    ]
    first = folder.start(shared, share=True)
    folder.wait_for(s0="running", s1="running")
    kill(first)
    second = folder.start([*shared, *late], share=True)
    assert second.wait(60) == 0
    with Queue(folder.run.queue) as queue:
        rows = {row.job: row for row in queue.attempts()}
        # Nobody looked while there was no dispatcher, so the peak is no proof that less will do.
        assert all(family.measured == 0 for family in queue.families(["f"]).values())
    assert {row.state for row in rows.values()} == {"done"}
    assert len(rows) == 4
    with closing(sqlite3.connect(folder.run.queue)) as db:
        spans = db.execute("SELECT started_mono, ended_mono, shared_mb FROM attempts").fetchall()
    for moment, _, _ in spans:
        assert sum(mb for begin, end, mb in spans if begin <= moment < end) <= 40_960


def test_an_end_and_what_it_teaches_are_one(tmp_path: Path, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong between the two: neither is there, and the next dispatcher has both."""
    monkeypatch.setattr("gpuherd.jobs.gpu.manager.WATCH_EVERY_S", 0.2)
    standin("1x40GB")
    run = RunDirectory(tmp_path / "run")
    job = Job(
        name="j", argv=(sys.executable, "-m", "gpuherd.standin.job", "--memory-mb", "5000", "--hold", "2.0"), family="f"
    )
    run.create()
    with Queue(run.queue), closing(sqlite3.connect(run.queue)) as db:
        db.execute("CREATE TRIGGER t BEFORE INSERT ON families BEGIN SELECT RAISE(ABORT, 'cut off here'); END")
        db.commit()
    with pytest.raises(sqlite3.IntegrityError, match="cut off here"):
        run_jobs([job], DispatchOptions(**FAST), run)  # type: ignore[arg-type]
    with Queue(run.queue) as queue:
        assert [str(state) for state in queue.states().values()] == ["running"]
        assert [row.state for row in queue.attempts()] == ["running"]


@pytest.mark.parametrize("seconds", [3.0])
def test_time_in_which_a_need_ran_is_no_waiting(folder: Folder, seconds: float) -> None:
    jobs = [sh("a", f"sleep {seconds}"), Job(name="b", argv=("true",), gpus=0, needs=("a",))]
    assert run_jobs(jobs, DispatchOptions(**FAST), folder.run).done == 2  # type: ignore[arg-type]
    with Queue(folder.run.queue) as queue:
        rows = {row.job: row for row in queue.attempts()}
    assert rows["b"].wait_s < seconds / 2
