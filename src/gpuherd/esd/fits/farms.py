"""The power law of a layer's windows of one aspect ratio (FARMS), so that layers of different shapes can be compared.

alpha depends on a matrix's aspect ratio. FARMS (Hu, Goel, Killiakov and Yang, ICML 2025, 2506.06280) therefore takes
the eigenvalues of many windows of a fixed aspect ratio together, and fits the power law to those.

Windows as in the authors' code. Of a matrix: up to 10 x 10 windows of 100 rows and 200 columns, spread evenly. Of a
convolution, at each kernel position, turned so that it is not wide: windows of half as many rows as it has columns, and
all columns, one below the other; those of one place at all kernel positions are fitted together, and the fits averaged.

Knows matrices and the power-law fit; no layers' names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.config import FitSettings
from gpuherd.esd.fits.power_law import PowerLawFit, fit_power_law
from gpuherd.esd.schema import FarmsFit
from gpuherd.esd.spectra.pooled import CONV_NORM, eigenvalues_of_stack

Float64 = npt.NDArray[np.float64]
Matrix = npt.NDArray[Any]

# Columns over rows of a window, its rows, and the windows along each axis.
ASPECT = 2
WINDOW_ROWS = 100
WINDOWS_PER_AXIS = 10


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one size: ``rows`` x ``columns``, with their upper left corners in order."""

    rows: int
    columns: int
    corners: tuple[tuple[int, int], ...]


def windows_of_matrix(rows: int, columns: int) -> Windows:
    """The windows of a matrix: from top to bottom, and in each strip from left to right.

    A window has min(100, rows, columns // 2) rows and twice as many columns. (The authors' code takes 100 x 200 from
    smaller matrices too; what it cuts out of them has another aspect ratio.) Windows of a single column are 1 x 1.
    """
    height = max(1, min(WINDOW_ROWS, rows, columns // ASPECT))
    width = min(columns, ASPECT * height)
    corners = product(_starts(rows, height), _starts(columns, width))
    return Windows(height, width, tuple(corners))


def _starts(length: int, window: int) -> list[int]:
    """Where the windows along an axis start: at most 10, one step apart."""
    step = max(1, (length - window) // (WINDOWS_PER_AXIS - 1))
    number = min(WINDOWS_PER_AXIS, (length - window) // step + 1)
    return [place * step for place in range(number)]


def windows_of_slice(rows: int, columns: int) -> Windows:
    """The windows of one kernel position of a convolution with at least as many rows as columns.

    There are rows // columns, each of columns // 2 rows (at least 1) and all columns, from the top. Half of the rows
    are in none, as in the authors' code.
    """
    height = max(1, columns // ASPECT)
    return Windows(height, columns, tuple((place * height, 0) for place in range(rows // columns)))


def fit_farms(slices: Sequence[Matrix], settings: FitSettings, *, conv: bool = False) -> FarmsFit:
    """Fits a power law to the eigenvalues of the windows, with xmin chosen as for the whole spectrum.

    Args:
        slices: the matrix, or the slices of a convolution; finite.
        settings: method and distance, threshold, bins.
        conv: the slices belong to a convolution, whose eigenvalues count half.
    """
    groups = [x[x > settings.evals_thresh] for x in farms_spectra(slices, conv=conv)]
    fits = [_fit(x, settings) for x in groups]
    found = [fit for fit in fits if fit.alpha is not None]
    number = sum(map(len, groups))
    if not found:
        return FarmsFit(farms_num_evals=number, farms_status=fits[0].status)
    return FarmsFit(
        farms_alpha=_mean([fit.alpha for fit in found]),
        farms_D=_mean([fit.D for fit in found]),
        farms_xmin=_mean([fit.xmin for fit in found]),
        farms_num_evals=number,
        farms_status="ok",
    )


def _fit(x: Float64, settings: FitSettings) -> PowerLawFit:
    return fit_power_law(x, settings.fix_fingers, bins=settings.bins, xmin_pos=settings.xmin_pos, ks=settings.ks)


def _mean(values: Sequence[float | None]) -> float:
    return math.fsum(value for value in values if value is not None) / len(values)


def farms_spectra(slices: Sequence[Matrix], *, conv: bool = False) -> list[Float64]:
    """The pooled eigenvalues of each group of windows, ascending: one group of a matrix, rows // columns (or columns //
    rows) of a convolution."""
    if not conv:
        (W,) = slices
        evals = window_eigenvalues(W, windows_of_matrix(*W.shape))
        return [np.sort(evals, axis=None)]
    tall = [W if W.shape[0] >= W.shape[1] else W.T for W in slices]
    windows = windows_of_slice(*tall[0].shape)
    at_positions = np.stack([window_eigenvalues(W, windows) for W in tall])  # positions, windows, eigenvalues
    pooled = np.moveaxis(at_positions, 1, 0).reshape(len(windows.corners), -1)
    return [np.sort(evals) * CONV_NORM for evals in pooled]


def window_eigenvalues(W: Matrix, windows: Windows) -> Float64:
    """λ of each window, in the order of the windows, ascending; shape (windows, min(rows, columns))."""
    rows, columns = windows.rows, windows.columns
    return eigenvalues_of_stack([W[i : i + rows, j : j + columns] for i, j in windows.corners])
