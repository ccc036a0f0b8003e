"""Under --simulate real jobs show on "their" GPU with the memory they really use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest

from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]
TAKES_200_MB = "import time; block = bytearray(200 << 20); print('ready', flush=True); time.sleep(60)"


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def used_mb(handle: Any) -> int:
    time.sleep(0.12)  # the library looks at most ten times a second
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) >> 20


@pytest.fixture
def gpus(standin: Standin) -> Iterator[list[Any]]:
    standin("4x40GB,mig=gpu3:20GB+20GB", attribute=True)
    pynvml.nvmlInit()
    yield [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(4)]
    pynvml.nvmlShutdown()


def test_a_tagged_job_shows_on_its_gpus_until_it_dies(gpus: list[Any]) -> None:
    with start(TAKES_200_MB, CUDA_VISIBLE_DEVICES="2,1", GPUHERD_ATTEMPT="q/1") as job:
        # Half of what it has in memory is on each of its two GPUs.
        assert [round(used_mb(gpu), -2) for gpu in gpus] == [0, 100, 100, 0]
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(gpus[1])
        assert [process.pid for process in listed] == [job.pid]
        job.kill()
        job.wait()
        # At once, not when the library looks again.
        assert [pynvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in gpus] == [0, 0, 0, 0]


def test_a_job_on_a_mig_instance_shows_there(standin: Standin, gpus: list[Any]) -> None:
    instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpus[3], 1)
    uuid = pynvml.nvmlDeviceGetUUID(instance)
    with start(TAKES_200_MB, CUDA_VISIBLE_DEVICES=uuid, GPUHERD_ATTEMPT="q/1") as job:
        assert 200 <= used_mb(instance) < 300
        assert used_mb(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpus[3], 0)) == 0
        job.kill()


@pytest.mark.parametrize(
    "environment",
    [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"GPUHERD_ATTEMPT": "q/1"},
        {"CUDA_VISIBLE_DEVICES": "", "GPUHERD_ATTEMPT": "q/1"},
        {"CUDA_VISIBLE_DEVICES": "0", "GPUHERD_ATTEMPT": "q/1", "GPUHERD_STANDIN": "/another/machine"},
    ],
)
def test_other_processes_do_not_show(gpus: list[Any], environment: dict[str, str]) -> None:
    with start("import time; print('ready', flush=True); time.sleep(60)", **environment) as process:
        assert [used_mb(gpu) for gpu in gpus] == [0, 0, 0, 0]
        process.kill()


def test_what_a_job_has_claimed_itself_is_not_counted_twice(standin: Standin, gpus: list[Any]) -> None:
    machine = SimulatedMachine.open(os.environ["GPUHERD_STANDIN"])
    with start(TAKES_200_MB, CUDA_VISIBLE_DEVICES="0", GPUHERD_ATTEMPT="q/1") as job:
        machine.occupy(0, 3000, pid=job.pid)
        assert used_mb(gpus[0]) == 3000
        job.kill()
