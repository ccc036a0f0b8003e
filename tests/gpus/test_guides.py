"""The examples of docs/gpus.md and the three of the GPU guide run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuherd.standin.machine import SimulatedMachine as Simulated

Standin = Callable[..., Simulated]
GUIDE = Path(__file__).parents[2] / "docs" / "gpus.md"

INTERACTIVE = """
from gpuherd.gpus import get_available_gpus, setup_gpu_environment

# Show available GPUs
gpus = get_available_gpus()
print(f"Available GPUs: {gpus}")

# Let user choose
gpu_input = input("Enter GPU IDs (comma-separated): ")
selected = [int(x.strip()) for x in gpu_input.split(",")]

# Setup environment
device = setup_gpu_environment(gpu_ids=selected)
print(f"Using device: {device}")
"""

BY_LOAD = """
from gpuherd.gpus import get_gpu_info, get_gpu_memory_usage, setup_gpu_environment

# Find least loaded GPU
gpu_info = get_gpu_info()
loads = []

for info in gpu_info:
    _, _, util = get_gpu_memory_usage(info['id'])
    loads.append((info['id'], util))

# Sort by utilization
loads.sort(key=lambda x: x[1])

# Use least loaded GPU
best_gpu = loads[0][0]
print(f"Using least loaded GPU: {best_gpu} ({loads[0][1]:.1f}% used)")

device = setup_gpu_environment(gpu_ids=[best_gpu])
"""

CONDITIONAL = """
from gpuherd.gpus import select_gpus, setup_gpu_environment

# Training config
model_size_gb = 7  # 7B model
batch_size = 32

# Estimate memory needed
memory_needed_gb = model_size_gb * 2  # Model + gradients + optimizer

# Select GPUs
if memory_needed_gb <= 40:
    # Fits on one A100
    device = setup_gpu_environment(num_gpus=1)
    strategy = "single"
elif memory_needed_gb <= 160:
    # Use DDP on 4 GPUs
    device = setup_gpu_environment(num_gpus=4)
    strategy = "ddp"
else:
    # Need FSDP
    device = setup_gpu_environment(num_gpus=8)
    strategy = "fsdp"

print(f"Using {strategy} strategy on {device}")
"""


def run(code: str, answer: str = "") -> str:
    """What a new process prints that runs this code on the simulated machine of the test."""
    shown = "\nimport os; print('visible:', os.environ.get('CUDA_VISIBLE_DEVICES'))"
    command = [sys.executable, "-c", code + shown]
    child = subprocess.run(command, input=answer, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_interactive_selection(standin: Standin) -> None:
    standin("8x40GB")
    printed = run(INTERACTIVE, "2, 5\n")
    assert "Available GPUs: [0, 1, 2, 3, 4, 5, 6, 7]" in printed
    assert "Using device: cpu" in printed  # torch here has no CUDA
    assert "visible: 2,5" in printed


def test_selection_by_load(standin: Standin) -> None:
    machine = standin("4x40GB")
    for gpu, memory_mb in enumerate([9000, 8000, 4096, 20000]):
        machine.occupy(gpu, memory_mb)
    assert run(BY_LOAD).splitlines() == ["Using least loaded GPU: 2 (10.0% used)", "visible: 2"]


def test_conditional_selection(standin: Standin) -> None:
    standin("8x40GB")
    assert run(CONDITIONAL).splitlines() == ["Using single strategy on cpu", "visible: 0"]


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("example", examples())
@pytest.mark.parametrize("spec", ["4x40GB", None])
def test_examples_of_our_own_guide_run_with_and_without_gpus(standin: Standin, example: str, spec: str | None) -> None:
    if spec is not None:
        standin(spec)
    run(example)


def test_our_own_guide_has_examples_to_run() -> None:
    assert len(examples()) >= 5
