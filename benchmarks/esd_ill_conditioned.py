"""Ill-conditioned matrices: CPU-seconds beside the Gram route's, and every singular value beside the true one.

    python -m benchmarks esd_ill_conditioned

A Gram matrix loses the singular values below about 1e-6 of the largest. ``gram`` is what it takes to find the others;
``ours`` finds all; ``svd`` is LAPACK's singular value decomposition, values only. Matrices of a known spectrum are
U diag(σ) Vᵀ with U and V from QR factorisations of random matrices; of others the SVD's values are taken as true.
Errors are relative to the largest singular value. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
EPS = 2.0**-52
SIDES = (1024, 2048, 4096)
MANY_SIDE, SEEDS = 600, 12


def spectra(n: int) -> dict[str, Float64]:
    """Spectra of side ``n`` by name, the largest value 1."""
    half, few = n // 2, n // 16
    index = np.arange(1, n + 1.0)
    return {
        "k^-2": index**-2.0,
        "k^-3": index**-3.0,
        "exp(-sqrt k)": np.exp(1 - np.sqrt(index)),
        "9 decades": np.logspace(0, -9, n),
        "14 decades": np.logspace(0, -14, n),
        "20 decades": np.logspace(0, -20, n),
        "low rank and noise": np.r_[np.ones(few), 1e-8 * np.linspace(1, 0.5, n - few)],
        "rank one and noise": np.r_[1.0, np.full(n - 1, 1e-9)],
        "two groups": np.r_[np.linspace(1, 0.1, half), np.linspace(1e-9, 1e-10, n - half)],
        "three groups": np.r_[np.ones(few), np.linspace(1e-5, 1e-6, half), np.full(n - few - half, 1e-11)],
        "a third of the rank": np.r_[np.linspace(1, 0.1, n // 3), np.zeros(n - n // 3)],
        "one small value": np.r_[np.linspace(1, 0.5, n - 1), 1e-9],
        "five lost values": np.r_[np.linspace(1, 0.01, n - 5), np.logspace(-8, -13, 5)],
        "stairs of two decades": np.repeat(10.0 ** -np.arange(0, 14, 2), n // 7 + 1)[:n],
        "equal values before a slope": np.r_[np.ones(half), np.logspace(0, -12, n - half)],
        "well-conditioned": np.linspace(1, 0.01, n),
        "float32's end": np.linspace(1, 1e-5, n),
    }


def of_spectrum(sigma: Float64, random: np.random.Generator) -> Float64:
    """A dense square matrix with these singular values."""
    n = len(sigma)
    left, right = (np.linalg.qr(random.standard_normal((n, n)))[0] for _ in range(2))
    product: Float64 = (left * sigma) @ right.T
    return product


def unknown(n: int, random: np.random.Generator) -> dict[str, Float64]:
    """Matrices whose spectrum is known by an SVD only."""
    repeated = random.standard_normal((n, n))
    repeated[n // 2 :] = repeated[: n - n // 2]
    return {
        "heavy rows": random.standard_normal((n, n)) * (random.pareto(0.5, n) + 1)[:, None],
        "heavy columns": random.standard_normal((n, n)) * (random.pareto(0.5, n) + 1),
        "Student's t": random.standard_t(0.7, (n, n)),
        "rows there twice": repeated,
    }


def cpu_seconds(work: Callable[[], Float64], runs: int = 2) -> tuple[Float64, float]:
    """What ``work`` returns, and the least CPU time of so many runs (of one, where that takes over 4 s)."""
    times: list[float] = []
    while len(times) < runs and sum(times) < 4:
        started = time.process_time()
        found = work()
        times.append(time.process_time() - started)
    return found, min(times)


def rank(sigma: Float64) -> int:
    """As the column ``matrix_rank`` counts it."""
    return int(np.count_nonzero(sigma > sigma.max() * len(sigma) * EPS))


def beyond_tolerance(found: Float64, true: Float64) -> float:
    """The largest error of singular values as a multiple of what is allowed; both ascending.

    1e-12 of the largest, which is n ε; or, for values that a Gram matrix can tell from its rounding, what an error of
    1e-14 λ_max in their squares comes to.
    """
    top = float(true[-1])
    by_gram = np.where(true**2 >= len(true) * EPS * top**2, 1e-14 * top**2 / np.maximum(true, 1e-300), 0.0)
    return float((np.abs(found - true) / np.maximum(1e-12 * top, by_gram)).max())


def timed(name: str, W: Float64, true: Float64 | None) -> dict[str, Any]:
    """One matrix by all three ways."""
    from scipy.linalg import svdvals

    from gpuherd.esd import eigenvalues

    found, ours = cpu_seconds(lambda: np.sqrt(eigenvalues(W)))
    by_gram, gram = cpu_seconds(lambda: np.sqrt(eigenvalues(W, resolve=False)))
    by_svd, svd = cpu_seconds(lambda: svdvals(W, check_finite=False)[::-1], runs=1)
    sigma = by_svd if true is None else np.sort(true)
    return {
        "matrix": name,
        "n": len(W),
        "gram_s": gram,
        "ours_times_gram": ours / gram,
        "svd_times_gram": svd / gram,
        "error": float(np.abs(found - sigma).max() / sigma[-1]),
        "error_over_allowed": beyond_tolerance(found, sigma),
        "error_of_svd": float(np.abs(by_svd - sigma).max() / sigma[-1]),
        "error_of_gram": float(np.abs(by_gram - sigma).max() / sigma[-1]),
        "rank": rank(found),
        "rank_by_svd": rank(by_svd),
    }


def many(seeds: int, n: int) -> dict[str, Any]:
    """The largest error over all spectra and seeds, and how many ranks differ from the true one."""
    from gpuherd.esd import eigenvalues

    worst, over, wrong, count = 0.0, 0.0, 0, 0
    for name, sigma in spectra(n).items():
        for seed in range(seeds):
            W = of_spectrum(sigma, np.random.default_rng([seed, len(name)]))
            found = np.sqrt(eigenvalues(W))
            worst = max(worst, float(np.abs(found - np.sort(sigma)).max()))
            over = max(over, beyond_tolerance(found, np.sort(sigma)))
            # Where a spectrum passes through the least size that counts, rounding decides about the next value.
            wrong += abs(rank(found) - rank(sigma)) > (2 if name == "20 decades" else 1)
            count += 1
    return {"matrices": count, "n": n, "largest_error": worst, "error_over_allowed": over, "wrong_ranks": wrong}


def run(*, quick: bool) -> dict[str, Any]:
    """A row a matrix and size, and the errors of many small ones."""
    rows = []
    for n in (512,) if quick else SIDES:
        random = np.random.default_rng(n)
        for name, sigma in spectra(n).items():
            if n < 4096 or name == "low rank and noise":
                rows.append(timed(name, of_spectrum(sigma, random), sigma))
                print(rows[-1], flush=True)
        for name, W in unknown(n, random).items():
            if n < 4096 or name == "heavy rows":
                rows.append(timed(name, W, None))
                print(rows[-1], flush=True)
    return {"matrices": rows, "of_known_spectrum": many(1 if quick else SEEDS, MANY_SIDE)}
