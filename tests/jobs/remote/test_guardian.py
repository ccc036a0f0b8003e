"""What happens to an attempt whose leader is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.jobs.remote.orders import NODE, end, leader, shell, written
from tests.patience import Gate, wait_until

from gpuherd.engines.process_tree import everyone, identify, tagged
from gpuherd.jobs.remote.node_job import guarded
from gpuherd.jobs.remote.protocol import EndReport, Order, read_ended, write_ended

IN_A_WORKER = [
    sys.executable,
    "-c",
    "import sys; from gpuherd.jobs.remote.agent import lead; lead(sys.argv[1], int(sys.argv[2]))",
]


def alive(job: Order) -> bool:
    return any(each.attempt == job.tag for each in tagged(job.tag))


def guardians(manifest: str) -> list[int]:
    """The pids of the guardians of this manifest's attempts."""
    found = []
    for each in everyone():
        with suppress(OSError):  # it has ended meanwhile
            line = Path(f"/proc/{each.process.pid}/cmdline").read_bytes()
            if b"guardian" in line and manifest.encode() in line:
                found.append(each.process.pid)
    return found


@pytest.mark.parametrize("words", [NODE, pytest.param(IN_A_WORKER, marks=pytest.mark.slow)])
def test_leader_killed(tmp_path: Path, words: Sequence[str]) -> None:
    """Nothing of the attempt goes on, not even what hides; its end is told, and it is nobody's fault."""
    ready = tmp_path / "ready"
    stubborn = f'trap "" TERM; touch {ready}; while :; do sleep 0.02; done'
    job = shell(tmp_path, f"trap 'exit 5' TERM; (setsid sh -c '{stubborn}' &); while :; do sleep 0.02; done")
    manifest = written(tmp_path, job)
    with leader(manifest, words=words) as child:
        wait_until(ready.exists)
        child.kill()
    wait_until(Path(job.ended).exists)
    told = end(job)
    assert told.started and told.interrupted and told.code == 5
    assert told.problem == "the process that led it was killed"
    assert told.ran_s >= 0
    assert not alive(job)
    wait_until(lambda: not job.status.exists())


def test_leader_killed_after_the_end(tmp_path: Path) -> None:
    """A job that had ended when its leader was killed has ended as it did."""
    gate = Gate(tmp_path / "gate")
    job = shell(
        tmp_path, f"touch {tmp_path}/ready; {gate.wait}; echo made >{tmp_path}/result", result=f"{tmp_path}/result"
    )
    manifest = written(tmp_path, job)
    with leader(manifest) as child:
        wait_until((tmp_path / "ready").exists)
        child.send_signal(signal.SIGSTOP)
        gate.open()
        wait_until(lambda: "exit 0" in job.status.read_text())
        child.kill()
    wait_until(Path(job.ended).exists)
    assert end(job).well and not end(job).interrupted


def test_leader_and_job_killed(tmp_path: Path) -> None:
    """Both at once, as by a kernel short of memory: there is no exit status, and the guardian says so."""
    job = shell(tmp_path, f"touch {tmp_path}/ready; exec sleep 1000")
    manifest = written(tmp_path, job)
    with leader(manifest) as child:
        wait_until((tmp_path / "ready").exists)
        child.send_signal(signal.SIGSTOP)
        for each in tagged(job.tag):
            os.kill(each.process.pid, signal.SIGKILL)
        wait_until(lambda: not alive(job))
        child.kill()
    wait_until(Path(job.ended).exists)
    told = end(job)
    assert told.started and told.code is None and not told.well


def test_all_is_well(tmp_path: Path) -> None:
    """A guardian that is dismissed does nothing, and is gone when the leader is."""
    job = shell(tmp_path, "exit 0")
    manifest = written(tmp_path, job)
    assert subprocess.run([*NODE, manifest, "0"]).returncode == 0
    assert end(job).well
    assert not guardians(manifest)


def test_what_was_told_stays(tmp_path: Path) -> None:
    """The leader was killed between its last word to the follower and that to its guardian."""
    job = shell(tmp_path, "exit 0")
    before = EndReport(at=1.0, ran_s=2.0, code=0)
    write_ended(Path(job.ended), before)
    with subprocess.Popen(["/bin/true"]) as gone:
        process = identify(gone.pid)
    assert process is not None
    with guarded(written(tmp_path, job), 0, 0, job, process):
        pass
    assert read_ended(Path(job.ended)) == before


def test_started_never(tmp_path: Path) -> None:
    """The leader was killed before it gave the go-ahead: the job has not run."""
    job = shell(tmp_path, "exit 0")
    with subprocess.Popen(["/bin/true"]) as gone:
        process = identify(gone.pid)
    assert process is not None
    with guarded(written(tmp_path, job), 0, 0, job, process):
        pass
    told = end(job)
    assert not told.started and told.interrupted


def test_a_job_whose_batch_is_over_is_ended_all_the_same(tmp_path: Path) -> None:
    """Its follower has taken the node for lost and cleared away, before the guardian came to it."""
    job = shell(tmp_path, f"touch {tmp_path}/ready; exec sleep 1000")
    manifest = written(tmp_path, job)
    with leader(manifest) as child:
        wait_until((tmp_path / "ready").exists)
        Path(manifest).unlink()
        child.kill()
    wait_until(lambda: not alive(job) and not guardians(manifest))
    assert not Path(job.ended).exists()


def test_signals_for_all_do_not_end_it(tmp_path: Path) -> None:
    """An engine signals all processes of a job before it kills its leader."""
    job = shell(tmp_path, f"touch {tmp_path}/ready; trap '' TERM; while :; do sleep 0.02; done", grace_s=0.2)
    manifest = written(tmp_path, job)
    with leader(manifest) as child:
        wait_until((tmp_path / "ready").exists)
        (guardian,) = guardians(manifest)
        os.kill(guardian, signal.SIGTERM)
        child.kill()
    wait_until(Path(job.ended).exists)
    assert end(job).interrupted and not end(job).well
    assert not alive(job)


def test_leader_killed_with_its_children(tmp_path: Path) -> None:
    """As a worker of Ray ends: it kills its children first, the shell that keeps the job's exit status among them. The
    guardian is none of them: it ends the job, with its grace, and it is nobody's fault."""
    job = shell(
        tmp_path,
        f"trap 'sleep 0.1; touch {tmp_path}/saved; exit 0' TERM; touch {tmp_path}/ready; while :; do sleep 0.02; done",
    )
    manifest = written(tmp_path, job)
    with leader(manifest) as child:
        wait_until((tmp_path / "ready").exists)
        child.send_signal(signal.SIGSTOP)
        for each in psutil.Process(child.pid).children():
            each.kill()
        child.kill()
    wait_until(Path(job.ended).exists)
    told = end(job)
    assert told.started and told.interrupted and told.code is None and not told.well
    assert (tmp_path / "saved").exists()
    assert not alive(job)
