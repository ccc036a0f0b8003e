"""Bands of Gram matrices: the eigenvalues stay, whatever the size, the width and what the matrix is like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.esd.spectra.device import BAND, Band, to_band


@st.composite
def grams(draw: st.DrawFn) -> np.ndarray:
    n = draw(st.integers(1, 70))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["full", "low", "diagonal", "zeros", "block", "scaled"]))
    W = random.standard_normal((n, n + 3))
    if kind == "low":
        W = W[:, :2] @ random.standard_normal((2, n))
    elif kind == "diagonal":
        W = np.diag(random.standard_normal(n))
    elif kind == "zeros":
        W = np.zeros((n, n))
    elif kind == "block":
        W[n // 2 :] = 0.0
        W[:, :2] = 0.0
    elif kind == "scaled":
        W *= 10.0 ** random.uniform(-6, 6, (n, 1))
    return np.asarray(W @ W.T)


@settings(max_examples=80)
@given(grams(), st.integers(1, 80))
def test_the_band_has_the_eigenvalues_of_the_matrix(gram: np.ndarray, width: int) -> None:
    n = len(gram)
    band = to_band(torch.from_numpy(gram.copy()), width)
    assert band.diagonals.shape == (min(width, max(1, n - 1)) + 1, n)
    assert band.diagonals.flags.f_contiguous
    dense = np.zeros((n, n))
    for below, diagonal in enumerate(band.diagonals):
        assert not diagonal[max(0, n - below) :].any()
        for i in range(n - below):
            dense[i + below, i] = dense[i, i + below] = diagonal[i]
    expected = np.linalg.eigvalsh(gram)
    room = 4e-15 * n * max(abs(expected[-1]), abs(expected[0]))
    assert np.abs(np.linalg.eigvalsh(dense) - expected).max() <= room
    assert np.abs(band.eigenvalues() - expected).max() <= room


def test_a_matrix_of_the_usual_width() -> None:
    W = np.random.default_rng(0).standard_normal((400, 900))
    band = to_band(torch.from_numpy(W @ W.T))
    expected = np.linalg.svd(W, compute_uv=False)[::-1] ** 2
    assert band.diagonals.shape == (BAND + 1, 400)
    assert np.abs(band.eigenvalues() - expected).max() <= 1e-13 * expected[-1]


def test_asking_twice_gives_the_same() -> None:
    W = np.random.default_rng(1).standard_normal((100, 100))
    band = to_band(torch.from_numpy(W @ W.T))
    assert (band.eigenvalues() == band.eigenvalues()).all()


@pytest.mark.parametrize("width", [1, 2, 5])
def test_narrow_bands_are_solved_too(width: int) -> None:
    diagonals = np.asfortranarray(np.random.default_rng(2).standard_normal((width + 1, 40)))
    dense = np.zeros((40, 40))
    for below, diagonal in enumerate(diagonals):
        dense += np.diag(diagonal[: 40 - below], -below)
    expected = np.linalg.eigvalsh(dense)
    assert np.abs(Band(diagonals).eigenvalues() - expected).max() <= 1e-13
