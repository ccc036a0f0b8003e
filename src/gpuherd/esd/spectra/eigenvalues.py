"""Eigenvalues of W Wᵀ (squared singular values of a weight matrix) in float64.

How: the Gram matrix of the smaller side, added up piece by piece (``gram``), then a symmetric solver for values only
(``solvers``). Where the Gram matrix can't tell small eigenvalues from rounding (ill-conditioned matrices, deficient
rank), which ``gram`` tells as early as it can, the matrix is read again, and ``graded`` finds them from its QR
factorisation, so that ranks come out right.

It knows matrices; it doesn't know models, layers or fits. The CPU way needs numpy and scipy only. The libraries take as
many threads as ``threads`` has settled before they were loaded.

Precision: an eigenvalue from the Gram matrix has an absolute error of about 1e-15 to 1e-14 times the largest one. In
float32 it is 5e-6 (n = 768) to 2e-5 (n = 4096), which can move a searched alpha by 0.1: only where it is asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.graded import FEW, graded_singular_values, smallest_singular_values, triangle
from gpuherd.esd.spectra.gram import (
    EPS,
    SAFE,
    Slabs,
    count_non_finite,
    gram_sum,
    panel_length,
    piece_will_lose_values,
    slabs_of,
    will_lose_values,
)
from gpuherd.esd.spectra.solvers import symmetric_eigenvalues

if TYPE_CHECKING:
    from gpuherd.esd.config import Precision

Float64 = npt.NDArray[np.float64]
Matrix = npt.NDArray[Any]

# Smaller matrices that lose values go to LAPACK's singular values at once: they are as fast there.
GRADED_FROM = 512

# Rows that are put in order at a time: few enough to stay in the cache.
GATHERED = 64

# Beyond 2^±200 squares or sums of squares could leave the range of float64, so the weights are scaled on the way.
SAFE_EXPONENT = SAFE[np.dtype(np.float64)]


@dataclass(frozen=True, slots=True)
class MatrixReading:
    """The result of reading a matrix.

    Attributes:
        evals: float64, shape (min(rows, columns),), ascending, none negative; empty if any weight is ``bad``.
        bad: how many weights are NaN or infinite.
        zero: every weight is 0.
    """

    evals: Float64
    bad: int = 0
    zero: bool = False


def eigenvalues(W: Matrix, *, device: str = "cpu", precision: Precision = "float64", resolve: bool = True) -> Float64:
    """The squared singular values of a matrix, λ_i = σ_i(W)², ascending; not divided by the matrix's size.

    Args:
        W: shape (rows, cols), any real type; read, never changed. Nothing is rounded below float64.
        device: ``"cpu"``, or a torch device such as ``"cuda:0"`` for the Gram matrix and its eigenvalues (float64
            there too). Matrices of deficient rank are finished on the CPU.
        precision: of the arithmetic (see ``eigenvalues_of_slabs``).
        resolve: see ``eigenvalues_of_slabs``.

    Returns:
        float64, shape (min(rows, cols),), no negative value. A value too large for float64 is inf, one too small is 0
        (weights beyond about 1e±150).

    Peak memory on the CPU over W itself: that of ``eigenvalues_of_slabs``.

    Raises:
        ValueError: W is not a real 2-D matrix, or has NaN or infinite entries (these never get as far as LAPACK).
    """
    if W.ndim != 2 or W.dtype.kind not in "fiu":
        raise ValueError(f"eigenvalues() takes a real matrix, not an array of shape {W.shape} and type {W.dtype}")
    if W.size == 0:
        return np.empty(0)

    slabs = slabs_of(W)
    if device == "cpu":
        reading = eigenvalues_of_slabs(slabs, *W.shape, precision=precision, resolve=resolve)
    else:
        reading = _on_device(slabs, (W.shape[0], W.shape[1]), device, precision, resolve)
    if reading.bad:
        raise ValueError(f"eigenvalues() takes a finite matrix; {reading.bad} entries of this one are NaN or infinite")
    return reading.evals


def eigenvalues_of_slabs(
    slabs: Slabs, rows: int, columns: int, *, precision: Precision = "float64", resolve: bool = True
) -> MatrixReading:
    """As ``eigenvalues`` on the CPU, for a matrix that is read in pieces and never whole in memory.

    Args:
        slabs: reads it, each number once. A matrix whose small eigenvalues the Gram matrix loses is read once or
            twice again; with float32 also one of which an eigenvalue came out 0 or less, which is then done in float64.
        rows, columns: its shape, 1 or more each.
        precision: ``"float32"`` takes Gram matrix and solver in float32: half the time and memory, and an error of
            1e-6 to 1e-5 of the largest eigenvalue, so that the small ones are noise. In a square matrix one of them is
            often noise below 0, and the matrix then takes half as long again as in float64.
        resolve: False where ranks don't matter: what rounding leaves below 0 is 0, and nothing is done again.

    Peak memory: n² float64 for n = min(rows, columns), a panel of 8 MB (128 n values where that is more), and the
    piece as the reader gives it. Where the Gram matrix loses values about 4 n² float64.
    """
    exact = resolve and precision == "float64"
    foresee = exact and min(rows, columns) >= GRADED_FROM

    def loses(piece: Matrix) -> bool:
        return foresee and piece_will_lose_values(_upright(piece, rows >= columns))

    dtype = np.float32 if precision == "float32" else np.float64
    gram = gram_sum(slabs, rows, columns, dtype, unless=loses)
    if gram is None:
        bad, exponent, order = _surveyed(slabs, rows, columns)
        if bad:
            return MatrixReading(np.empty(0), bad=bad)
        return MatrixReading(scaled_back(_resolved(slabs, rows, columns, exponent, order, None), exponent))
    if gram.bad:
        return MatrixReading(np.empty(0), bad=gram.bad)
    if gram.empty:
        return MatrixReading(np.zeros(min(rows, columns)), zero=True)
    exponent, order = gram.exponent, np.argsort(-gram.matrix.diagonal(), kind="stable")
    values = None if foresee and will_lose_values(gram.matrix) else symmetric_eigenvalues(gram.matrix)
    del gram
    if values is None or (exact and is_deficient(values)):
        values = _resolved(slabs, rows, columns, exponent, order, values)
    elif not resolve:
        values = np.maximum(values, 0.0)
    elif precision == "float32" and values[0] <= 0.0:
        return eigenvalues_of_slabs(slabs, rows, columns)
    return MatrixReading(scaled_back(values, exponent))


def is_deficient(values: Float64) -> bool:
    """Whether the least eigenvalue of a float64 Gram matrix is no more than its rounding (and may be negative)."""
    return bool(values[0] < len(values) * EPS * values[-1])


def scaled_back(values: Float64, exponent: int) -> Float64:
    """The eigenvalues of a matrix whose weights were divided by 2^exponent; inf and 0 where float64 ends."""
    if not exponent:
        return values
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(values, 2 * exponent)


def _surveyed(slabs: Slabs, rows: int, columns: int) -> tuple[int, int, npt.NDArray[np.intp]]:
    """How many weights are NaN or infinite; the exponent that takes all of them near 1, 0 where they lie near enough;
    and the order of the shorter side's lines from the longest to the shortest."""
    bad, peak = 0, 0.0
    lengths = np.zeros(min(rows, columns))
    for piece in slabs(panel_length(len(lengths))):
        part = _upright(piece, rows >= columns).astype(np.float64, copy=False)
        size = max(abs(float(part.min())), abs(float(part.max())))
        if not math.isfinite(size):
            bad += count_non_finite(piece)
        elif size:
            peak, exponent = max(peak, size), _exponent(size)
            part = _divided(part, exponent)
            with np.errstate(over="ignore", under="ignore"):
                lengths = np.hypot(lengths, np.ldexp(np.sqrt(np.einsum("ij,ij->j", part, part)), exponent))
        del piece, part
    return bad, _exponent(peak), np.argsort(-lengths, kind="stable")


def _exponent(peak: float) -> int:
    """Of the power of two that weights of this size are divided by."""
    exponent = math.frexp(peak)[1]
    return exponent if abs(exponent) > SAFE_EXPONENT else 0


def _resolved(
    slabs: Slabs, rows: int, columns: int, exponent: int, order: npt.NDArray[np.intp], known: Float64 | None
) -> Float64:
    """Eigenvalues of W Wᵀ / 4^exponent, ascending; the error of each root is a few ε of the largest one.

    Args:
        order: of the rows (columns of a tall matrix), from the longest to the shortest.
        known: the eigenvalues as the Gram matrix gives them, where that was asked; the large ones are kept.
    """
    n = min(rows, columns)
    lost = 0 if known is None else int(np.searchsorted(known, n * EPS * known[-1]))
    few = known is not None and n >= GRADED_FROM and lost <= FEW * n
    if few and rows == columns:  # LU factors take half the time of a triangle
        small = smallest_singular_values(_core(slabs, rows, columns, exponent, order), lost)
        if small is not None and known is not None:
            return np.sort(np.concatenate([small**2, known[lost:]]))
    R = _triangle(slabs, rows, columns, exponent, order)
    if n >= GRADED_FROM:
        if few and rows != columns and known is not None:
            small = smallest_singular_values(R, lost, triangular=True)
            if small is not None:
                return np.sort(np.concatenate([small**2, known[lost:]]))
        values = graded_singular_values(R, None if known is None else np.sqrt(np.maximum(known, 0.0)))
        if values is not None:
            return values**2
    return _ascending_svdvals(R) ** 2


def _core(slabs: Slabs, rows: int, columns: int, exponent: int, order: npt.NDArray[np.intp]) -> Float64:
    """The tall one of W and Wᵀ, divided by 2^exponent, its columns in this order; Fortran order."""
    core: Float64 = np.empty((max(rows, columns), min(rows, columns)), order="F")
    start = 0
    for piece in slabs(core.shape[1]):
        part = _upright(piece, rows >= columns)
        _gather(_divided(part, exponent), order, core[start : start + len(part)])
        start += len(part)
        del piece, part
    return core


def _triangle(slabs: Slabs, rows: int, columns: int, exponent: int, order: npt.NDArray[np.intp]) -> Float64:
    """R of the QR factorisation of ``_core``.

    A long matrix is reduced n rows at a time, by updating R with the next ones, so that no float64 copy of the whole is
    needed.
    """
    n, m = min(rows, columns), max(rows, columns)
    if 2 * m <= 3 * n:
        return triangle(_core(slabs, rows, columns, exponent, order))
    stacked: Float64 = np.zeros((2 * n, n), order="F")  # the triangle so far, and below it the next rows
    for piece in slabs(n):
        part = _upright(piece, rows >= columns)
        _gather(_divided(part, exponent), order, stacked[n : n + len(part)])
        stacked[n + len(part) :] = 0.0
        stacked[:n] = triangle(stacked)
        del piece, part
    return stacked[:n].copy(order="F")


def _upright(piece: Matrix, tall: bool) -> Matrix:
    return piece if tall else piece.T


def _gather(part: Matrix, order: npt.NDArray[np.intp], out: Float64) -> None:
    """``part[:, order]`` into ``out``, which is in Fortran order; by whole rows of ``part``."""
    for start in range(0, len(part), GATHERED):
        out[start : start + GATHERED] = part[start : start + GATHERED].take(order, axis=1)


def _divided(piece: Matrix, exponent: int) -> Matrix:
    return np.ldexp(piece.astype(np.float64), -exponent) if exponent else piece


def _ascending_svdvals(core: Float64) -> Float64:
    from scipy.linalg import svdvals

    values: Float64 = svdvals(core, overwrite_a=True, check_finite=False)[::-1]
    return values


def _on_device(slabs: Slabs, shape: tuple[int, int], device: str, precision: Precision, resolve: bool) -> MatrixReading:
    """As ``eigenvalues_of_slabs``, by torch on ``device``. What it can't resolve, or finds unfit, the CPU looks at."""
    import torch

    from gpuherd.esd.spectra.device import device_arithmetic, eigenvalues_of_grams, gram_on_device, ieee_float32

    arithmetic = device_arithmetic(device, precision)
    stored = (np.float64, np.float32)
    panels = (
        torch.from_numpy(piece.astype(piece.dtype if piece.dtype in stored else np.float64, order="C", copy=True))
        for piece in slabs(panel_length(min(shape)))
    )
    with ieee_float32():
        gram = gram_on_device(panels, shape, device, arithmetic.gram)
        values = None if gram is None else eigenvalues_of_grams([gram], arithmetic.solver, resolve=resolve)[0]
    return eigenvalues_of_slabs(slabs, *shape, resolve=resolve) if values is None else MatrixReading(values)
