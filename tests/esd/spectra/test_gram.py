"""The Gram matrix from pieces: equal to the whole, each piece read once, what is unfit seen on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.esd.spectra.eigenvalues import eigenvalues, eigenvalues_of_slabs
from gpuherd.esd.spectra.gram import PANEL_BYTES, PANEL_LEAST, GramSum, panel_length

Matrix = npt.NDArray[Any]


class Read:
    """A matrix in pieces, and how often each number was read."""

    def __init__(self, W: Matrix, most: int | None = None) -> None:
        self.W, self.most, self.times = W, most, 0

    def __call__(self, most: int) -> Iterator[Matrix]:
        self.times += 1
        step = min(most, self.most or most)
        rows, columns = self.W.shape
        for start in range(0, max(rows, columns), step):
            yield self.W[start : start + step] if rows >= columns else self.W[:, start : start + step]


def summed(W: Matrix, step: int, dtype: type = np.float64) -> GramSum:
    gram = GramSum(W.shape[0], W.shape[1], dtype)
    for piece in Read(W, step)(step):
        gram.add(piece)
    return gram


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_pieces_of_any_length_add_up(rows: int, columns: int, step: int, seed: int) -> None:
    W = np.random.default_rng(seed).standard_normal((rows, columns))
    gram = summed(W, step)
    expected = W.T @ W if rows >= columns else W @ W.T
    lower = np.tril_indices(len(expected))
    np.testing.assert_allclose(gram.matrix[lower], expected[lower], rtol=0, atol=1e-13 * np.abs(expected).max())
    assert (gram.bad, gram.empty, gram.exponent) == (0, False, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.integers(-300, 300).map(lambda e: 2.0**e)), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_weights_of_any_size_in_any_order(sizes: list[float], tall: bool, seed: int) -> None:
    """The exponent follows the largest piece; what is lost is below the rounding of the result."""
    rng = np.random.default_rng(seed)
    W = np.concatenate([rng.standard_normal((6, 8)) * size for size in sizes])
    W = W if len(W) >= 8 else np.vstack([W, np.zeros((8 - len(W), 8))])
    reading = eigenvalues_of_slabs(Read(W if tall else W.T, 6), *(W.shape if tall else W.T.shape))
    assert reading.zero == (max(sizes) == 0.0)
    scale = max(sizes) or 1.0
    expected = np.linalg.svd(W / scale, compute_uv=False)[::-1]
    found = np.sqrt(reading.evals) / scale if 2.0**-490 < scale < 2.0**490 else expected
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * (expected[-1] + 1e-300))
    np.testing.assert_allclose(found**2, expected**2, rtol=0, atol=1e-12 * (expected[-1] ** 2 + 1e-300))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(40, 7), (7, 40)])
def test_bad_weights_are_counted_in_the_one_pass(
    value: float, dtype: type, precision: Any, shape: tuple[int, int]
) -> None:
    W: Matrix = np.ones(shape, dtype)
    for i, j in ((3, 2), (5, 5), (6, 1)):
        W[i, j] = value
    read = Read(W, 2)
    reading = eigenvalues_of_slabs(read, *shape, precision=precision)
    assert (reading.bad, len(reading.evals), read.times) == (3, 0, 1)


def test_how_often_a_matrix_is_read() -> None:
    rng = np.random.default_rng(0)
    sound, zero, deficient = rng.standard_normal((50, 80)), np.zeros((50, 80)), np.ones((50, 80))
    for W, times in ((sound, 1), (zero, 1), (deficient, 2)):
        read = Read(W, 16)
        eigenvalues_of_slabs(read, *W.shape)
        assert read.times == times
    W = 1.0 + 1e-4 * rng.standard_normal((50, 80))
    blurred = Read(W)  # float32 finds eigenvalues below 0 here, so it is done again in float64
    reading = eigenvalues_of_slabs(blurred, 50, 80, precision="float32")
    assert blurred.times == 2
    np.testing.assert_array_equal(reading.evals, eigenvalues(W))


@pytest.mark.parametrize("shape", [(300, 40), (40, 300), (64, 64), (64, 90)])
def test_singular_values_come_from_pieces_too(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    W = rng.standard_normal((shape[0], 5)) @ rng.standard_normal((5, shape[1]))
    found = eigenvalues_of_slabs(Read(W, 7), *shape).evals
    expected = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
    np.testing.assert_allclose(found[-5:], expected[-5:], rtol=1e-12)
    assert (found[:-5] < 1e-26 * found[-1]).all()


def test_float32_takes_large_and_small_weights() -> None:
    W = np.random.default_rng(0).standard_normal((30, 60)).astype(np.float32)
    expected = eigenvalues(W)
    for factor in (2.0**-100, 2.0**-60, 1.0, 2.0**60, 2.0**100):
        found = eigenvalues((W * np.float32(factor)), precision="float32") / factor**2
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * expected[-1])
        assert not np.array_equal(found, expected)


@pytest.mark.parametrize("factor", [1e120, 1e-120])
def test_float32_takes_float64_weights_that_it_could_not_hold(factor: float) -> None:
    W = np.random.default_rng(1).standard_normal((30, 60))
    found = eigenvalues(W * factor, precision="float32") / factor / factor
    np.testing.assert_allclose(found, eigenvalues(W), rtol=0, atol=1e-5 * found[-1])


@pytest.mark.parametrize(
    "W", [np.eye(3, dtype=np.int64) * 2**62, np.ones((4, 2), np.longdouble), np.eye(2, dtype="u1")]
)
def test_whole_numbers_and_long_doubles(W: Matrix) -> None:
    np.testing.assert_allclose(eigenvalues(W), np.linalg.svd(W.astype(float), compute_uv=False)[::-1] ** 2, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 8), (8, 3), (8,)])
def test_what_is_no_piece_of_the_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no piece of a tall matrix of side 4"):
        GramSum(9, 4).add(np.ones(shape))


def test_a_panel_is_8_mb_or_what_blas_needs() -> None:
    assert panel_length(4096) * 4096 * 8 == PANEL_BYTES
    assert panel_length(4096, np.float32) * 4096 * 4 == PANEL_BYTES
    assert panel_length(131072) == PANEL_LEAST


def mp_squares(W: npt.NDArray[np.float64]) -> list[Any]:
    import mpmath

    with mpmath.workdps(50):
        A = mpmath.matrix(W.tolist())
        values: list[Any] = sorted(mpmath.eigsy(A * A.T, eigvals_only=True))
        return values


@pytest.mark.parametrize("decades", [2, 4, 6, 8, 10, 12])
@pytest.mark.parametrize("make", ["square", "wide", "gap"])
def test_against_fifty_digits(decades: int, make: str) -> None:
    """|dλ| <= 1e-13 n λ_max at condition numbers from 1e2 to 1e12, and no value lost, negative or NaN."""
    n, m = 14, 14 if make == "square" else 30
    rng = np.random.default_rng(decades)
    left, right = (np.linalg.qr(rng.standard_normal((side, side)))[0] for side in (n, m))
    sigma = np.logspace(-decades, 0, n) if make != "gap" else np.where(np.arange(n) < n // 2, 10.0**-decades, 1.0)
    W = (left * sigma) @ right[:n]
    found = eigenvalues(W)
    assert found.shape == (n,)
    assert (found >= 0).all()
    expected = mp_squares(W)
    worst = max(abs(float(value - theirs)) for value, theirs in zip(found, expected, strict=True))
    assert worst <= 1e-13 * n * float(expected[-1])
