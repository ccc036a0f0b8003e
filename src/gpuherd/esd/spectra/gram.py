"""The Gram matrix of a weight matrix, added up from pieces, so that the weights are never whole in memory.

A piece is some rows of a tall matrix or some columns of a wide one. What makes a matrix unfit (NaN, infinite, nothing
but zeros) is seen in the same pass. It knows pieces and rounding; it doesn't know files, solvers or what is done next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.solvers import ALIGNMENT, aligned, choice_for

Matrix = npt.NDArray[Any]
Real = npt.NDArray[np.floating[Any]]

# Reads a matrix in pieces: called with the longer side of a piece, at most; gives arrays of shape (most, columns) for a
# matrix of at least as many rows as columns, else (rows, most).
Slabs = Callable[[int], Iterable[Matrix]]

# What is converted at a time, 8 MB in the precision of the Gram matrix, so that with the piece as it was stored and as
# it was read one panel stays below 32 MB; but at least 128 rows or columns, because dsyrk is slow below.
PANEL_BYTES = 8 << 20
PANEL_LEAST = 128

# Where weights lie beyond 2^±SAFE, they are scaled by a power of two, so that no sum of squares leaves the type's range
# (and LAPACK's solvers don't scale again, which would cost a pass).
SAFE = {np.dtype(np.float64): 200, np.dtype(np.float32): 24}


def panel_length(n: int, dtype: npt.DTypeLike = np.float64) -> int:
    """How many rows or columns of length ``n`` make a panel."""
    return max(PANEL_LEAST, PANEL_BYTES // (np.dtype(dtype).itemsize * n))


def slabs_of(W: Matrix) -> Slabs:
    """The reader of a matrix that is in memory."""

    def slabs(most: int) -> Iterator[Matrix]:
        rows, columns = W.shape
        for start in range(0, max(rows, columns), most):
            yield W[start : start + most] if rows >= columns else W[:, start : start + most]

    return slabs


class GramSum:
    """The Gram matrix of the shorter side, W Wᵀ or Wᵀ W, divided by 4^``exponent``.

    Attributes:
        matrix: Fortran order, shape (n, n); its lower triangle counts. Not initialised while ``empty``.
        length: how long pieces may be.
        exponent: the weights were divided by 2^exponent; 0 unless they lie far from 1.
        bad: how many weights were NaN or infinite; with any, the matrix means nothing.
        empty: no weight but zeros has come.
    """

    def __init__(self, rows: int, columns: int, dtype: npt.DTypeLike = np.float64) -> None:
        self._tall = rows >= columns
        self._n, longer = min(rows, columns), max(rows, columns)
        self._dtype = np.dtype(dtype)
        self.length = min(longer, panel_length(self._n, dtype))
        self._buffer: Real | None = None
        # First the large piece: where it can't be had, that is said before a library takes buffers of its own.
        self.matrix: Real = aligned((self._n, self._n), self._dtype)
        self._library = choice_for(self._n).library
        self.exponent = 0
        self.bad = 0
        self.empty = True

    def add(self, slab: Matrix) -> None:
        """Adds a piece, which is read and not kept. Raises ValueError for one that is no piece of this matrix."""
        if slab.ndim != 2 or slab.shape[1 if self._tall else 0] != self._n:
            raise ValueError(f"no piece of a {'tall' if self._tall else 'wide'} matrix of side {self._n}: {slab.shape}")
        if self.bad or not self._scaled_for(slab):
            self.bad += count_non_finite(slab)
            return
        panel = self._panel(slab)
        self._syrk(panel)
        # A square can't be infinite and can't vanish, so the diagonal tells at once what was among the weights.
        trace = float(np.trace(self.matrix, dtype=np.float64))
        if not math.isfinite(trace):
            self.bad = count_non_finite(slab)
        elif trace == 0.0:
            self.empty = True

    def free_panel(self) -> None:
        """Gives the panel's memory back before the solver takes some."""
        self._buffer = None

    def _scaled_for(self, slab: Matrix) -> bool:
        """Sets the exponent so that the piece can be squared. False if that shows that it is not finite.

        Numbers of fewer bits than the Gram matrix's can't leave its range: nothing has to be looked at.
        """
        if slab.dtype.kind != "f" or slab.dtype.itemsize < self._dtype.itemsize:
            return True
        peak = max(abs(float(slab.min())), abs(float(slab.max())))  # NaN comes through min and max
        if not math.isfinite(peak):
            return False
        safe = SAFE[self._dtype]
        exponent = math.frexp(peak)[1]
        needed = 0 if abs(exponent) <= safe else exponent
        if peak == 0.0:
            return True
        if self.empty:
            self.exponent = needed
        elif exponent > self.exponent + safe:
            # Earlier pieces were smaller: what they lose at the low end is negligible against this one.
            with np.errstate(all="ignore"):  # above the diagonal there is no telling what lies
                np.ldexp(self.matrix, 2 * (self.exponent - needed), out=self.matrix)
            self.exponent = needed
        return True

    def _panel(self, slab: Matrix) -> Real:
        """The piece in the right type, scaled, contiguous and aligned: as it is, where it is all of that."""
        ready = slab.dtype == self._dtype and slab.flags.c_contiguous and slab.ctypes.data % ALIGNMENT == 0
        if ready and not self.exponent:
            return slab
        if self._buffer is None or self._buffer.size < slab.size:
            self._buffer = aligned((max(slab.size, self.length * self._n),), self._dtype)
        panel = self._buffer[: slab.size].reshape(slab.shape)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if self.exponent:  # before the numbers are narrowed, which can take them out of the range
                np.ldexp(slab, -self.exponent, out=panel, casting="unsafe")
            else:
                np.copyto(panel, slab, casting="unsafe")
        return panel

    def _syrk(self, panel: Real) -> None:
        """Adds the panel's products. In C order a tall piece is a wide one in Fortran order, and the other way."""
        first, self.empty = self.empty, False
        if self._library is not None:
            self._library.syrk(panel.T, self.matrix, transposed=not self._tall, first=first)
            return
        from scipy.linalg import blas

        routine = blas.ssyrk if self._dtype == np.float32 else blas.dsyrk
        if first:
            self.matrix[...] = 0.0
        routine(1.0, panel.T, beta=1.0, c=self.matrix, trans=int(not self._tall), lower=1, overwrite_c=1)


def gram_sum(
    slabs: Slabs,
    rows: int,
    columns: int,
    dtype: npt.DTypeLike = np.float64,
    *,
    unless: Callable[[Matrix], bool] | None = None,
) -> GramSum | None:
    """The Gram matrix of a matrix of this shape (no side 0), read once. Memory: n² numbers and a panel of 8 MB.

    ``unless`` is asked about the first piece; where it says yes, nothing more is read, and None is returned.
    """
    gram = GramSum(rows, columns, dtype)
    first = True
    for slab in slabs(gram.length):
        if first and unless is not None and unless(slab):
            return None
        first = False
        gram.add(slab)
        del slab  # it has to be gone when the next one is read
    gram.free_panel()
    return gram


def count_non_finite(slab: Matrix) -> int:
    """How many entries are NaN or infinite."""
    return int(slab.size - np.isfinite(slab).sum())


# --- Small eigenvalues that rounding would lose -----------------------------------------------------------------------
#
# Whether a Gram matrix will lose small eigenvalues to rounding: guesses, before the time for finding them is spent.
#
# A wrong guess costs time and never digits. Both look at pivots of a Cholesky factorisation, which are the squared
# distances of some lines of W (rows of a wide one, columns of a tall one) from those before them:
#
# - ``piece_will_lose_values``: from the first piece that is read, before there is a Gram matrix. A block of a matrix
#   whose singular values fall steadily shows how they fall; what follows is continued.
# - ``will_lose_values``: from a little more than half of the Gram matrix, which shows where the rank ends.

EPS = float(np.finfo(np.float64).eps)

# Of a piece: one line in so many is looked at, but at most this part of the piece's length.
PIECE_PART, PIECE_DEPTH = 6, 3 / 4
# Of a Gram matrix: the part of its lines that is looked at; where half of all values are lost, it shows.
GRAM_SHARE = 0.53
# How near to the Gram matrix's rounding the least value may come. (Of a square random matrix few of the values lie
# below 1/100 of the bulk's.)
NEAR = 100.0
# In float32 smaller pivots, as a part of the line's square, may be rounding: float64 looks at them.
FLOAT32_PIVOT = 1e-3


def piece_will_lose_values(piece: npt.NDArray[Any]) -> bool:
    """Whether the Gram matrix of W's shorter side is likely to lose many small eigenvalues, from a piece of W.

    Args:
        piece: shape (length, n), whole lines of the longer side; anything in it may be NaN or infinite.
    """
    n = piece.shape[1]
    count = min(int(PIECE_DEPTH * len(piece)), n // PIECE_PART)
    if count < 8:
        return False
    length = min(len(piece), 2 * count)
    lines = np.linspace(0, n - 1, count).astype(np.intp)
    some = piece[np.linspace(0, len(piece) - 1, length).astype(np.intp)][:, lines].astype(np.float64)
    peak = max(abs(float(some.min())), abs(float(some.max())))
    if not (0.0 < peak < math.inf):
        return False
    some /= peak
    diagonal = np.einsum("ij,ij->j", some, some)
    some = some[:, np.argsort(-diagonal, kind="stable")]
    pivots = _pivots(some.T @ some)
    if pivots is None:
        return True
    # Of random lines so long each has lost this part of its square to those before it.
    pivots *= length / (length - np.arange(count))
    return bool(_continued(pivots, n) < NEAR * n * EPS * float(diagonal.max()))


def will_lose_values(gram: npt.NDArray[np.floating[Any]]) -> bool:
    """As ``piece_will_lose_values``, from the Gram matrix. Takes 2 % of the time of finding its eigenvalues.

    Args:
        gram: shape (n, n); its lower triangle is read.
    """
    n = len(gram)
    diagonal = gram.diagonal()
    top = float(diagonal.max())
    floor = n * EPS * top  # λ_max is at least as large
    if float(diagonal.min()) < floor:
        return True
    some = int(GRAM_SHARE * n)
    part = gram[:some, :some]
    with np.errstate(all="ignore"):  # above the diagonal there is no telling what lies
        pivots = _pivots((part * (1.0 / top)).astype(np.float32))
        if pivots is None or bool(np.any(pivots * top < FLOAT32_PIVOT * part.diagonal())):
            pivots = _pivots(part * (1.0 / top))
    shorter = min(1.0, float(diagonal.min() / diagonal[:some].min()))  # lines than those that were looked at
    return pivots is None or shorter * _continued(pivots, n) < NEAR * n * EPS


def _pivots(gram: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64] | None:
    """The pivots of a Cholesky factorisation; None if it ends at one below 0."""
    from scipy.linalg import lapack

    factorise = lapack.spotrf if gram.dtype == np.float32 else lapack.dpotrf
    factor, info = factorise(np.asfortranarray(gram), lower=1, clean=0, overwrite_a=1)
    return None if info > 0 else factor.diagonal().astype(np.float64) ** 2


def _continued(pivots: npt.NDArray[np.float64], n: int) -> float:
    """Pivot ``n``, if they go on as they fall: ln p_k = a - b k^q, with q from the last quarter, half and whole, but
    between 0 (a power of k) and 1 (a power of 10)."""
    count = len(pivots)
    pivots = np.minimum.accumulate(pivots)
    with np.errstate(divide="ignore", invalid="ignore"):
        early, middle, last = (float(np.log(pivots[count // part - 1])) for part in (4, 2, 1))
    before, fall = early - middle, middle - last
    if not math.isfinite(last) or fall <= 0.0:
        return math.exp(last) if math.isfinite(last) else 0.0
    doubling = min(max(fall / before, 1.0), 2.0) if before > 0.0 else 2.0
    doublings = math.log2(n / count)
    steps = doublings if doubling == 1.0 else doubling * (doubling**doublings - 1) / (doubling - 1)
    return math.exp(max(last - fall * steps, -700.0))
