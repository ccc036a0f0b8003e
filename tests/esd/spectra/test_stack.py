"""Many small matrices against one at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.esd.spectra.eigenvalues import eigenvalues
from gpuherd.esd.spectra.pooled import SMALL_SIDE, eigenvalues_of_stack, readings


@pytest.mark.parametrize(
    "shape", [(7, 100, 200), (5, 200, 100), (3, 1, 9), (4, 9, 1), (2, 50, 50), (2, SMALL_SIDE + 1, 520)]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8])
def test_equal_to_one_at_a_time(shape: tuple[int, int, int], dtype: type) -> None:
    stack: npt.NDArray[np.generic] = (np.random.default_rng(0).standard_normal(shape) * 20).astype(dtype)
    found = eigenvalues_of_stack(stack)
    assert found.shape == (shape[0], min(shape[1:]))
    for row, W in zip(found, stack, strict=True):
        expected = np.linalg.svd(W.astype(np.float64), compute_uv=False)[::-1] ** 2
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-13 * len(row) * expected[-1])
        assert (row >= 0).all()
        assert (np.diff(row) >= 0).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.integers(1, 12), st.integers(1, 12), st.integers(-320, 300), st.integers(0, 2**32 - 1))
def test_any_scale_and_rank_as_the_single_way(count: int, rows: int, columns: int, exponent: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(0, min(rows, columns) + 1))
    stack = rng.standard_normal((count, rows, rank)) @ rng.standard_normal((count, rank, columns))
    stack = np.ldexp(stack, exponent)
    found = eigenvalues_of_stack(stack)
    for row, W in zip(found, stack, strict=True):
        np.testing.assert_allclose(row, eigenvalues(W), rtol=0, atol=1e-13 * len(row) * row[-1])


def test_views_and_read_only_matrices_are_left_alone() -> None:
    W = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    W.flags.writeable = False
    windows = [W[i : i + 100, j : j + 200] for i in (0, 50, 200) for j in (0, 13, 200)]
    found = eigenvalues_of_stack(windows)
    np.testing.assert_array_equal(found, eigenvalues_of_stack([window.copy() for window in windows]))


def test_deficient_members_beside_sound_ones() -> None:
    rng = np.random.default_rng(0)
    stack = rng.standard_normal((3, 40, 60))
    stack[1, 10:] = 0.0
    stack[2] = 0.0
    found = eigenvalues_of_stack(stack)
    assert found[0][0] > 0.1
    assert (found[1][:30] < 1e-26 * found[1][-1]).all()
    assert (found[1][30:] > 1.0).all()
    assert (found[2] == 0).all()


def test_what_is_no_finite_real_matrix_is_refused() -> None:
    good = np.ones((2, 3))
    bad: list[list[npt.NDArray[np.generic]]] = [
        [good, np.ones((3, 2))],
        [np.ones(3)],
        [np.ones((2, 3), complex)],
        [good, np.full((2, 3), np.nan)],
        [np.full((2, 3), -np.inf)],
    ]
    for stack in bad:
        with pytest.raises(ValueError, match="stack"):
            eigenvalues_of_stack(stack)
    assert eigenvalues_of_stack(np.empty((0, 4, 5))).shape == (0, 0)
    assert eigenvalues_of_stack(np.empty((2, 0, 5))).shape == (2, 0)


def test_readings_tell_what_is_wrong_with_each() -> None:
    stack = np.ones((3, 4, 5), np.float32)
    stack[1, 2, 3] = np.nan
    stack[1, 0, 0] = np.inf
    stack[2] = 0
    first, second, third = readings(stack)
    assert (first.bad, first.zero) == (0, False)
    assert (second.bad, len(second.evals)) == (2, 0)
    assert (third.bad, third.zero) == (0, True)


def test_float32_is_float32() -> None:
    stack = np.random.default_rng(0).standard_normal((2, 60, 80))
    exact, single = eigenvalues_of_stack(stack), eigenvalues_of_stack(stack, precision="float32")
    assert not np.array_equal(exact, single)
    np.testing.assert_allclose(single, exact, rtol=0, atol=1e-4 * exact.max())
