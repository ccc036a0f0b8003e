"""Spectra on a GPU: how exact each form of a Gram matrix is, and a model of Llama 7B's shape end to end with its limit.

The limit is what the products W Wᵀ and the eigenvalues of all its matrices take at the best rates that this card showed
for them alone; reading, uploads and fits come on top. Finer tables: ``python -m benchmarks gpu_esd``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import gpu_esd
from benchmarks.gpu import Measurement, device, needs
from benchmarks.worker_memory import llama_shapes, write_model

TOLERANCE = {"float64": 1e-13, "split": 1e-13, "float32": 1e-6}  # of n λ_max
STREAMS = (1, 4, 8)


def measure(quick: bool) -> Iterator[Measurement]:
    """The precisions, then all layers of the model."""
    where = device(quick)
    needs("scipy", "pyarrow", "h5py")
    where = "cpu:0" if where == "cpu" else where
    yield Measurement("precision", partial(precision, 64 if quick else 1024, where))
    yield Measurement("llama_7b", partial(llama, where, quick=quick))


def precision(n: int, where: str) -> dict[str, Any]:
    """Errors of each form by condition number. Raises ValueError over the tolerance."""
    found = gpu_esd.precision(n, where)
    over = [each for each in found if any(each[form] > most for form, most in TOLERANCE.items())]
    if over:
        raise ValueError(f"less exact than {TOLERANCE}: {over}")
    return {f"1e{len(str(int(each['condition']))) - 1}": each for each in found}


def llama(where: str, *, quick: bool) -> dict[str, Any]:
    """Seconds of the worker and of its limit; some layers beside the CPU's results, to 1e-9."""
    layers, hidden, inner = (1, 288, 320) if quick else (gpu_esd.LLAMA_LAYERS, gpu_esd.HIDDEN, gpu_esd.INNER)
    limit = layers * limit_of_a_layer(hidden, inner, where)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored_mb = write_model(folder / "model", llama_shapes(layers=layers, hidden=hidden, inner=inner))
        gpu_esd.read_all(folder / "model/model.safetensors")  # what is measured is not the disk
        figures = gpu_esd.worker(folder, "gpu", "--device-map", where.partition(":")[0])
        gpu_esd.worker(folder, "cpu", "--device-map", "cpu", "--layers", "model.layers.0.self_attn.*")
        apart = gpu_esd.difference(folder / "gpu", folder / "cpu")
    if max(apart.values()) > 1e-9:
        raise ValueError(f"the CPU's results differ: {apart}")
    return {"layers": layers, "stored_mb": stored_mb, **figures, "limit_s": limit, "largest_difference": apart}


def limit_of_a_layer(hidden: int, inner: int, where: str) -> float:
    """Seconds of seven products and seven spectra of side ``hidden``, at the best of some numbers of streams."""
    import torch

    from gpuherd.esd.spectra.device import device_arithmetic

    form = device_arithmetic(where, "float64").gram
    square, wide = (gpu_esd.grams(hidden, m, where)[f"{form}_from_bfloat16"]["seconds"] for m in (hidden, inner))
    G = gpu_esd.gram_of(hidden, 2 * hidden, where, torch.float64)
    streams = [count for count in STREAMS if gpu_esd.fits(hidden, count, where)]
    solved = min(gpu_esd.in_streams(lambda: torch.linalg.eigvalsh(G).cpu(), count, where) for count in streams)
    return float(4 * square + 3 * wide + 7 * solved)
