"""``gpuherd doctor`` as users run it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpuherd


def doctor(*words: str, python: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-m", "gpuherd", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def checks(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def test_lines_with_remedies_on_simulated_gpus() -> None:
    result = doctor("--simulate", "3x40GB,busy=1,nvlink=2", "doctor", CUDA_VISIBLE_DEVICES="2,0")
    assert result.returncode == 0, result.stdout
    assert result.stderr.startswith("gpuherd: 3 GPUs are simulated; jobs run on the CPU.\n")
    lines = result.stdout.splitlines()
    found = {line[5:26].strip(): line for line in lines if line[:5].strip()}
    assert "SIMULATED" in found["driver"]
    assert "only GPU 2, 0" in found["CUDA_VISIBLE_DEVICES"]
    assert found["GPU 0"].startswith("warn")
    assert "20480 MB used (threshold 500)" in found["GPU 0"]
    assert found["model on GPU 0"].startswith("skip")
    assert found["model on GPU 2"].startswith("ok")
    assert "CUDA_VISIBLE_DEVICES=2" in found["model on GPU 2"]
    assert "GPU 1" not in found
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        assert line.startswith(("warn ", "fail ", "skip ")) == following.strip().startswith("->")
    assert lines[-1] == "all well"


def test_json_tells_the_same_to_scripts() -> None:
    result = doctor("--simulate", "2x40GB,busy=2", "doctor", "--json")
    told = json.loads(result.stdout)
    assert (told["ok"], told["simulated"], result.returncode) == (True, True, 0)
    assert checks(result)["interconnect"]["detail"] == "no NVLink; same PCIe switch: 0-1; NUMA node 0: 0, 1"
    assert all(set(check) == {"name", "status", "detail", "remedy"} for check in told["checks"])


def test_without_gpus_the_cpu_is_checked_and_something_wrong_is_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "leases").symlink_to(tmp_path)
    result = doctor("doctor", "--json", GPUHERD_LEASE_DIR=str(tmp_path / "leases"), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    assert json.loads(result.stdout)["ok"] is False
    found = checks(result)
    assert found["leases"]["status"] == "fail"
    assert found["model on CPU"]["status"] == "ok"


def test_works_where_only_the_core_is_installed(tmp_path: Path) -> None:
    """A Python that sees gpuherd and the distributions it requires, no torch and no numpy."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("nvidia-ml-py", "psutil", "rich", "shtab", "markdown-it-py", "mdurl", "Pygments"):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(str(distribution.locate_file(top)))
    source = Path(gpuherd.__file__).parents[1]
    result = doctor("doctor", "--json", python=("-S",), PYTHONPATH=f"{source}:{packages}")
    found = checks(result)
    assert (found["torch"]["status"], found["torch"]["remedy"]) == ("warn", "pip install 'gpuherd[esd]'")
    assert "numpy" in found["libraries"]["detail"]
    assert found["config"]["status"] == "ok"
    assert not any(name.startswith("model on") for name in found)
