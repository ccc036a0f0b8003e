"""What the fits are compared with: a search over every candidate as the definitions read, and made-up spectra."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

# Distances so close are equal, and the first candidate counts (docs/esd-numerics.md).
TIE = 1e-12


@dataclass(frozen=True)
class Plain:
    """All alphas and distances of one spectrum, shape (n - 1,). Distances are inf where alpha is infinite."""

    alphas: Float64
    one_sided: Float64
    two_sided: Float64

    def distances(self, ks: str) -> Float64:
        return self.one_sided if ks == "one-sided" else self.two_sided

    def best(self, ks: str, allowed: npt.NDArray[np.bool_] | None = None) -> int:
        """The first candidate within TIE of the least distance."""
        found = self.distances(ks) if allowed is None else np.where(allowed, self.distances(ks), np.inf)
        return int(np.flatnonzero(found <= found.min() + TIE)[0])

    def interval(
        self, ks: str, chosen: int, delta: float, allowed: npt.NDArray[np.bool_] | None = None
    ) -> tuple[float, float]:
        """The least and the largest alpha of all allowed candidates within delta of the chosen one's distance."""
        found = self.distances(ks) if allowed is None else np.where(allowed, self.distances(ks), np.inf)
        near = self.alphas[found <= found[chosen] + max(delta, TIE)]
        return float(near.min()), float(near.max())


def every_candidate(x: Float64) -> Plain:
    """By the definition, one candidate after the other."""
    n = len(x)
    alphas, one, two = np.full(n - 1, np.nan), np.full(n - 1, np.inf), np.full(n - 1, np.inf)
    ranks = np.arange(n + 1)
    for i in range(n - 1):
        if x[i] >= x[-1] * (1 - n * np.finfo(float).eps):
            continue
        logs, tail = np.log(x[i:] / x[i]), n - i
        alphas[i] = 1 + tail / logs.sum()
        fitted = -np.expm1((1 - alphas[i]) * logs)
        one[i] = np.abs(fitted - ranks[:tail] / tail).max()
        two[i] = max(one[i], np.abs(fitted - ranks[1 : tail + 1] / tail).max())
    return Plain(alphas, one, two)


def in_window(x: Float64, low: float, high: float) -> npt.NDArray[np.bool_]:
    """Which candidates lie in a window of xmin."""
    return (x[:-1] >= low) & (x[:-1] <= high)


def peak_of(x: Float64, bins: int) -> float:
    """The left edge of the first fullest of equal bins of log10 x."""
    logs = np.log10(x)
    edges = np.linspace(logs[0], logs[-1], bins + 1)
    places = np.clip(np.searchsorted(edges, logs, side="right") - 1, 0, bins - 1)
    return float(10 ** edges[np.bincount(places, minlength=bins).argmax()])


def _random_matrix(rng: np.random.Generator, n: int) -> npt.NDArray[np.floating]:
    """Eigenvalues of a Gaussian matrix; of a block-diagonal one where n is large."""
    block = min(n, 200)
    found = [
        np.linalg.svd(rng.standard_normal((block, 2 * block)), compute_uv=False) ** 2 for _ in range(-(-n // block))
    ]
    return np.concatenate(found)[:n]


def _duplicates(rng: np.random.Generator, n: int) -> npt.NDArray[np.floating]:
    return rng.choice(rng.pareto(2, max(2, n // 10)) + 1, n)


def _ties(rng: np.random.Generator, n: int) -> npt.NDArray[np.floating]:
    """Powers of one number over twelve decades at most, each as often: distances tie up to rounding."""
    base = float(rng.choice([2.0, 1.5, 1.01]))
    return base ** rng.integers(0, math.ceil(27 / math.log(base)), n)


def _constants(rng: np.random.Generator, n: int) -> npt.NDArray[np.floating]:
    """All equal but for some."""
    values = np.full(n, 3.0)
    some = rng.integers(1, max(2, n // 3))
    values[:some] = 3.0 * (1 + rng.pareto(1.5, some)) * rng.choice([1.0, 0.1])
    return values


def _fingers(rng: np.random.Generator, n: int) -> npt.NDArray[np.floating]:
    """A Pareto body and a few eigenvalues far above it."""
    few = max(1, n // 50)
    return np.concatenate([rng.pareto(rng.uniform(1, 5), n - few) + 1, 10 ** rng.uniform(2, 6, few)])


def _two_laws(rng: np.random.Generator, n: int) -> npt.NDArray[np.floating]:
    """A lognormal body under a Pareto tail."""
    tail = rng.integers(2, max(3, n // 2))
    return np.concatenate([rng.lognormal(-1, rng.uniform(0.2, 3), n - tail), 1 + rng.pareto(rng.uniform(1, 4), tail)])


FAMILIES: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.floating]]] = {
    "pareto": lambda rng, n: rng.pareto(rng.uniform(0.5, 6), n) + 1,
    "two laws": _two_laws,
    "random matrix": _random_matrix,
    "duplicates and ties": lambda rng, n: (_duplicates if rng.random() < 0.5 else _ties)(rng, n),
    "constants": _constants,
    "fingers": _fingers,
    "twelve decades": lambda rng, n: 10 ** rng.uniform(-6, 6, n),
}


def spectrum(family: str, seed: int, largest: int) -> Float64:
    """A made-up spectrum of 20 to ``largest`` values, ascending; the sizes are spread evenly over their logarithm."""
    rng = np.random.default_rng([seed, list(FAMILIES).index(family)])
    n = int(np.exp(rng.uniform(np.log(20), np.log(largest))))
    return np.sort(FAMILIES[family](rng, n)).astype(np.float64)
