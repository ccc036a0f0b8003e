"""Random orders: nothing lost, nothing favoured, in one heap or many."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpuherd.esd.fits.randomised import DEALT, HEAP, shuffled


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (300, 500), (700, 900), (3, DEALT + 7)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_entries_are_kept_and_the_array_is_left_as_it_was(shape: tuple[int, int], dtype: type) -> None:
    W: npt.NDArray[Any] = rng(1).standard_normal(shape).astype(dtype)
    before = W.copy()
    order = shuffled(W, rng())
    assert (order.shape, order.dtype) == (W.shape, W.dtype)
    assert not np.shares_memory(order, W)
    assert np.array_equal(W, before)
    assert np.array_equal(np.sort(order, axis=None), np.sort(W, axis=None))
    assert W.size < 2 or not np.array_equal(order, W)


@pytest.mark.parametrize("heap", [1, 3, 16, 1000])
def test_a_view_that_is_not_contiguous(heap: int) -> None:
    W = np.arange(240.0).reshape(12, 20)[:, ::2].T
    assert np.array_equal(np.sort(shuffled(W, rng(), heap=heap), axis=None), np.sort(W, axis=None))


@pytest.mark.parametrize("heap", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_order_is_as_likely(heap: int) -> None:
    """All 24 orders of 4 entries in 12,000 draws, from 4, 2 and 1 heaps: chi-squared with 23 degrees of freedom."""
    numbers, draws = np.arange(4, dtype=np.int8), rng()
    counts = dict.fromkeys(permutations(range(4)), 0)
    for _ in range(12_000):
        counts[tuple(shuffled(numbers, draws, heap=heap).tolist())] += 1
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 60  # by chance in 1 of 30,000 runs


def test_entries_go_anywhere_from_anywhere() -> None:
    """Eighths of a large array before and after: 64 pairs, as many entries in each as chance has it."""
    size = 32 * HEAP
    origin = shuffled(np.arange(size, dtype=np.int32), rng()) // (size // 8)
    pairs = np.bincount(origin * 8 + np.arange(size) // (size // 8), minlength=64)
    assert ((pairs - size / 64) ** 2 / (size / 64)).sum() < 100  # 49 degrees of freedom
    neighbours = np.corrcoef(origin[:-1], origin[1:])[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(size)


def test_the_same_state_gives_the_same_order() -> None:
    W = np.arange(5 * HEAP)
    assert np.array_equal(shuffled(W, rng(3)), shuffled(W, rng(3)))
    assert not np.array_equal(shuffled(W, rng(3)), shuffled(W, rng(4)))
