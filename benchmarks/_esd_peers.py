"""The peers of the ESD benchmark: each does to a matrix what its published definition says, and says what it cost.

WeightWatcher 0.7.7 (with powerlaw 1.5) runs as it is, in a process of its own, from a folder of peers
(``pip install --target FOLDER/weightwatcher --no-deps weightwatcher==0.7.7``). The others are loops of a few lines in
their papers' repositories, written here from their definitions (docs/esd-numerics.md): singular values by torch in
float32, then a power law for every candidate xmin, without bounds.

Seconds are CPU-seconds of all threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks._peers import Absent, package

Float32 = npt.NDArray[np.float32]

Shape = tuple[int, int]

# One layer of GPT-2 small as it is stored, and its position embedding.
GPT2_BLOCK: tuple[Shape, ...] = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
GPT2_WPE: Shape = (1024, 768)


def gpt2_shapes(layers: int = 12) -> list[Shape]:
    """The 49 matrices of GPT-2 small that WeightWatcher analyses: c_attn as one, no token embedding."""
    return [*GPT2_BLOCK * layers, GPT2_WPE]


def weights(shape: Shape, seed: int) -> Float32:
    """Weights with a heavy tail, as training makes them: a Gaussian matrix, its columns scaled by a Pareto variable."""
    rng = np.random.default_rng(seed)
    scale = (rng.pareto(3.0, shape[1]) + 1).astype(np.float32)
    return rng.standard_normal(shape, dtype=np.float32) * scale * np.float32(0.02)


_WEIGHTWATCHER = """
import json, logging, sys, time, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[3])
import torch
torch.set_num_threads(int(sys.argv[2]))
from benchmarks._esd_peers import weights
import weightwatcher
logging.disable(logging.CRITICAL)
task = json.loads(sys.argv[1])
def run(shapes):
    net = torch.nn.Sequential(*(torch.nn.Linear(columns, rows, bias=False) for rows, columns in shapes))
    for number, (layer, shape) in enumerate(zip(net, shapes)):
        layer.weight.data = torch.from_numpy(weights(tuple(shape), number))
    watcher = weightwatcher.WeightWatcher(model=net)
    start = time.process_time()
    details = watcher.analyze(**task["options"])
    return time.process_time() - start, details
run([(60, 50)])  # its first call imports what it needs
seconds, details = run(task["shapes"])
print("RESULT" + json.dumps({"seconds": seconds, "alpha": list(details.alpha), "version": weightwatcher.__version__}))
"""


def weightwatcher(shapes: Sequence[Shape], *, threads: int, bulk: bool = False) -> dict[str, Any]:
    """Its ``analyze()`` of a torch model with these matrices: seconds and alphas; ``bulk`` adds MP fit and randomised.

    Raises Absent with a sentence where it is not installed or does not run.
    """
    environment = {**package("weightwatcher"), "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    options = {"mp_fit": True, "randomize": True} if bulk else {}
    task = json.dumps({"shapes": list(shapes), "options": options})
    words = [sys.executable, "-c", _WEIGHTWATCHER, task, str(threads), os.getcwd()]  # noqa: PTH109 - for sys.path
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    _, mark, found = done.stdout.rpartition("RESULT")
    if done.returncode or not mark:
        raise Absent(f"it does not run here: {(done.stderr.strip() or 'no result').splitlines()[-1]}")
    result: dict[str, Any] = json.loads(found)
    return result


def spectrum_float32(W: Float32) -> Any:
    """Squared singular values by torch in float32, ascending, above the threshold: all peers but WeightWatcher."""
    import torch

    evals = torch.linalg.svdvals(torch.from_numpy(W)).square().sort().values
    return evals[evals > 1e-5]


def guides_fit(evals: Any) -> float:
    """The guides' estimator (``net_esd``): all candidates at once in an n x n matrix; alpha of the least distance."""
    import torch

    n = len(evals)
    logs = torch.log(evals)
    index = torch.arange(n - 1)
    sizes = (n - index).to(evals.dtype)
    sums = torch.flip(torch.cumsum(torch.flip(logs, [0]), 0), [0])[:-1] - sizes * logs[:-1]
    alphas = 1 + sizes / sums
    ratios = evals[None, :] / evals[:-1, None]
    model = 1 - ratios ** (1 - alphas[:, None])
    empirical = (torch.arange(n)[None, :] - index[:, None]) / sizes[:, None]
    distances = (model - empirical).abs()
    distances[torch.arange(n)[None, :] < index[:, None]] = 0
    distances = distances.max(dim=1).values
    distances[~(alphas > 1)] = 1e10
    return float(alphas[distances.argmin()])


def tempbalance_fit(evals: Any) -> float:
    """TempBalance's loop (also AlphaPruning's and FARMS'): one candidate after the other, by torch."""
    import torch

    n = len(evals)
    logs = torch.log(evals)
    alphas, distances = torch.zeros(n - 1), torch.ones(n - 1)
    for i, xmin in enumerate(evals[:-1]):
        size = float(n - i)
        alpha = 1 + size / (torch.sum(logs[i:]) - size * logs[i])
        alphas[i] = alpha
        if alpha > 1:
            distances[i] = torch.max(torch.abs(1 - (evals[i:] / xmin) ** (-alpha + 1) - torch.arange(size) / size))
    return float(alphas[torch.argmin(distances)])


def farms(W: Float32) -> float:
    """FARMS' loop over a layer: 10 x 10 windows of 100 x 200, singular values of each, then TempBalance's loop."""
    import torch

    T = torch.from_numpy(W)
    rows, columns = 100, 200
    down, right = (max(1, (side - window) // 9) for side, window in zip(W.shape, (rows, columns), strict=True))
    parts = [
        torch.linalg.svdvals(T[i * down : i * down + rows, j * right : j * right + columns]).square()
        for i in range(10)
        for j in range(10)
    ]
    evals = torch.cat(parts).sort().values
    return tempbalance_fit(evals[evals > 1e-5])
