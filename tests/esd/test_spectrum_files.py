"""A spectrum in a hundred points: nothing visible is lost, whatever the spectrum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpuherd.esd.spectrum_files import MOST_POINTS, UNSEEN, sketch_of

Float64 = npt.NDArray[np.float64]


def spectrum(kind: str, n: int, seed: int = 0) -> Float64:
    rng = np.random.default_rng(seed)
    x: npt.NDArray[Any]
    if kind == "pareto":
        x = rng.pareto(1.5, n) + 1
    elif kind == "bulk":
        x = 0.1 + 4 * rng.beta(1.5, 1.5, n)
    elif kind == "decades":
        x = 10 ** rng.uniform(-9, 3, n)
    elif kind == "ties":
        x = rng.integers(1, 5, n).astype(float)
    else:
        x = np.concatenate([rng.uniform(1, 2, n - 3), [1e3, 1.1e3, 5e4]])
    return np.asarray(np.sort(x), np.float64)


def distance_to(sketch_x: Float64, sketch_y: Float64, x: Float64, y: Float64) -> float:
    """The largest distance of a point of the plot to the sketch's line, in sizes of the plot: written plainly."""
    wide, high = x[-1] - x[0], y.max() - y.min()
    px, py = x / wide, y / high
    sx, sy = sketch_x / wide, sketch_y / high
    worst = 0.0
    for a, b in zip(px, py, strict=True):
        to = np.inf
        for i in range(len(sx) - 1):
            dx, dy = sx[i + 1] - sx[i], sy[i + 1] - sy[i]
            length = dx * dx + dy * dy
            t = 0.0 if length == 0 else min(1.0, max(0.0, ((a - sx[i]) * dx + (b - sy[i]) * dy) / length))
            to = min(to, float(np.hypot(a - sx[i] - t * dx, b - sy[i] - t * dy)))
        worst = max(worst, to)
    return worst


@pytest.mark.parametrize("kind", ["pareto", "bulk", "decades", "ties", "fingers"])
def test_the_plot_looks_the_same(kind: str) -> None:
    x = spectrum(kind, 400)
    sketch = sketch_of(x, 0.0)
    logs = np.log10(x)
    ccdf = np.log10([(x >= value).mean() for value in x])
    assert len(sketch.log10_lambda) <= MOST_POINTS
    got = distance_to(sketch.log10_lambda.astype(float), sketch.log10_ccdf.astype(float), logs, ccdf)
    assert got <= 4e-3
    if len(sketch.log10_lambda) < MOST_POINTS:
        assert got <= UNSEEN * 1.01 + 1e-6  # float32


@pytest.mark.parametrize("n", [1, 2, 3, 5000])
def test_ends_counts_and_histogram(n: int) -> None:
    x = spectrum("decades", n)
    sketch = sketch_of(x, 1e-5)
    kept = x[x > 1e-5]
    assert sketch.count == len(kept)
    assert sketch.below == n - len(kept)
    assert int(sketch.histogram.sum()) == len(kept)
    if len(kept):
        assert sketch.log10_lambda[0] == np.float32(np.log10(kept[0]))
        assert sketch.log10_lambda[-1] == np.float32(np.log10(kept[-1]))
        assert sketch.log10_ccdf[0] == 0
        assert sketch.log10_ccdf[-1] == np.float32(np.log10(1 / len(kept)))
    assert np.all(np.diff(sketch.log10_lambda) >= 0)
    assert np.all(np.diff(sketch.log10_ccdf) <= 0)


@pytest.mark.parametrize("x", [[], [0.0, 0.0], [1e-9]])
def test_nothing_above_the_threshold(x: list[float]) -> None:
    sketch = sketch_of(np.array(x, np.float64), 1e-5)
    assert (sketch.count, sketch.below, len(sketch.log10_lambda)) == (0, len(x), 0)


def test_all_equal_and_zeros_without_a_threshold() -> None:
    sketch = sketch_of(np.array([0.0, 2.0, 2.0, 2.0]), 0.0)
    assert (sketch.count, sketch.below) == (3, 1)
    assert np.all(np.isfinite(sketch.log10_lambda))
    assert sketch.histogram[0] == 3


def test_the_same_points_again() -> None:
    x = spectrum("pareto", 3000)
    first, again = sketch_of(x, 1e-5), sketch_of(x.copy(), 1e-5)
    assert first.log10_lambda.tobytes() == again.log10_lambda.tobytes()
    assert first.log10_ccdf.tobytes() == again.log10_ccdf.tobytes()
