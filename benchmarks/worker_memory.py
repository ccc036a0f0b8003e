"""Peak memory of the ESD worker on a checkpoint of more than 1 GB, against what its largest matrix needs.

The bound: the largest matrix as stored and as float32, its Gram matrix and one panel in float64, and a fixed 600 MB for
Python, its libraries and BLAS buffers. The checkpoint is Llama-shaped with random bfloat16 weights, written here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MB = 2**20
FIXED_MB = 600
PANEL_MB = 32


def run(*, quick: bool) -> dict[str, Any]:
    """Writes the checkpoint, runs the worker by hand, and compares its peak with the bound (all figures in MB)."""
    layers, hidden, inner = (1, 512, 1024) if quick else (9, 2048, 8192)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        stored_mb = write_llama(model, layers=layers, hidden=hidden, inner=inner)
        words = ["--model-id", str(model), "--device-map", "cpu", "--output-dir", str(Path(folder) / "out")]
        started = time.perf_counter()
        peak_mb = peak(words)
        wall_s = time.perf_counter() - started
    largest = hidden * inner
    needs_mb = (largest * 2 + largest * 4 + hidden * hidden * 8) / MB + PANEL_MB
    return {
        "checkpoint_mb": stored_mb,
        "largest_matrix": [inner, hidden],
        "largest_matrix_needs_mb": needs_mb,
        "bound_mb": needs_mb + FIXED_MB,
        "peak_mb": peak_mb,
        "peak_over_needs_mb": peak_mb - needs_mb,
        "wall_s": wall_s,
    }


def write_llama(folder: Path, *, layers: int, hidden: int, inner: int) -> float:
    """Writes config.json and model.safetensors, a tensor at a time. Returns the file's size in MB."""
    import numpy as np

    shapes: dict[str, tuple[int, int]] = {"model.embed_tokens.weight": (32000, hidden)}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"model.layers.{layer}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (hidden, inner)
    header: dict[str, Any] = {}
    offset = 0
    for name, (rows, columns) in shapes.items():
        size = rows * columns * 2
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            weights = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            # The upper half of a float32 is a bfloat16, rounded towards zero.
            file.write((weights.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return (folder / "model.safetensors").stat().st_size / MB


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
