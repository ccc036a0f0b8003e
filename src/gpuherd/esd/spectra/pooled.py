"""The spectrum of one layer: the eigenvalues of its slices, pooled; or the reason why it has none.

Knows what makes a matrix unfit to analyse, what a convolution counts and what a Gram matrix takes of the memory.
Doesn't know names, fits or columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpuherd.engines.host import free_memory
from gpuherd.esd.spectra.eigenvalues import Reading, eigenvalues, eigenvalues_of_slabs
from gpuherd.esd.spectra.gram import count_non_finite, panel_length
from gpuherd.esd.spectra.stack import readings

if TYPE_CHECKING:
    from gpuherd.esd.settings import Precision
    from gpuherd.models.tensors.matrices import WeightMatrix

Matrix = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

# Convolution slices count as W sqrt(1/2), as in WeightWatcher, TempBalance and the published results.
CONV_NORM = 0.5

GB = 10**9


@dataclass(frozen=True, slots=True)
class LayerSpectrum:
    """The eigenvalues of a layer, or why there are none.

    Attributes:
        evals: float64, all λ of all slices, ascending, the factor of a convolution already in; empty with a problem.
        problem: one sentence, None when the spectrum is sound.
    """

    evals: Float64
    problem: str | None = None


def spectrum_of(
    matrix: WeightMatrix,
    *,
    device: str = "cpu",
    precision: Precision = "float64",
    free: Callable[[], int | None] = free_memory,
) -> LayerSpectrum:
    """The spectrum of a weight matrix that is read now: in pieces, a convolution whole, a product by its factors.

    Args:
        matrix: not one that is skipped. Each number is read once; a matrix of deficient rank is read again.
        device: where the eigenvalues are computed (see ``eigenvalues``).
        precision: of the arithmetic on the CPU.
        free: tells the bytes of memory that can still be taken, None where nobody knows.

    Returns:
        A spectrum, always: a matrix that can't be analysed, or is too large for the memory, has a ``problem``.
    """
    if matrix.factors is not None:
        from gpuherd.esd.spectra.low_rank import low_rank_spectrum

        return low_rank_spectrum(matrix.factors(), conv=matrix.kind == "conv")
    rows, columns = matrix.shape
    if matrix.kind == "conv" or device != "cpu":
        return layer_spectrum(matrix.slices(), device=device, conv=matrix.kind == "conv", precision=precision)
    problem = too_small(rows, columns, 1) or _too_large(rows, columns, precision, free())
    if problem is not None:
        return LayerSpectrum(np.empty(0), problem)
    reading = eigenvalues_of_slabs(matrix.slabs, rows, columns, precision=precision)
    return _pooled((reading,), rows * columns, conv=False)


def layer_spectrum(
    slices: Sequence[Matrix],
    *,
    device: str = "cpu",
    conv: bool = False,
    precision: Precision = "float64",
    resolve: bool = True,
) -> LayerSpectrum:
    """The pooled spectrum of a matrix, or of a convolution's kh·kw slices of one shape.

    Args:
        slices: real matrices of one shape; read, never changed.
        device: where the eigenvalues are computed (see ``eigenvalues``).
        conv: the slices belong to a convolution: every λ is multiplied by 0.5. Also true of a 1x1 kernel.
        precision: of the arithmetic.
        resolve: False where ranks don't matter (see ``eigenvalues_of_slabs``).
    """
    rows, columns = slices[0].shape
    problem = too_small(rows, columns, len(slices))
    if problem is None and device == "cpu":
        problem = _too_large(rows, columns, precision, free_memory())
    if problem is not None:
        return LayerSpectrum(np.empty(0), problem)
    if device == "cpu":
        read: Iterable[Reading] = readings(slices, precision=precision, resolve=resolve)
    else:
        read = _on_device(slices, device, precision, resolve)
    return _pooled(read, rows * columns * len(slices), conv=conv)


def checked(evals: Float64) -> LayerSpectrum:
    """Eigenvalues, ascending, as a spectrum; with a problem where no figure could be made from them."""
    problem = _spectrum_problem(evals)
    return LayerSpectrum(evals) if problem is None else LayerSpectrum(np.empty(0), problem)


def memory_needed(rows: int, columns: int, precision: Precision = "float64") -> int:
    """Bytes that the eigenvalues of a matrix of this shape take on the CPU: its Gram matrix and a panel."""
    dtype = np.dtype(precision)
    side = min(rows, columns)
    return dtype.itemsize * (side * side + 2 * side * min(max(rows, columns), panel_length(max(1, side), dtype)))


def _pooled(read: Iterable[Reading], weights: int, *, conv: bool) -> LayerSpectrum:
    """The spectrum of slices that have been read: ``weights`` numbers in all."""
    done = list(read)
    bad = sum(reading.bad for reading in done)
    if bad:
        return LayerSpectrum(np.empty(0), f"{bad} of {weights} weights are NaN or infinite")
    if all(reading.zero for reading in done):
        return LayerSpectrum(np.empty(0), "all weights are zero")
    evals = done[0].evals if len(done) == 1 else np.sort(np.concatenate([reading.evals for reading in done]))
    return checked(evals * CONV_NORM if conv else evals)


def _on_device(slices: Iterable[Matrix], device: str, precision: Precision, resolve: bool) -> Iterable[Reading]:
    for W in slices:
        bad = count_non_finite(W)
        evals = np.empty(0) if bad else eigenvalues(W, device=device, precision=precision, resolve=resolve)
        yield Reading(evals, bad=bad, zero=not bad and not W.any())


def too_small(rows: int, columns: int, slices: int) -> str | None:
    """Why a matrix, or a convolution, of this shape has no spectrum to fit, or None."""
    count = min(rows, columns) * slices
    if count >= 2:
        return None
    return f"too small: {rows}x{columns} gives {count} eigenvalue{'s' if count != 1 else ''}, a fit needs 2"


def _too_large(rows: int, columns: int, precision: Precision, free: int | None) -> str | None:
    """Why a matrix of this shape can't be analysed within the memory that is free, or None."""
    needed = memory_needed(rows, columns, precision)
    if free is None or needed <= free:
        return None
    side = min(rows, columns)
    return f"needs {needed / GB:.1f} GB for the Gram matrix of side {side}, {free / GB:.1f} GB are free"


def _spectrum_problem(evals: Float64) -> str | None:
    if len(evals) < 2:
        return f"too small: {len(evals)} eigenvalues were given, a fit needs 2"
    with np.errstate(over="ignore"):
        total = float(evals.sum())
    if not math.isfinite(total):
        return "the eigenvalues are too large for float64"
    if evals[-1] == 0.0:
        return "all eigenvalues are zero: the weights are too small for float64"
    return None
