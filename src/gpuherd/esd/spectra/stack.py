"""Eigenvalues of many small matrices of one shape: windows of a matrix, slices of a convolution, cores of adapters.

What costs at this size is not arithmetic but calls, so buffers and workspaces are made once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.eigenvalues import Reading, eigenvalues_of_slabs, is_deficient
from gpuherd.esd.spectra.gram import SAFE
from gpuherd.esd.spectra.lapack import aligned
from gpuherd.esd.spectra.solvers import choice_for, symmetric_eigenvalues

if TYPE_CHECKING:
    from gpuherd.esd.settings import Precision

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


def readings(stack: Iterable[Matrix], *, precision: Precision = "float64", resolve: bool = True) -> Iterator[Reading]:
    """One ``Reading`` for each matrix (see ``eigenvalues_of_slabs``). All are real, of one shape, and no side is 0."""
    solver: _SmallSolver | None = None
    for W in stack:
        if precision == "float32" or min(W.shape) > SMALL_SIDE or 8 * W.size > SMALL_BYTES:
            yield eigenvalues_of_slabs(_pieces(W), *W.shape, precision=precision, resolve=resolve)
            continue
        if solver is None:
            solver = _SmallSolver(*W.shape)
        yield solver.solve(W, resolve=resolve)


def _pieces(W: Matrix) -> Any:
    def slabs(most: int) -> Iterator[Matrix]:
        rows, columns = W.shape
        for start in range(0, max(rows, columns), most):
            yield W[start : start + most] if rows >= columns else W[:, start : start + most]

    return slabs


class _SmallSolver:
    """Float64 eigenvalues of one matrix after the other, all of one shape."""

    def __init__(self, rows: int, columns: int) -> None:
        self._tall = rows >= columns
        n = min(rows, columns)
        self._weights = aligned((columns, rows), np.float64).T  # C order
        self._gram = aligned((n, n), np.float64)
        self._library = choice_for(n).library

    def solve(self, W: Matrix, *, resolve: bool) -> Reading:
        """Its eigenvalues; by singular values where it is of deficient rank, by scaling where its weights are far
        from 1."""
        np.copyto(self._weights, W, casting="unsafe")
        square = float(np.vdot(self._weights, self._weights))
        if square == 0.0 or not 2.0 ** (-2 * _SAFE) <= square <= 2.0 ** (2 * _SAFE):  # also NaN and infinite
            return eigenvalues_of_slabs(_pieces(W), *W.shape, resolve=resolve)
        values = self._values()
        if not resolve:
            return Reading(np.maximum(values, 0.0))
        if is_deficient(values):
            singular = np.linalg.svd(self._weights, compute_uv=False)
            return Reading(np.ascontiguousarray(singular[::-1]) ** 2)
        return Reading(values)

    def _values(self) -> Float64:
        if self._library is None:
            weights = self._weights if self._tall else self._weights.T
            return np.asarray(np.linalg.eigvalsh(weights.T @ weights), np.float64)
        self._library.syrk(self._weights.T, self._gram, transposed=not self._tall, first=True)
        return symmetric_eigenvalues(self._gram)


_SAFE = SAFE[np.dtype(np.float64)]
