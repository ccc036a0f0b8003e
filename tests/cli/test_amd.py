"""The command line on a simulated AMD machine: the GPUs are listed, and jobs see theirs by ROCm's variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.standin.machine import SimulatedMachine

Standin = Callable[..., SimulatedMachine]
SHOWN = 'echo "$ROCR_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES ${CUDA_VISIBLE_DEVICES-unset}"'


def gpuherd(*words: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpuherd", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpus_are_listed_and_those_that_rocm_hides_are_named(standin: Standin) -> None:
    machine = standin("2xMI300X")
    told = json.loads(gpuherd("gpus", "--json", ROCR_VISIBLE_DEVICES="1"))
    assert [gpu["uuid"] for gpu in told["gpus"]] == list(machine.uuids)
    assert [(gpu["maker"], gpu["visible"]) for gpu in told["gpus"]] == [("AMD", False), ("AMD", True)]
    assert (told["driver_version"], told["cuda_version"]) == ("6.14.14", None)


@pytest.mark.slow
def test_run_shows_a_command_its_gpus(standin: Standin) -> None:
    machine = standin("4xMI300X")
    words = ["run", "--gpu-list", "3,1", "--num-gpus", "2", "--max-checks", "1", "--", "sh", "-c", SHOWN]
    shown = gpuherd(*words, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert shown == f"{machine.uuids[3]},{machine.uuids[1]} 0,1 unset\n"


@pytest.mark.slow
def test_jobs_of_a_batch_see_theirs_and_one_on_the_cpu_none(standin: Standin, tmp_path: Path) -> None:
    machine = standin("2xMI300X", attribute=True)
    (tmp_path / "jobs.txt").write_text(
        "".join(f"#gpuherd gpus={gpus} name=on{gpus}\nsh -c '{SHOWN}'\n" for gpus in (2, 0)), encoding="utf-8"
    )
    gpuherd("batch", "jobs.txt", "--max-checks", "1", "--output-dir", "run", cwd=tmp_path)
    logs = {path.name.partition(".")[0]: path.read_text() for path in tmp_path.glob("run/logs/on*.log")}
    assert logs == {"on2": f"{','.join(machine.uuids)} 0,1 unset\n", "on0": "  \n"}


@pytest.mark.slow
def test_the_doctor_finds_all_well(standin: Standin, tmp_path: Path) -> None:
    told = gpuherd("--simulate", "2xMI300X", "doctor", cwd=tmp_path)
    assert "AMD driver 6.14.14, 2 GPUs, SIMULATED" in told
    assert "no XGMI" in told and "ROCR_VISIBLE_DEVICES not set" in told
    assert "all well" in told
