"""What only a real GPU can show. Skipped, saying so, where none is at hand.

The driver is met in child processes: this one has the stand-in driver loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def child(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the machine's own driver."""
    hidden = ("GPUHERD_STANDIN", "LD_LIBRARY_PATH", "PYTORCH_NVML_BASED_CUDA_CHECK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)


def cuda_names() -> list[str]:
    """The GPUs that CUDA shows, by the driver library; no torch is imported to find that there are none."""
    shown = child("-c", "from gpuherd.esd.devices import cuda_devices; print(*cuda_devices().names, sep='\\n')")
    return shown.stdout.split("\n")[:-1] if shown.returncode == 0 and shown.stdout.strip() else []


pytestmark = pytest.mark.skipif(not cuda_names(), reason="no real NVIDIA GPU is at hand")


def test_the_doctor_finds_nothing_wrong() -> None:
    shown = child("-m", "gpuherd", "doctor", "--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_the_table_shows_what_cuda_shows() -> None:
    shown = json.loads(child("-m", "gpuherd", "gpus", "--json").stdout)
    assert [gpu["name"] for gpu in shown["gpus"] if gpu["mig_parent"] is None] == cuda_names()


def test_eigenvalues_on_the_gpu_equal_those_on_the_cpu() -> None:
    program = (
        "import numpy as np\n"
        "from gpuherd.esd import eigenvalues\n"
        "random = np.random.default_rng(0)\n"
        "for shape in ((64, 64), (300, 900), (1200, 400), (1024, 1024)):\n"
        "    W = random.standard_normal(shape).astype(np.float32)\n"
        "    cpu, gpu = eigenvalues(W), eigenvalues(W, device='cuda:0')\n"
        "    assert np.abs(cpu - gpu).max() <= 1e-12 * cpu[-1], shape\n"
    )
    shown = child("-c", program)
    assert shown.returncode == 0, shown.stderr


def test_a_worker_by_hand_computes_on_the_gpu_it_was_given(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    weights = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    save_file({f"layers.{i}.weight": weights * (i + 1) for i in range(4)}, tmp_path / "model.safetensors")
    words = ["-m", "gpuherd.esd.worker", "--model-id", str(tmp_path / "model.safetensors"), "--fix-fingers", "DKS"]
    on_gpu = child(*words, "--output-dir", str(tmp_path / "gpu"), "--device-map", "cuda", CUDA_VISIBLE_DEVICES="0")
    assert on_gpu.returncode == 0, on_gpu.stderr
    assert "Model devices: cuda:0" in on_gpu.stdout
    on_cpu = child(*words, "--output-dir", str(tmp_path / "cpu"), "--device-map", "cpu")
    assert on_cpu.returncode == 0, on_cpu.stderr
    figures = [alphas(tmp_path / where / "stats") for where in ("gpu", "cpu")]
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)


def alphas(folder: Path) -> list[float]:
    """The column alpha of the one file in the folder."""
    import csv

    (path,) = folder.glob("*.csv")
    with path.open(newline="") as file:
        return [float(row["alpha"]) for row in csv.DictReader(file)]
