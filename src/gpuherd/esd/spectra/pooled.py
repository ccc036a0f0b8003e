"""The spectrum of one layer: the eigenvalues of its slices, pooled; or the reason why it has none.

Knows what makes a matrix unfit to analyse, what a convolution counts and what a Gram matrix takes of the memory.
Doesn't know names, fits or columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpuherd.engines.host import free_memory
from gpuherd.esd.spectra.eigenvalues import MatrixReading, eigenvalues, eigenvalues_of_slabs, is_deficient
from gpuherd.esd.spectra.gram import SAFE, count_non_finite, panel_length, slabs_of
from gpuherd.esd.spectra.solvers import aligned, choice_for, symmetric_eigenvalues

if TYPE_CHECKING:
    from gpuherd.esd.config import Precision
    from gpuherd.models.tensors.matrices import WeightMatrix

# --- Stacks of small matrices -----------------------------------------------------------------------------------------
#
# Eigenvalues of many small matrices of one shape: windows of a matrix, slices of a convolution, cores of adapters.
#
# What costs at this size is not arithmetic but calls, so buffers and workspaces are made once for all of them.

Float64 = npt.NDArray[np.float64]
Matrix = npt.NDArray[Any]

# Beyond this side a matrix is worth the calls of ``eigenvalues``, which reads it in panels.
SMALL_SIDE = 512
SMALL_BYTES = 16 << 20


def eigenvalues_of_stack(stack: Sequence[Matrix] | Matrix, *, precision: Precision = "float64") -> Float64:
    """The squared singular values of each matrix of a stack, as ``eigenvalues`` gives them.

    Args:
        stack: shape (b, rows, columns), or a sequence of b matrices of one shape, of any real type; views are fine.
            Read, never changed.
        precision: as in ``eigenvalues``.

    Returns:
        float64, shape (b, min(rows, columns)), each row ascending, no negative value.

    Memory: the result and one matrix in float64 for small ones.

    Raises:
        ValueError: not real matrices of one shape, or NaN or infinite entries.
    """
    shapes = {matrix.shape for matrix in stack}
    if any(len(shape) != 2 for shape in shapes) or len(shapes) > 1 or any(W.dtype.kind not in "fiu" for W in stack):
        raise ValueError("eigenvalues_of_stack() takes real matrices of one shape")
    side = min(shapes.pop()) if shapes else 0
    result: Float64 = np.empty((len(stack), side))
    if side == 0:
        return result
    for index, reading in enumerate(readings(stack, precision=precision)):
        if reading.bad:
            raise ValueError(f"matrix {index} of the stack has {reading.bad} entries that are NaN or infinite")
        result[index] = reading.evals
    return result


def readings(
    stack: Iterable[Matrix], *, precision: Precision = "float64", resolve: bool = True
) -> Iterator[MatrixReading]:
    """One ``MatrixReading`` for each matrix (see ``eigenvalues_of_slabs``). All are real, of one shape, none empty."""
    solver: _SmallSolver | None = None
    for W in stack:
        if precision == "float32" or min(W.shape) > SMALL_SIDE or 8 * W.size > SMALL_BYTES:
            yield eigenvalues_of_slabs(slabs_of(W), *W.shape, precision=precision, resolve=resolve)
            continue
        if solver is None:
            solver = _SmallSolver(*W.shape)
        yield solver.solve(W, resolve=resolve)


class _SmallSolver:
    """Float64 eigenvalues of one matrix after the other, all of one shape."""

    def __init__(self, rows: int, columns: int) -> None:
        self._tall = rows >= columns
        n = min(rows, columns)
        self._weights = aligned((columns, rows), np.float64).T  # C order
        self._gram = aligned((n, n), np.float64)
        self._library = choice_for(n).library

    def solve(self, W: Matrix, *, resolve: bool) -> MatrixReading:
        """Its eigenvalues; by singular values where it is of deficient rank, by scaling where its weights are far
        from 1."""
        np.copyto(self._weights, W, casting="unsafe")
        square = float(np.vdot(self._weights, self._weights))
        if square == 0.0 or not 2.0 ** (-2 * _SAFE) <= square <= 2.0 ** (2 * _SAFE):  # also NaN and infinite
            return eigenvalues_of_slabs(slabs_of(W), *W.shape, resolve=resolve)
        values = self._values()
        if not resolve:
            return MatrixReading(np.maximum(values, 0.0))
        if is_deficient(values):
            singular = np.linalg.svd(self._weights, compute_uv=False)
            return MatrixReading(np.ascontiguousarray(singular[::-1]) ** 2)
        return MatrixReading(values)

    def _values(self) -> Float64:
        if self._library is None:
            weights = self._weights if self._tall else self._weights.T
            return np.asarray(np.linalg.eigvalsh(weights.T @ weights), np.float64)
        self._library.syrk(self._weights.T, self._gram, transposed=not self._tall, first=True)
        return symmetric_eigenvalues(self._gram)


_SAFE = SAFE[np.dtype(np.float64)]


# --- A layer ----------------------------------------------------------------------------------------------------------

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
        free: returns the bytes of memory that can still be taken, None where that is unknown.

    Returns:
        A spectrum, always: a matrix that can't be analysed, or is too large for the memory, has a ``problem``.
    """
    if matrix.factors is not None:
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
        read: Iterable[MatrixReading] = readings(slices, precision=precision, resolve=resolve)
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


def _pooled(read: Iterable[MatrixReading], weights: int, *, conv: bool) -> LayerSpectrum:
    """The spectrum of slices that have been read: ``weights`` numbers in all."""
    done = list(read)
    bad = sum(reading.bad for reading in done)
    if bad:
        return LayerSpectrum(np.empty(0), f"{bad} of {weights} weights are NaN or infinite")
    if all(reading.zero for reading in done):
        return LayerSpectrum(np.empty(0), "all weights are zero")
    evals = done[0].evals if len(done) == 1 else np.sort(np.concatenate([reading.evals for reading in done]))
    return checked(evals * CONV_NORM if conv else evals)


def _on_device(slices: Iterable[Matrix], device: str, precision: Precision, resolve: bool) -> Iterable[MatrixReading]:
    for W in slices:
        bad = count_non_finite(W)
        evals = np.empty(0) if bad else eigenvalues(W, device=device, precision=precision, resolve=resolve)
        yield MatrixReading(evals, bad=bad, zero=not bad and not W.any())


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


# --- Products of thin factors -----------------------------------------------------------------------------------------
#
# The spectrum of a product of two thin factors, such as the update s B A of a LoRA adapter, from its r x r core.
#
# With the QR factorisations left = Q1 R1 and rightᵀ = Q2 R2, left right = Q1 (R1 R2ᵀ) Q2ᵀ: the product has the
# singular values of the core R1 R2ᵀ, of r rows and columns at most, and min(M, N) - r that are exactly zero. No M x N
# matrix is made, and the zeros are zeros: ranks come out right.
#
# Knows factors. Doesn't know adapters, names or fits.

Factor = npt.NDArray[np.floating[Any]]


def low_rank_spectrum(products: Sequence[tuple[Factor, Factor]], *, conv: bool = False) -> LayerSpectrum:
    """The pooled spectrum of a product, or of those of a convolution's kernel positions.

    Args:
        products: left factors (M, r) and right factors (r, N), of one shape.
        conv: they belong to a convolution: every eigenvalue is multiplied by 0.5, as in ``layer_spectrum``.

    Returns:
        min(M, N) eigenvalues for each product, zeros with them; or the reason why there are none.
    """
    (rows, _), (_, columns) = products[0][0].shape, products[0][1].shape
    nothing = np.empty(0)
    problem = too_small(rows, columns, len(products))
    if problem is not None:
        return LayerSpectrum(nothing, problem)
    if not all(np.isfinite(factor).all() for product in products for factor in product):
        return LayerSpectrum(nothing, "the adapter's factors have NaN or infinite entries")
    if not any(left.any() and right.any() for left, right in products):
        return LayerSpectrum(nothing, "all weights are zero")
    values = np.sort(np.concatenate([low_rank_eigenvalues(left, right) for left, right in products]))
    return checked(values * CONV_NORM if conv else values)


def low_rank_eigenvalues(left: Factor, right: Factor) -> Float64:
    """The squared singular values of ``left @ right``, ascending.

    Args:
        left: (M, r), finite.
        right: (r, N), finite.

    Returns:
        float64, min(M, N) of them, of which at most r are not zero; absolute error about 1e-15 r times the largest for
        factors that are not themselves close to dependent. Work (M + N) r², memory (M + N) r.
    """
    from scipy.linalg import qr, svdvals

    (rows, _), (_, columns) = left.shape, right.shape
    result: Float64 = np.zeros(min(rows, columns))
    # Each factor is scaled to entries of 1 at most, so that no product leaves the range of float64.
    first, second = _exponent(left), _exponent(right)
    if first is None or second is None:
        return result
    (r1,) = qr(np.ldexp(left.astype(np.float64), -first), mode="r", overwrite_a=True, check_finite=False)
    (r2,) = qr(np.ldexp(right.T.astype(np.float64), -second), mode="r", overwrite_a=True, check_finite=False)
    rank = left.shape[1]
    sigma = svdvals(r1[:rank] @ r2[:rank].T, overwrite_a=True, check_finite=False)
    with np.errstate(over="ignore", under="ignore"):
        result[len(result) - len(sigma) :] = np.ldexp(sigma[::-1] ** 2, 2 * (first + second))
    return result


def _exponent(factor: Factor) -> int | None:
    """The binary exponent of the largest entry, None where all are zero."""
    peak = float(np.abs(factor).max(initial=0.0))
    return math.frexp(peak)[1] if peak else None
