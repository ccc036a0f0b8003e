"""FARMS windows: their number, order and eigenvalues as in a plain loop by the authors' rule, and the fit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd import FitSettings, fit_power_law
from gpuherd.esd.fits.farms import (
    Windows,
    farms_spectra,
    fit_farms,
    window_eigenvalues,
    windows_of_matrix,
    windows_of_slice,
)
from gpuherd.esd.schema import FarmsFit

Float64 = npt.NDArray[np.float64]


def loop_over_matrix(W: Float64) -> list[Float64]:
    """The authors' loop for 100 x 200 windows, 10 an axis: the squared singular values of each, in order."""
    rows, columns = W.shape
    row_step, column_step = max(1, (rows - 100) // 9), max(1, (columns - 200) // 9)
    found: list[Float64] = []
    for i in range(min(10, max(1, (rows - 100) // row_step + 1))):
        for j in range(min(10, max(1, (columns - 200) // column_step + 1))):
            top, left = min(i * row_step, rows - 100), min(j * column_step, columns - 200)
            window = W[top : top + 100, left : left + 200]
            found.append(np.asarray(np.linalg.svd(window, compute_uv=False)[::-1] ** 2, np.float64))
    return found


def loop_over_convolution(kernel: Float64) -> list[Float64]:
    """The authors' loop for a kernel (out, in, height, width): the pool of each group of windows."""
    height, width = kernel.shape[2:]
    slices = [kernel[:, :, i, j] for i in range(height) for j in range(width)]
    slices = [W.T if W.shape[0] < W.shape[1] else W for W in slices]
    rows, columns = slices[0].shape
    high = max(1, int(columns // 2.0))
    groups = []
    for place in range(rows // columns):
        cut = [W[place * high : (place + 1) * high, :columns] * np.sqrt(0.5) for W in slices]
        groups.append(np.sort(np.concatenate([np.linalg.svd(each, compute_uv=False) ** 2 for each in cut])))
    return groups


@pytest.mark.parametrize("shape", [(100, 200), (101, 207), (120, 220), (768, 768), (300, 1000), (1000, 300)])
def test_windows_are_those_of_the_loop(shape: tuple[int, int]) -> None:
    W = np.random.default_rng(0).standard_normal(shape)
    expected = loop_over_matrix(W)
    found = window_eigenvalues(W, windows_of_matrix(*shape))
    assert found.shape == (len(expected), 100)
    assert found == pytest.approx(np.array(expected), rel=1e-7)
    (pool,) = farms_spectra([W])
    assert pool == pytest.approx(np.sort(np.concatenate(expected)), rel=1e-7)


def test_a_large_matrix_gives_ten_thousand_values_in_ten_strips() -> None:
    windows = windows_of_matrix(4096, 11008)
    assert (windows.rows, windows.columns, len(windows.corners)) == (100, 200, 100)
    assert windows.corners[:3] == ((0, 0), (0, 1200), (0, 2400))
    assert windows.corners[-1] == (9 * 444, 9 * 1200)


@given(st.integers(1, 400), st.integers(1, 400))
def test_windows_lie_in_the_matrix_and_keep_their_aspect_ratio(rows: int, columns: int) -> None:
    windows = windows_of_matrix(rows, columns)
    assert windows.columns == 2 * windows.rows or (columns, windows.columns) == (1, 1)
    assert 1 <= len(set(windows.corners)) == len(windows.corners) <= 100
    assert windows.corners == tuple(sorted(windows.corners))
    assert all(i + windows.rows <= rows and j + windows.columns <= columns for i, j in windows.corners)


@given(st.integers(1, 200), st.integers(1, 200))
def test_windows_of_a_slice_lie_in_it(a: int, b: int) -> None:
    rows, columns = max(a, b), min(a, b)
    windows = windows_of_slice(rows, columns)
    assert len(windows.corners) == rows // columns
    assert windows.columns == columns
    assert all(i + windows.rows <= rows and j == 0 for i, j in windows.corners)


@pytest.mark.parametrize("shape", [(64, 32, 3, 3), (16, 48, 3, 3), (12, 12, 1, 1), (20, 3, 5, 5), (8, 1, 3, 3)])
def test_convolutions_as_in_the_loop(shape: tuple[int, int, int, int]) -> None:
    kernel = np.random.default_rng(1).standard_normal(shape)
    slices = [kernel[:, :, i, j] for i in range(shape[2]) for j in range(shape[3])]
    expected = loop_over_convolution(kernel)
    found = farms_spectra(slices, conv=True)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-7)
    fits = [fit_power_law(pool, "xmin_mid") for pool in expected]
    result = fit_farms(slices, FitSettings("xmin_mid", evals_thresh=0.0), conv=True)
    if all(fit.alpha is not None for fit in fits):
        assert result.farms_alpha == pytest.approx(np.mean([fit.alpha or 0.0 for fit in fits]), rel=1e-6)
        assert result.farms_D == pytest.approx(np.mean([fit.D or 0.0 for fit in fits]), rel=1e-6)
        assert result.farms_xmin == pytest.approx(np.mean([fit.xmin or 0.0 for fit in fits]), rel=1e-6)
        assert result.farms_num_evals == sum(map(len, expected))


@pytest.mark.parametrize(
    "settings", [FitSettings("DKS"), FitSettings("xmin_mid", xmin_pos=3), FitSettings("xmin_peak")]
)
def test_the_pool_is_fitted_as_a_spectrum(settings: FitSettings) -> None:
    W = np.random.default_rng(2).standard_t(3, (400, 500))
    pool = np.sort(np.concatenate(loop_over_matrix(W)))
    expected = fit_power_law(pool, settings.fix_fingers, bins=settings.bins, xmin_pos=settings.xmin_pos)
    found = fit_farms([W], settings)
    assert (found.farms_num_evals, found.farms_status) == (10_000, "ok")
    assert found.farms_alpha == pytest.approx(expected.alpha, rel=1e-6)
    assert found.farms_D == pytest.approx(expected.D, abs=1e-9)
    assert found.farms_xmin == pytest.approx(expected.xmin, rel=1e-6)


def test_float32_weights_count_as_the_same_weights_in_float64() -> None:
    W = np.random.default_rng(3).standard_t(3, (150, 260)).astype(np.float32)
    settings = FitSettings("DKS")
    assert fit_farms([W], settings) == fit_farms([W.astype(np.float64)], settings)


def test_two_runs_are_the_same() -> None:
    W = np.random.default_rng(4).standard_t(3, (150, 260))
    assert fit_farms([W], FitSettings("DKS")) == fit_farms([W.copy(order="F")], FitSettings("DKS"))


def test_only_values_above_the_threshold_count() -> None:
    W = np.zeros((100, 200))
    W[:6, :6] = np.diag(np.arange(1.0, 7.0))
    assert fit_farms([W], FitSettings("xmin_mid", evals_thresh=4.0)).farms_num_evals == 4


def test_windows_without_a_fit_are_a_reason() -> None:
    assert fit_farms([np.eye(100, 200)], FitSettings("DKS")) == FarmsFit(
        None, None, None, 100, "all 100 eigenvalues are equal: alpha is infinite"
    )
    found = fit_farms([np.eye(100, 200) * 1e-3], FitSettings("DKS"))
    assert (found.farms_alpha, found.farms_num_evals) == (None, 0)
    assert str(found.farms_status).startswith("too few eigenvalues")


def test_a_single_column() -> None:
    assert windows_of_matrix(50, 1) == Windows(1, 1, tuple((5 * place, 0) for place in range(10)))
    found = fit_farms([np.arange(1.0, 51.0)[:, None]], FitSettings("xmin_mid"))
    assert (found.farms_num_evals, found.farms_status) == (10, "ok")
