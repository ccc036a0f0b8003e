"""CPU-seconds of the ESD numerics: eigenvalues by route and size, symmetric solvers by size, fits by size.

All routes see the same matrices in one run, so their ratios can be trusted even where the machine is shared. The routes
of other tools are written from their published definitions: WeightWatcher takes scipy's singular values in float64,
TempBalance and its family torch's in float32. Torch is left out where it is not installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.linalg

from gpuherd.esd import eigenvalues, fit_power_law

Float64 = npt.NDArray[np.float64]
Matrix = npt.NDArray[Any]

SHAPES = [(384, 384), (768, 768), (768, 2304), (768, 3072), (2048, 2048), (4096, 4096)]
SOLVER_SIZES = [384, 768, 1024, 2048]
FIT_SIZES = [768, 4096, 10_000]


def run(*, quick: bool) -> dict[str, Any]:
    """All figures; seconds are CPU-seconds, the least of the repeats."""
    shapes = SHAPES[:2] if quick else SHAPES
    rate = gemm_rate(512 if quick else 2048)
    return {
        "gemm_float64_gflops": rate / 1e9,
        "eigenvalues": [eigenvalue_routes(*shape, rate=rate) for shape in shapes],
        "symmetric_solvers": [symmetric_solvers(n) for n in (SOLVER_SIZES[:1] if quick else SOLVER_SIZES)],
        "fits": [fits(n) for n in (FIT_SIZES[:1] if quick else FIT_SIZES)],
    }


def cpu_seconds(work: Callable[[], object], *, budget: float = 2.0) -> float:
    """The least CPU time of up to 5 repeats, fewer once ``budget`` seconds are spent."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < budget:
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def gemm_rate(n: int) -> float:
    """Floating-point operations a second of a float64 matrix product: what the machine can do at best."""
    A = np.random.default_rng(0).standard_normal((n, n))
    return 2 * n**3 / cpu_seconds(lambda: A @ A)


def eigenvalue_routes(rows: int, cols: int, *, rate: float) -> dict[str, Any]:
    """Ours, the routes of others, and the time that the least number of operations takes at GEMM speed."""
    W = np.random.default_rng(1).standard_normal((rows, cols), dtype=np.float32)
    n, m = min(rows, cols), max(rows, cols)
    routes: dict[str, Callable[[], object]] = {
        "ours": lambda: eigenvalues(W),
        "scipy_svd_float64": lambda: scipy.linalg.svd(W.astype(np.float64), compute_uv=False),
        **torch_routes(W),
    }
    seconds = {name: cpu_seconds(work) for name, work in routes.items()}
    limit = (n * n * m + 4 / 3 * n**3) / rate  # Gram matrix by symmetry, and reduction to tridiagonal form
    return {
        "shape": [rows, cols],
        "seconds": seconds,
        "times_ours": {name: spent / seconds["ours"] for name, spent in seconds.items()},
        "flop_limit_seconds": limit,
        "share_of_flop_limit": limit / seconds["ours"],
    }


def torch_routes(W: Matrix) -> dict[str, Callable[[], object]]:
    """The singular values by torch, in float32."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    T = torch.from_numpy(W)
    return {"torch_svdvals_float32": lambda: torch.linalg.svdvals(T)}


def symmetric_solvers(n: int) -> dict[str, Any]:
    """Values-only solvers that scipy, numpy and torch offer, on one Gram matrix."""
    W = np.random.default_rng(2).standard_normal((n, n))
    G: Float64 = np.asfortranarray(W @ W.T)

    def by_scipy(driver: Literal["ev", "evd", "evr"]) -> Callable[[], object]:
        return lambda: scipy.linalg.eigh(G, eigvals_only=True, driver=driver, check_finite=False)

    solvers: dict[str, Callable[[], object]] = {
        "scipy_eigh_ev": by_scipy("ev"),
        "scipy_eigh_evd": by_scipy("evd"),
        "scipy_eigh_evr": by_scipy("evr"),
        "scipy_lapack_dsyevd": lambda: scipy.linalg.lapack.dsyevd(G, compute_v=0, lower=1),
        "numpy_eigvalsh": lambda: np.linalg.eigvalsh(G),
    }
    try:
        import torch
    except ImportError:
        pass
    else:
        T = torch.from_numpy(G)
        solvers["torch_eigvalsh"] = lambda: torch.linalg.eigvalsh(T)
    return {"n": n, "seconds": {name: cpu_seconds(work) for name, work in solvers.items()}}


def fits(n: int) -> dict[str, Any]:
    """DKS over every candidate: the search by bounds against the plain one, and xmin_mid."""
    rng = np.random.default_rng(3)
    spectra = {"pareto": np.sort(rng.pareto(2.0, n) + 1), "lognormal": np.sort(rng.lognormal(0, 2, n))}
    figures: dict[str, Any] = {"n": n}
    for name, x in spectra.items():
        ours, plain = fit_power_law(x, "DKS"), tiled(x)
        seconds = {
            "ours": cpu_seconds(lambda x=x: fit_power_law(x, "DKS"), budget=0.5),  # type: ignore[misc]
            "tiled_exhaustive": cpu_seconds(lambda x=x: tiled(x), budget=0.5),  # type: ignore[misc]
            "xmin_mid": cpu_seconds(lambda x=x: fit_power_law(x, "xmin_mid"), budget=0.5),  # type: ignore[misc]
        }
        figures[name] = {
            "seconds": seconds,
            "times_ours": seconds["tiled_exhaustive"] / seconds["ours"],
            "same_index": ours.num_tail == n - plain,
        }
    return figures


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
