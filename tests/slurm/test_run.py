"""``gpuherd run --engine slurm``: srun with the command, in a real SLURM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import wait_until
from tests.slurm.cluster import Cluster

from gpuherd.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN = (sys.executable, "-m", "gpuherd", "run", "--engine=slurm")


def gpuherd(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *words], input=text, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_has_what_was_asked_for(slurm: Cluster) -> None:
    asks = ("--num-gpus=2", "--cpus=3", "--host-mem=100MB", "--time-limit=5m", "--account=lab", "--name=mine")
    script = (
        'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $SLURM_CPUS_PER_TASK $SLURM_JOB_NAME ${SLURM_EXIT_ERROR-no}"'
    )
    shown = gpuherd(*asks, "--", "sh", "-c", f"{script}; cat; exit 7", text="typed\n")
    gpus, rest = shown.stdout.splitlines()[0].split(" ", 1)
    assert len(gpus.split(",")) == 2 and rest == "PCI_BUS_ID 3 mine no", shown
    assert (shown.stdout.splitlines()[1], shown.returncode) == ("typed", 7)
    assert gpuherd("--num-gpus=0", "--", "sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]"').stdout == "[]\n"


def test_what_can_not_be_is_told_before_anything_waits(slurm: Cluster) -> None:
    for words, code, told in (
        (("--partition=nope", "--", "true"), ExitCode.USAGE, "there is no partition nope in SLURM"),
        (("--num-gpus=9", "--", "true"), ExitCode.USAGE, "can never run there"),
        (("--", "no-such-program"), 127, "not found"),
    ):
        shown = gpuherd(*words)
        assert shown.returncode == code and told in shown.stderr, shown
    dry = gpuherd("--dry-run", "--num-gpus=2", "--time-limit=1h", "--", "python", "a b.py")
    assert dry.stdout.startswith("would ask slurm for 2 GPUs, 60 min, as srun ") and "'a b.py'" in dry.stdout


def test_it_gives_up_when_the_gpus_are_not_there(slurm: Cluster, tmp_path: Path) -> None:
    holder = subprocess.Popen(["srun", "--gres=gpu:8", "-Alab", "sh", "-c", f"touch {tmp_path}/up; sleep 200"])
    try:
        wait_until((tmp_path / "up").exists)
        assert gpuherd("--no-wait", "--account=lab", "--", "true").returncode == ExitCode.BUSY
        assert gpuherd("--wait=2s", "--account=lab", "--", "true").returncode == ExitCode.BUSY
    finally:
        holder.terminate()
        holder.wait()


def test_ctrl_c_is_the_commands(slurm: Cluster, tmp_path: Path) -> None:
    script = f"trap 'exit 42' INT; touch {tmp_path}/up; while true; do sleep 0.1; done"
    with subprocess.Popen([*RUN, "--account=lab", "--", "sh", "-c", script], stderr=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "up").exists)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 42
