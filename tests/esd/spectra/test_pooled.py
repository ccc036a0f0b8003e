"""Spectra of weight matrices that are read now: what is read, what is refused, what memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from gpuherd.esd.config import FitSettings
from gpuherd.esd.pipeline import analyse_matrices
from gpuherd.esd.spectra.eigenvalues import eigenvalues
from gpuherd.esd.spectra.pooled import layer_spectrum, memory_needed, spectrum_of
from gpuherd.models.tensors.matrices import WeightMatrix

Matrix = npt.NDArray[Any]


def unread() -> NoReturn:
    raise AssertionError("the whole matrix was read")


def streamed(W: Matrix) -> WeightMatrix:
    """A matrix that can be read in pieces only."""

    def stream(most: int) -> Iterator[Matrix]:
        rows, columns = W.shape
        for start in range(0, max(rows, columns), most):
            yield W[start : start + most] if rows >= columns else W[:, start : start + most]

    return WeightMatrix("w", "linear", (W.shape[0], W.shape[1]), W.size, None, unread, "w.weight", stream=stream)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (50, 9000), (64, 64)])
def test_a_matrix_is_read_in_pieces(shape: tuple[int, int]) -> None:
    W = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = spectrum_of(streamed(W))
    assert found.problem is None
    np.testing.assert_array_equal(found.evals, eigenvalues(W))
    np.testing.assert_allclose(layer_spectrum([W]).evals, found.evals, rtol=0, atol=1e-13 * found.evals[-1])


def test_a_convolution_comes_whole_and_its_slices_are_pooled() -> None:
    slices = list(np.random.default_rng(0).standard_normal((9, 16, 8)).astype(np.float32))
    matrix = WeightMatrix("c", "conv", (16, 8), 16 * 8 * 9, None, lambda: slices, "c.weight")
    found = spectrum_of(matrix)
    expected = np.sort(np.concatenate([np.linalg.svd(W.astype(float), compute_uv=False) ** 2 / 2 for W in slices]))
    np.testing.assert_allclose(found.evals, expected, rtol=1e-12)


def test_what_is_unfit_is_told() -> None:
    W = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    bad = W.copy()
    bad[3, 4], bad[39, 0], bad[5, 5] = np.nan, np.inf, -np.inf
    cases: dict[str, Matrix] = {
        "3 of 1200 weights are NaN or infinite": bad,
        "all weights are zero": W * 0,
        "too small: 1x9 gives 1 eigenvalue, a fit needs 2": np.ones((1, 9)),
        "the eigenvalues are too large for float64": W.astype(float) * 1e200,
        "all eigenvalues are zero: the weights are too small for float64": W.astype(float) * 1e-200,
    }
    for problem, weights in cases.items():
        for found in (spectrum_of(streamed(weights)), layer_spectrum([weights])):
            assert found.problem == problem
            assert len(found.evals) == 0


def test_a_matrix_too_large_for_the_memory_is_refused_unread() -> None:
    def never(most: int) -> NoReturn:
        raise AssertionError("it was read")

    matrix = WeightMatrix("w", "linear", (131072, 200000), 131072 * 200000, None, unread, "w", stream=never)
    found = spectrum_of(matrix, free=lambda: 22 * 10**9)
    assert found.problem == "needs 137.7 GB for the Gram matrix of side 131072, 22.0 GB are free"
    half = spectrum_of(matrix, precision="float32", free=lambda: 22 * 10**9)
    assert half.problem is not None
    assert half.problem.startswith("needs 68.9 GB for the Gram matrix")


def test_a_matrix_that_fits_exactly_or_where_nobody_knows_is_done() -> None:
    W = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    needed = memory_needed(40, 30)
    assert spectrum_of(streamed(W), free=lambda: needed).problem is None
    assert spectrum_of(streamed(W), free=lambda: None).problem is None
    assert spectrum_of(streamed(W), free=lambda: needed - 1).problem is not None


MEASURE = """
import re, sys
import numpy as np
import scipy.linalg
from gpuherd.esd.spectra.pooled import spectrum_of, memory_needed
from gpuherd.models.tensors.matrices import WeightMatrix

rows, columns = int(sys.argv[1]), int(sys.argv[2])

def matrix(rows, columns):
    def stream(most):
        rng = np.random.default_rng(0)
        for start in range(0, max(rows, columns), most):
            length = min(most, max(rows, columns) - start)
            yield rng.standard_normal((length, columns) if rows >= columns else (rows, length), dtype=np.float32)
    return WeightMatrix("w", "linear", (rows, columns), rows * columns, None, lambda: 1 / 0, "w", stream=stream)

def peak_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

spectrum_of(matrix(300, 400))  # libraries have taken their buffers
before = peak_kb()
assert spectrum_of(matrix(rows, columns)).problem is None
print(peak_kb() - before)
"""


@pytest.mark.parametrize("shape", [(600, 50000), (50000, 600)])
def test_peak_memory_is_the_gram_matrix_and_one_panel_of_32_mb(shape: tuple[int, int]) -> None:
    """In a process of its own. The weights are 114 MB as they come, 229 MB in float64."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, shape)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    assert int(done.stdout) / 1024 <= min(shape) ** 2 * 8 / 2**20 + 32


def test_one_matrix_too_large_harms_no_other() -> None:
    """Through the pipeline, by the memory that this machine has: nobody has 8 TB for one Gram matrix."""

    def never(most: int) -> NoReturn:
        raise AssertionError("it was read")

    vast = WeightMatrix("vast", "linear", (10**6, 2 * 10**6), 2 * 10**12, None, unread, "vast", stream=never)
    W = np.random.default_rng(0).standard_normal((60, 40)).astype(np.float32)
    rows = analyse_matrices(
        [vast, streamed(W)], FitSettings("xmin_mid"), ("cpu",), parallel=False, on_progress=lambda _: None
    )
    assert rows[0].fit_status.startswith("needs 80")
    assert "GB for the Gram matrix of side 1000000" in rows[0].fit_status
    assert (rows[0].alpha, rows[0].M) == (None, 10**6)
    assert rows[1].fit_status == "ok"
