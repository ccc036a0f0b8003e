"""Peak memory of the ESD worker over its start, against what its largest matrix needs: n² float64 and one panel.

The start is the peak of the same worker on a model of a few small matrices: Python, its libraries, BLAS buffers. Two
checkpoints of random bfloat16 weights are written here: one with an output head of 4096 x 151,936, and one of 20 GB
(where the disk has room) of a Llama's matrices, deep and of side 1024, so that minutes are enough.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MB = 2**20
PANEL_MB = 32
Shapes = Mapping[str, tuple[int, int]]


def run(*, quick: bool) -> dict[str, Any]:
    """Writes the checkpoints, runs the worker by hand on each, and compares its peaks (all figures in MB)."""
    hidden, words = (512, 9000) if quick else (4096, 151_936)
    width, inner = (512, 1024) if quick else (1024, 16_384)
    layers = 1 if quick else llama_layers(width, inner, budget=20 * 10**9)
    start_mb = measured({"lm_head.weight": (64, 80), "model.layers.0.mlp.up_proj.weight": (64, 64)})["peak_mb"]
    head = measured({"lm_head.weight": (words, hidden)})
    llama = measured(llama_shapes(layers=layers, hidden=width, inner=inner))
    return {
        "start_peak_mb": start_mb,
        "head": {"shape": [words, hidden], **head, **over_start(head["peak_mb"] - start_mb, hidden)},
        "llama": {"layers": layers, **llama, **over_start(llama["peak_mb"] - start_mb, width)},
    }


def over_start(over_mb: float, side: int) -> dict[str, float]:
    """What was taken over the start, and what the largest matrix of this side may take."""
    return {"side": side, "over_start_mb": over_mb, "allowed_over_start_mb": side * side * 8 / MB + PANEL_MB}


def llama_layers(hidden: int, inner: int, *, budget: int) -> int:
    """Layers of a checkpoint of ``budget`` bytes, or of half of what the disk has free."""
    room = min(budget, shutil.disk_usage(tempfile.gettempdir()).free // 2)
    return max(1, room // (2 * (4 * hidden * hidden + 3 * hidden * inner)))


def measured(shapes: Shapes) -> dict[str, Any]:
    """Peak of the worker on a checkpoint of these tensors, its size and the time (CPU-seconds of BLAS are in it)."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        stored_mb = write_model(model, shapes)
        words = ["--model-id", str(model), "--device-map", "cpu", "--output-dir", str(Path(folder) / "out")]
        started = time.perf_counter()
        peak_mb = peak(words)
        return {"checkpoint_mb": stored_mb, "peak_mb": peak_mb, "wall_s": time.perf_counter() - started}


def llama_shapes(*, layers: int, hidden: int, inner: int) -> Shapes:
    """The matrices of a Llama, without its embedding and head."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"model.layers.{layer}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def write_model(folder: Path, shapes: Shapes) -> float:
    """Writes config.json and model.safetensors, some rows of a tensor at a time. Returns the file's size in MB."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (rows, columns) in shapes.items():
        size = rows * columns * 2
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    pieces = [(min(1024, rows - start), columns) for rows, columns in shapes.values() for start in range(0, rows, 1024)]
    cores = len(os.sched_getaffinity(0))
    with (folder / "model.safetensors").open("wb") as file, ThreadPoolExecutor(cores) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        # A few at a time: all of a large model's pieces would fill the memory.
        for first in range(0, len(pieces), 2 * cores):
            some = range(first, min(first + 2 * cores, len(pieces)))
            for weights in pool.map(lambda number: random_bfloat16(pieces[number], number), some):
                file.write(weights)
    return (folder / "model.safetensors").stat().st_size / MB


def random_bfloat16(shape: tuple[int, int], seed: int) -> bytes:
    """Weights of standard deviation 0.02 as they are stored."""
    import numpy as np

    weights = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    weights *= np.float32(0.02)
    # The upper half of a float32 is a bfloat16, rounded towards zero.
    return (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def peak(words: list[str]) -> float:
    """Runs the worker to its end and returns its largest resident memory in MB.

    The worker's process reads its own VmHWM as its last act: what wait4 reports begins with what the parent held.
    """
    program = (
        "import sys; from gpuherd.esd import worker; code = worker.main(sys.argv[1:]);"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *words]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return int(shown.split()[-1]) / 1024
