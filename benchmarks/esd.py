"""CPU-seconds of the ESD engine against its peers and against the machine's limit, with one thread and with two.

Everything of one row is measured in one process on the same matrices, so that ratios can be trusted also where the
machine is shared. The limit: the operations that the Gram matrix (n² m, by symmetry) and the reduction to tridiagonal
form (4/3 n³) can't do without, at the speed of a float64 matrix product. Peers: `_esd_peers`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import _esd_peers as peers
from benchmarks._peers import Absent

Float64 = npt.NDArray[np.float64]
Work = Callable[[], object]

SHAPES = [(768, 768), (768, 2304), (768, 3072), (2048, 2048), (4096, 4096), (4096, 11008)]
SOLVER_SIZES = [256, 768, 1024, 1536, 2048, 2304, 2560, 3072, 4096]
LAYERS = [(768, 768), (4096, 4096), (4096, 11008)]
BULK_LAYERS = [(768, 768), (768, 3072), (4096, 4096)]
FIT_SIZES = [768, 2304, 4096, 10_000]
FARMS_SHAPE = (4096, 11008)
THREADS = (1, 2)


def run(*, quick: bool) -> dict[str, Any]:
    """All figures, for each number of threads; each in a process of its own, because BLAS reads the number once."""
    return {f"threads_{threads}": _in_process(threads, quick) for threads in (THREADS[:1] if quick else THREADS)}


def _in_process(threads: int, quick: bool) -> dict[str, Any]:
    program = "import json; from benchmarks import esd; print('RESULT' + json.dumps(esd.figures({}, quick={})))"
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, str(threads))}
    command = [sys.executable, "-c", program.format(threads, quick)]
    shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(shown.rpartition("RESULT")[2])
    return result


def figures(threads: int, *, quick: bool) -> dict[str, Any]:
    """Everything, in this process."""
    rate = gemm_rate(512 if quick else 2048)
    return {
        "gemm_float64_gflops": rate / 1e9,
        "eigenvalues": [eigenvalue_routes(shape, rate) for shape in (SHAPES[:2] if quick else SHAPES)],
        "symmetric_solvers": [symmetric_solvers(n) for n in (SOLVER_SIZES[:2] if quick else SOLVER_SIZES)],
        "layers": [layer(shape, threads) for shape in (LAYERS[:1] if quick else LAYERS)],
        "layers_mp_and_randomised": [bulk(shape, threads) for shape in ([(200, 300)] if quick else BULK_LAYERS)],
        "gpt2_small": gpt2(threads, rate, layers=1 if quick else 12),
        "fits": [fits(n) for n in (FIT_SIZES[:1] if quick else FIT_SIZES)],
        "farms": farms((400, 800) if quick else FARMS_SHAPE),
    }


def cpu_seconds(work: Work, *, budget: float = 2.0) -> float:
    """The least CPU time of up to 5 repeats, fewer once ``budget`` seconds are spent."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < budget:
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def gemm_rate(n: int) -> float:
    """Floating-point operations a CPU-second of a float64 matrix product: what the machine can do at best."""
    A = np.random.default_rng(0).standard_normal((n, n))
    B = A.copy()
    return 2 * n**3 / cpu_seconds(lambda: A @ B)


def flops(shape: tuple[int, int]) -> float:
    """Operations of the Gram matrix and of the reduction to tridiagonal form."""
    n, m = min(shape), max(shape)
    return n * n * m + 4 / 3 * n**3


def times_ours(seconds: dict[str, float]) -> dict[str, float]:
    """Each as a multiple of ours."""
    return {name: spent / seconds["ours"] for name, spent in seconds.items()}


def eigenvalue_routes(shape: tuple[int, int], rate: float) -> dict[str, Any]:
    """Ours, the routes of others, and how near ours is to the limit."""
    import scipy.linalg
    import torch

    from gpuherd.esd import eigenvalues

    W = peers.weights(shape, 1)
    seconds = {
        "ours": cpu_seconds(lambda: eigenvalues(W)),
        "ours_float32": cpu_seconds(lambda: eigenvalues(W, precision="float32")),
        "scipy_svd_float64": cpu_seconds(lambda: scipy.linalg.svd(W.astype(np.float64), compute_uv=False)),
        "torch_svdvals_float32": cpu_seconds(lambda: torch.linalg.svdvals(torch.from_numpy(W))),
    }
    limit = flops(shape) / rate
    return {
        "shape": shape,
        "seconds": seconds,
        "times_ours": times_ours(seconds),
        "flop_limit_seconds": limit,
        "share_of_flop_limit": limit / seconds["ours"],
    }


def symmetric_solvers(n: int) -> dict[str, Any]:
    """Values-only solvers on one Gram matrix: what the sizes in ``spectra.solvers`` rest on."""
    import scipy.linalg
    import torch

    from gpuherd.esd.spectra.solvers import Lapack, aligned, choice_for, cpu_vendor, installed_mkl, loaded_library

    W = np.random.default_rng(2).standard_normal((n, n))
    G = W @ W.T
    matrix = aligned((n, n), np.float64)

    def fresh(solve: Callable[[Any], object]) -> Work:
        def work() -> None:
            matrix[...] = G
            solve(matrix)

        return work

    def two_stage(library: Lapack, band: int) -> Callable[[Any], object]:
        return lambda A: library.sterf(*library.band_to_tridiagonal(library.to_band(A, band)))

    solvers: dict[str, Work] = {
        "scipy_eigh_evd": lambda: scipy.linalg.eigh(G, eigvals_only=True, driver="evd", check_finite=False),
        "torch_eigvalsh": lambda: torch.linalg.eigvalsh(torch.from_numpy(G)),
    }
    loaded, mkl = loaded_library(), installed_mkl()
    if loaded is not None:
        solvers[f"{loaded.maker}_one_stage"] = fresh(loaded.syevd)
        for band in (32, 48, 64, 96):
            solvers[f"{loaded.maker}_two_stage_band_{band}"] = fresh(two_stage(loaded, band))
    if mkl is not None:
        solvers["mkl_syevd"] = fresh(mkl.syevd)
    taken = choice_for(n)
    ours = f"{taken.library.maker if taken.library else 'scipy'} {taken.way} {taken.width or ''}".strip()
    seconds = {name: cpu_seconds(work) for name, work in solvers.items()}
    return {"n": n, "taken": ours, "processor": cpu_vendor(), "seconds": seconds}


def _against_weightwatcher(shapes: list[peers.Shape], threads: int, seconds: dict[str, float], *, bulk: bool) -> Any:
    """Adds its seconds; returns its alphas, or why it is left out."""
    try:
        result = peers.weightwatcher(shapes, threads=threads, bulk=bulk)
    except Absent as reason:
        return f"weightwatcher: {reason}"
    seconds["weightwatcher"] = result["seconds"]
    return result["alpha"]


def layer(shape: tuple[int, int], threads: int) -> dict[str, Any]:
    """One matrix from weights to a row with the searched alpha."""
    from gpuherd.esd import FitSettings, analyse_layer

    W = peers.weights(shape, 0)
    settings = FitSettings("DKS")
    row = analyse_layer("w", [W], settings)
    seconds = {
        "ours": cpu_seconds(lambda: analyse_layer("w", [W], settings)),
        "guides": cpu_seconds(lambda: peers.guides_fit(peers.spectrum_float32(W))),
        "tempbalance": cpu_seconds(lambda: peers.tempbalance_fit(peers.spectrum_float32(W))),
    }
    theirs = _against_weightwatcher([shape], threads, seconds, bulk=False)
    alphas = {"ours": row.alpha, "weightwatcher": theirs}
    return {"shape": shape, "seconds": seconds, "times_ours": times_ours(seconds), "alpha": alphas}


def bulk(shape: tuple[int, int], threads: int) -> dict[str, Any]:
    """The same with the Marchenko-Pastur fit and the spectrum in random order."""
    from gpuherd.esd import FitSettings, analyse_layer

    W = peers.weights(shape, 0)
    settings = FitSettings("DKS", mp_fit=True, randomize=True)
    seconds = {"ours": cpu_seconds(lambda: analyse_layer("w", [W], settings))}
    theirs = _against_weightwatcher([shape], threads, seconds, bulk=True)
    return {"shape": shape, "seconds": seconds, "times_ours": times_ours(seconds), "weightwatcher": theirs}


def gpt2(threads: int, rate: float, *, layers: int) -> dict[str, Any]:
    """A model of the shapes of GPT-2 small: the same 49 matrices, and our worker on the file, with its splits."""
    from gpuherd.esd import FitSettings, analyse_layer

    shapes = peers.gpt2_shapes(layers)
    settings = FitSettings("DKS")
    Ws = [peers.weights(shape, number) for number, shape in enumerate(shapes)]
    rows: list[Any] = []

    def ours() -> None:
        rows[:] = [analyse_layer(str(number), [W], settings) for number, W in enumerate(Ws)]

    seconds = {"ours": cpu_seconds(ours, budget=5.0)}
    theirs = _against_weightwatcher(shapes, threads, seconds, bulk=False)
    limit = sum(map(flops, shapes)) / rate
    result: dict[str, Any] = {
        "matrices": len(shapes),
        "seconds": seconds,
        "times_ours": times_ours(seconds),
        "flop_limit_seconds": limit,
        "share_of_flop_limit": limit / seconds["ours"],
        "worker": gpt2_worker(Ws),
    }
    if isinstance(theirs, str):
        result["weightwatcher"] = theirs
    else:
        pairs = zip((row.alpha for row in rows), theirs, strict=True)
        result["largest_relative_difference_of_alpha"] = max(abs(a - b) / b for a, b in pairs)
    return result


def gpt2_worker(Ws: list[peers.Float32]) -> dict[str, Any]:
    """CPU-seconds of ``python -m gpuherd.esd.worker`` on a safetensors file, start of Python included."""
    from safetensors.numpy import save_file

    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = [f"h.{number // 4}.{parts[number % 4]}.weight" for number in range(len(Ws) - 1)] + ["wpe.weight"]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        save_file(dict(zip(names, Ws, strict=True)), model / "model.safetensors")
        (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        words = ["--model-id", str(model), "--output-dir", str(Path(folder, "out")), "--device-map", "cpu"]
        before = os.times()
        command = [sys.executable, "-m", "gpuherd.esd.worker", *words, "--fix-fingers", "DKS", "--embeddings"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": spent, "said": [line for line in shown.splitlines() if line.startswith("Layers:")]}


def fits(n: int) -> dict[str, Any]:
    """One fit over every candidate with its interval of alpha, against the searches of others."""
    import torch

    from gpuherd.esd import fit_power_law

    rng = np.random.default_rng(3)
    spectra = {"pareto": np.sort(rng.pareto(2.0, n) + 1), "lognormal": np.sort(rng.lognormal(0, 2, n))}
    result: dict[str, Any] = {"n": n}
    for name, x in spectra.items():
        single = torch.from_numpy(x.astype(np.float32))
        works: dict[str, Work] = {
            "ours": lambda x=x: fit_power_law(x, "DKS", delta=1e-3),  # type: ignore[misc]
            "ours_without_interval": lambda x=x: fit_power_law(x, "DKS"),  # type: ignore[misc]
            "xmin_mid": lambda x=x: fit_power_law(x, "xmin_mid"),  # type: ignore[misc]
            "tiled_exhaustive": lambda x=x: tiled(x),  # type: ignore[misc]
            "tempbalance": lambda single=single: peers.tempbalance_fit(single),  # type: ignore[misc]
        }
        if n <= 4096:  # beyond, its n x n matrices don't fit
            works["guides"] = lambda single=single: peers.guides_fit(single)  # type: ignore[misc]
        seconds = {each: cpu_seconds(work, budget=0.5) for each, work in works.items()}
        same = fit_power_law(x, "DKS").num_tail == n - tiled(x)
        result[name] = {"seconds": seconds, "times_ours": times_ours(seconds), "same_index": same}
    return result


def tiled(x: Float64, tile: int = 64) -> int:
    """The candidate of least one-sided distance by computing all n²/2 distances, ``tile`` candidates at a time."""
    n, logs = len(x), np.log(x)
    sums = np.cumsum((np.arange(n - 1, 0, -1) * np.diff(logs))[::-1])[::-1]
    slopes = np.arange(n, 1, -1) / sums
    best, least = -1, np.inf
    for start in range(0, n - 1, tile):
        i = np.arange(start, min(start + tile, n - 1))[:, None]
        j = np.arange(start, n)[None, :]
        distances = np.expm1((logs[i] - logs[j]) * slopes[i])
        distances += (j - i) / (n - i)
        np.abs(distances, out=distances)
        distances[j < i] = 0.0
        worst = distances.max(axis=1)
        if worst.min() < least:
            best, least = start + int(worst.argmin()), float(worst.min())
    return best


def farms(shape: tuple[int, int]) -> dict[str, Any]:
    """One layer by windows of fixed aspect ratio: windows, pooled eigenvalues, and the fit over every candidate."""
    from gpuherd.esd import FitSettings
    from gpuherd.esd.fits.farms import fit_farms

    W = peers.weights(shape, 0)
    settings = FitSettings("DKS", farms=True)
    seconds = {
        "ours": cpu_seconds(lambda: fit_farms([W], settings)),
        "reference_loop": cpu_seconds(lambda: peers.farms(W)),
    }
    alphas = {"ours": fit_farms([W], settings).farms_alpha, "reference_loop": peers.farms(W)}
    return {"shape": shape, "seconds": seconds, "times_ours": times_ours(seconds), "alpha": alphas}
