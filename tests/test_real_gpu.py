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
    shown = child("-c", "from gpuherd.esd.resources import cuda_devices; print(*cuda_devices().names, sep='\\n')")
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


def test_every_form_of_a_gram_matrix_is_as_good_as_it_says() -> None:
    program = (
        "import numpy as np, torch\n"
        "from gpuherd.esd.spectra.device import ieee_float32\n"
        "from gpuherd.esd.spectra.device import gram_on_device\n"
        "W = np.random.default_rng(0).standard_normal((300, 5000)) * 10.0 ** np.linspace(-3, 3, 300)[:, None]\n"
        "for form, most in (('float64', 1e-13), ('split', 1e-13), ('float32', 1e-6)):\n"
        "    for dtype in (torch.float64, torch.float32, torch.bfloat16):\n"
        "        panels = [torch.from_numpy(W).to(dtype)[:, s:s + 900] for s in range(0, 5000, 900)]\n"
        "        with ieee_float32():\n"
        "            gram = gram_on_device(panels, W.shape, 'cuda:0', form)\n"
        "        there = torch.linalg.eigvalsh(gram.double()).cpu().numpy()\n"
        "        here = np.linalg.svd(torch.cat(panels, 1).double().numpy(), compute_uv=False)[::-1] ** 2\n"
        "        assert np.abs(there - here).max() <= most * 300 * here[-1], (form, dtype)\n"
    )
    shown = child("-c", program)
    assert shown.returncode == 0, shown.stderr


LANES = """
import sys
import torch
from gpuherd.esd import FitSettings
from gpuherd.esd.pipeline import analyse_matrices
from gpuherd.esd.spectra.batching import peak_bytes
from gpuherd.models.checkpoints.open import open_checkpoint
from gpuherd.models.tensors.matrices import matrices

found = list(matrices(open_checkpoint(sys.argv[1])))
devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]

def rows(devices, parallel, precision="float64"):
    settings = FitSettings("xmin_mid", precision=precision)
    return analyse_matrices(found, settings, devices, parallel=parallel, on_progress=lambda done: None)

lanes = rows(devices, True)
side = max(min(matrix.shape) for matrix in found)
for number in range(len(devices)):
    assert torch.cuda.max_memory_allocated(number) <= peak_bytes(side, parallel=True), number
assert lanes == rows(devices, True)
for one, other, cpu in zip(lanes, rows(devices[:1], False), rows(("cpu",), True), strict=True):
    assert one.fit_status == other.fit_status == cpu.fit_status, one.longname
    if cpu.alpha is not None:
        assert abs(one.alpha / cpu.alpha - 1) <= 1e-9 and abs(other.alpha / cpu.alpha - 1) <= 1e-9, one.longname
        assert abs(one.norm / cpu.norm - 1) <= 1e-12, one.longname
assert [row.fit_status for row in rows(devices, True, "float32")] == [row.fit_status for row in lanes]
"""


def test_lanes_give_what_the_cpu_gives_twice_the_same_and_within_their_memory(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    formats = (torch.bfloat16, torch.float16, torch.float32)
    shapes = [(700, 900)] * 12 + [(300, 300)] * 40 + [(1500, 2000), (2000, 1500), (1500, 5000), (40, 60)]
    tensors = {f"layers.{n}.weight": torch.randn(shape).to(formats[n % 3]) for n, shape in enumerate(shapes)}
    tensors["layers.90.weight"] = torch.randn(400, 5) @ torch.randn(5, 500)
    tensors["layers.91.weight"] = torch.zeros(400, 500)
    tensors["layers.92.weight"] = torch.full((400, 500), float("nan"))
    tensors["layers.93.conv.weight"] = torch.randn(320, 300, 3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    shown = child("-c", LANES, str(tmp_path / "model.safetensors"))
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
