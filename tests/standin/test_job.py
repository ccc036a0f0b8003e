"""The fake CUDA program makes memory real: it ramps, fits or does not, and leaves nothing behind when it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.patience import wait_until

from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpuherd.standin.job", *words],
        env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_takes_memory_after_its_ramp_and_gives_it_back(standin: Standin, tmp_path: Path) -> None:
    machine = standin("2x40GB")
    log = tmp_path / "events"
    words = ["--memory-mb", "2000", "--ramp", "1", "--hold", "1", "--events", str(log), "--name", "one"]
    with start(*words, CUDA_VISIBLE_DEVICES="1", GPUHERD_ATTEMPT="q/1") as job:
        wait_until(lambda: len(events(log)) == 1)
        assert machine.used_mb(1) == 0
        wait_until(lambda: machine.used_mb(1) == 2000)
        assert machine.used_mb(0) == 0
        assert job.wait() == 0
    assert machine.used_mb(1) == 0
    begin, end = events(log)
    assert (begin["event"], begin["gpus"], begin["attempt"]) == ("start", [machine.uuids[1]], "q/1")
    assert (end["event"], end["exit"], end["pid"]) == ("end", 0, job.pid)


def test_of_many_at_once_as_many_get_memory_as_fit(standin: Standin) -> None:
    machine = standin("1x40GB")
    jobs = [start("--memory-mb", "12000", "--hold", "60", CUDA_VISIBLE_DEVICES="0") for _ in range(6)]
    wait_until(lambda: sum(job.poll() is not None for job in jobs) == 3)
    assert machine.used_mb(0) == 36_000
    refused = [job for job in jobs if job.returncode is not None]
    holding = [job for job in jobs if job.returncode is None]
    for job in refused:
        assert job.communicate()[1].startswith("torch.OutOfMemoryError: CUDA out of memory. GPU 0 has ")
        assert job.returncode == 1
    for job in holding:
        job.kill()
        job.communicate()
    assert machine.used_mb(0) == 0


def test_a_program_killed_while_it_changes_the_machine_does_no_harm(standin: Standin) -> None:
    machine = standin("1x40GB")
    code = """
import os, sys
from gpuherd.standin.machine import SimulatedMachine
machine = SimulatedMachine.open(os.environ["GPUHERD_STANDIN"])
print("ready", flush=True)
while True:
    machine.occupy(0, 10_000, pid=os.getpid()).release()
"""
    for round_number in range(8):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.001 * round_number)
            process.kill()
        assert machine.used_mb(0) == 0
    machine.occupy(0, 40_960)
    assert machine.used_mb(0) == 40_960


def test_memory_of_a_killed_job_is_free(standin: Standin) -> None:
    machine = standin("1x40GB")
    with start("--memory-mb", "9000", "--hold", "60", CUDA_VISIBLE_DEVICES="0") as job:
        wait_until(lambda: machine.used_mb(0) == 9000)
        job.kill()
        job.wait()
    assert machine.used_mb(0) == 0


def test_runs_on_what_it_is_given(standin: Standin, tmp_path: Path) -> None:
    machine = standin("2x40GB+80GB,mig=gpu1:20GB+20GB")
    log = tmp_path / "events"
    mig = machine.uuid("1:1")
    for given in ("2,0", machine.uuids[2][:12], mig):
        with start("--memory-mb", "10", "--events", str(log), CUDA_VISIBLE_DEVICES=given) as job:
            assert job.wait() == 0
    # Without PCI order CUDA counts from the fastest: a scheduler that forgets to set it gets another GPU.
    with start("--memory-mb", "10", "--events", str(log), CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="") as job:
        assert job.wait() == 0
    zero, _, two = machine.uuids
    assert [line["gpus"] for line in events(log)[::2]] == [[two, zero], [two], [mig], [two]]


def test_without_a_gpu_it_fails_unless_it_needs_none(standin: Standin) -> None:
    standin("1x40GB")
    for given in ("", "-1", "7", "0,0"):
        with start("--memory-mb", "10", CUDA_VISIBLE_DEVICES=given) as job:
            assert job.communicate()[1] == "RuntimeError: No CUDA GPUs are available\n"
            assert job.returncode == 1
    with start("--memory-mb", "0", "--exit", "7", CUDA_VISIBLE_DEVICES="") as job:
        assert job.wait() == 7


def test_on_an_amd_machine_it_runs_where_rocm_shows_it(standin: Standin, tmp_path: Path) -> None:
    machine = standin("3xMI210")
    log = tmp_path / "events"
    with start("--memory-mb", "500", "--events", str(log), ROCR_VISIBLE_DEVICES="2", HIP_VISIBLE_DEVICES="0") as job:
        assert job.wait() == 0
    assert [event["gpus"] for event in events(log)] == [[machine.uuids[2]]] * 2
