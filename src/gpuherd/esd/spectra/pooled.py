"""The spectrum of one layer: the eigenvalues of its slices, pooled; or the reason why it has none.

Knows what makes a matrix unfit to analyse and what a convolution counts. Doesn't know names, fits or columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.eigenvalues import eigenvalues

Matrix = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

# Convolution slices count as W sqrt(1/2), as in WeightWatcher, TempBalance and the published results.
CONV_NORM = 0.5


@dataclass(frozen=True, slots=True)
class LayerSpectrum:
    """The eigenvalues of a layer, or why there are none.

    Attributes:
        evals: float64, all λ of all slices, ascending, the factor of a convolution already in; empty with a problem.
        problem: one sentence, None when the spectrum is sound.
    """

    evals: Float64
    problem: str | None = None


def layer_spectrum(slices: Sequence[Matrix], *, device: str = "cpu", conv: bool = False) -> LayerSpectrum:
    """The pooled spectrum of a matrix, or of a convolution's kh·kw slices of one shape.

    Args:
        slices: real matrices of one shape; read, never changed.
        device: where the eigenvalues are computed (see ``eigenvalues``).
        conv: the slices belong to a convolution: every λ is multiplied by 0.5. Also true of a 1x1 kernel.
    """
    problem = _matrix_problem(slices)
    if problem is not None:
        return LayerSpectrum(np.empty(0), problem)
    evals = np.sort(np.concatenate([eigenvalues(s, device=device) for s in slices]))
    return checked(evals * CONV_NORM if conv else evals)


def checked(evals: Float64) -> LayerSpectrum:
    """Eigenvalues, ascending, as a spectrum; with a problem where no figure could be made from them."""
    problem = _spectrum_problem(evals)
    return LayerSpectrum(evals) if problem is None else LayerSpectrum(np.empty(0), problem)


def _matrix_problem(slices: Sequence[Matrix]) -> str | None:
    """Why the eigenvalues of these slices can't or need not be computed, or None."""
    rows, columns = slices[0].shape
    count = min(rows, columns) * len(slices)
    if count < 2:
        return f"too small: {rows}x{columns} gives {count} eigenvalue{'s' if count != 1 else ''}, a fit needs 2"
    bad = sum(_count_non_finite(s) for s in slices)
    if bad:
        return f"{bad} of {rows * columns * len(slices)} weights are NaN or infinite"
    if not any(s.any() for s in slices):
        return "all weights are zero"
    return None


def _count_non_finite(W: Matrix) -> int:
    """How many entries are NaN or infinite; quick (two reductions, no copy) when there are none."""
    if math.isfinite(float(W.min())) and math.isfinite(float(W.max())):
        return 0
    return int(W.size - np.isfinite(W).sum())


def _spectrum_problem(evals: Float64) -> str | None:
    if len(evals) < 2:
        return f"too small: {len(evals)} eigenvalues were given, a fit needs 2"
    if not math.isfinite(float(evals.sum())):
        return "the eigenvalues are too large for float64"
    if evals[-1] == 0.0:
        return "all eigenvalues are zero: the weights are too small for float64"
    return None
