"""Eigenvalues against float64 singular values, on hard cases, and the memory that they take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.esd import eigenvalues
from gpuherd.esd.config import Precision
from gpuherd.esd.spectra.eigenvalues import eigenvalues_of_slabs
from gpuherd.esd.spectra.pooled import readings

Float64 = npt.NDArray[np.float64]

SHAPES = [(1, 1), (1, 7), (7, 1), (5, 5), (40, 60), (60, 40), (33, 2000), (2000, 33), (300, 300)]
LARGE = (257, 20001)


def with_singular_values(sigma: Float64, rows: int, cols: int, seed: int) -> Float64:
    """A dense matrix with these singular values."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((rows, len(sigma))))[0]
    right = np.linalg.qr(rng.standard_normal((cols, len(sigma))))[0]
    product: Float64 = (left * sigma) @ right.T
    return product


def by_svd(W: npt.NDArray[np.floating]) -> Float64:
    """What is to be found: squares of all singular values, ascending, from LAPACK in float64."""
    squares: Float64 = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
    return squares


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, shape) for dtype in (np.float16, np.float32, np.float64) for shape in SHAPES),
        (np.float32, LARGE),
        *(pytest.param(dtype, LARGE, marks=pytest.mark.slow) for dtype in (np.float16, np.float64)),
    ],
)
def test_equal_to_svd_in_float64(shape: tuple[int, int], dtype: type) -> None:
    W: npt.NDArray[np.floating] = np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)
    evals = eigenvalues(W)
    assert evals.dtype == np.float64
    assert evals.shape == (min(shape),)
    assert (np.diff(evals) >= 0).all()
    assert (evals >= 0).all()
    np.testing.assert_allclose(evals, by_svd(W), rtol=0, atol=1e-13 * min(shape) * evals[-1])


@pytest.mark.parametrize("decades", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
@pytest.mark.parametrize("shape", [(120, 120), (100, 400)])
def test_condition_numbers_up_to_1e12(decades: int, shape: tuple[int, int]) -> None:
    sigma = np.logspace(-decades, 0, min(shape))
    evals = eigenvalues(with_singular_values(sigma, *shape, seed=decades))
    np.testing.assert_allclose(evals, sigma**2, rtol=0, atol=1e-13 * min(shape))
    assert len(evals) == min(shape)
    assert (evals >= 0).all()


@pytest.mark.parametrize("shape", [(414, 636), (636, 414), (500, 500), (200, 3000)])
@pytest.mark.parametrize("rank", [8, 64])
def test_small_eigenvalues_of_deficient_matrices_are_rounding_of_sigma_not_of_its_square(
    shape: tuple[int, int], rank: int
) -> None:
    rng = np.random.default_rng(rank)
    W = rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
    evals = eigenvalues(W)
    assert evals[-rank] > 1e-4 * evals[-1]
    assert evals[-rank - 1] < 1e-26 * evals[-1]  # a Gram matrix would leave 1e-15 here


def test_input_is_left_alone_on_every_route() -> None:
    rng = np.random.default_rng(0)
    full = np.asfortranarray(rng.standard_normal((50, 60)))
    deficient = np.asfortranarray(np.outer(rng.standard_normal(50), rng.standard_normal(60)))
    long_deficient = np.outer(rng.standard_normal(30), rng.standard_normal(600))
    for W in (full, full.T, deficient, deficient.T, long_deficient):
        before = W.copy()
        W.flags.writeable = False
        eigenvalues(W)
        np.testing.assert_array_equal(W, before)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(-60, 60), st.integers(0, 2**32 - 1))
def test_invariances(rows: int, cols: int, exponent: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((rows, cols))
    evals = eigenvalues(W)
    near = 1e-13 * min(rows, cols) * evals[-1]
    np.testing.assert_allclose(eigenvalues(W.T), evals, rtol=0, atol=near)
    shuffled = W[rng.permutation(rows)][:, rng.permutation(cols)]
    np.testing.assert_allclose(eigenvalues(shuffled), evals, rtol=0, atol=near)
    rotation = np.linalg.qr(rng.standard_normal((rows, rows)))[0]
    np.testing.assert_allclose(eigenvalues(rotation @ W), evals, rtol=0, atol=near)
    np.testing.assert_allclose(np.ldexp(eigenvalues(np.ldexp(W, exponent)), -2 * exponent), evals, rtol=0, atol=near)


@pytest.mark.parametrize("factor", [1e-150, 1e-120, 1e120, 1e150])
def test_weights_near_the_ends_of_float64(factor: float) -> None:
    W = np.random.default_rng(0).standard_normal((20, 30))
    expected = by_svd(W)
    np.testing.assert_allclose(eigenvalues(W * factor) / factor / factor, expected, rtol=1e-10)


def test_eigenvalues_beyond_float64_are_inf_or_zero_not_nan() -> None:
    W = np.random.default_rng(0).standard_normal((20, 30))
    assert np.isposinf(eigenvalues(W * 1e200)).all()
    assert (eigenvalues(W * 1e-200) == 0).all()


def test_known_spectra() -> None:
    np.testing.assert_array_equal(eigenvalues(np.eye(9, dtype=np.float32)), np.ones(9))
    np.testing.assert_array_equal(eigenvalues(np.zeros((4, 6))), np.zeros(4))
    np.testing.assert_allclose(eigenvalues(np.arange(5.0)[:, None]), [30.0])
    np.testing.assert_allclose(eigenvalues(np.diag([3, 1, 2])), [1.0, 4.0, 9.0])
    assert eigenvalues(np.empty((0, 3))).shape == (0,)


@pytest.mark.parametrize(
    "W",
    [
        np.array([[1.0, np.nan], [0.0, 1.0]]),
        np.array([[1.0, np.inf], [0.0, 1.0]]),
        np.array([[1.0, -np.inf], [0.0, 1.0]]),
        np.ones(3),
        np.ones((2, 2, 2)),
        np.ones((2, 2), dtype=complex),
    ],
)
def test_what_is_no_finite_real_matrix_is_refused(W: npt.NDArray[np.generic]) -> None:
    with pytest.raises(ValueError, match="eigenvalues"):
        eigenvalues(W)


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: rng.standard_normal((60, 200)).astype(np.float32),
        lambda rng: rng.standard_normal((200, 60)),
        lambda rng: rng.standard_normal((300, 40000)).astype(np.float32),
        lambda rng: rng.standard_normal((20, 30)) * 1e120,
        lambda rng: rng.standard_normal((50, 3)) @ rng.standard_normal((3, 70)),
    ],
)
def test_torch_way_equals_the_cpu_way(make: Callable[[np.random.Generator], Float64]) -> None:
    """On the CPU of torch: the same code runs on a GPU, where the checks of a session with one go on."""
    W = make(np.random.default_rng(1))
    evals = eigenvalues(W)
    np.testing.assert_allclose(eigenvalues(W, device="cpu:0"), evals, rtol=0, atol=1e-13 * len(evals) * evals[-1])


def test_torch_way_takes_read_only_weights() -> None:
    W = np.random.default_rng(1).standard_normal((8, 9))
    W.flags.writeable = False
    np.testing.assert_allclose(eigenvalues(W, device="cpu:0"), eigenvalues(W), rtol=1e-10)


MEASURE = """
import re, sys
import numpy as np
from gpuherd.esd import eigenvalues

def peak_kb():  # of this program alone: ru_maxrss would begin with that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

rows, cols = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
warm = eigenvalues(rng.standard_normal((300, 400), dtype=np.float32))  # BLAS has taken its buffers
W = rng.standard_normal((rows, cols), dtype=np.float32)
if sys.argv[3] == "deficient":
    W[:, : cols // 2] = 0.0
    W[: rows // 2] = 0.0
before = peak_kb()
eigenvalues(W)
print(peak_kb() - before)
"""


@pytest.mark.parametrize(
    ("shape", "rank", "grams"),
    [((512, 40000), "full", 1), ((40000, 512), "full", 1), ((512, 40000), "deficient", 4)],
)
def test_peak_memory_is_the_gram_matrix_and_a_panel(shape: tuple[int, int], rank: str, grams: int) -> None:
    """Measured in a process of its own. A float64 copy of these weights would be 156 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, shape), rank],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    gram_mb, panel_mb, allowance_mb = min(shape) ** 2 * 8 / 2**20, 32, 24
    assert int(done.stdout) / 1024 < grams * gram_mb + panel_mb + allowance_mb


def test_the_room_opens_without_numpy() -> None:
    """``gpuherd --help`` imports the room; it must not pay for numpy."""
    code = "import sys, gpuherd.esd; sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    source = str(Path(__file__).parents[3] / "src")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source})


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(30, 40), (600, 700)])
def test_where_ranks_do_not_matter_nothing_is_read_again(precision: Precision, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    W = random.standard_normal((shape[0], 3)) @ random.standard_normal((3, shape[1]))
    reads = 0

    def slabs(most: int) -> Iterator[npt.NDArray[np.float64]]:
        nonlocal reads
        reads += 1
        for start in range(0, shape[1], most):
            yield W[:, start : start + most]

    expected = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
    found = eigenvalues_of_slabs(slabs, *shape, precision=precision, resolve=False).evals
    assert reads == 1
    (stacked,) = readings([W], precision=precision, resolve=False)
    for values in (found, stacked.evals):
        assert (values >= 0).all()
        tolerance = 1e-5 if precision == "float32" else 1e-13
        np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance * expected[-1])
