"""Whether a Gram matrix will lose small eigenvalues to rounding: guesses, before the time for finding them is spent.

A wrong guess costs time and never digits. Both look at pivots of a Cholesky factorisation, which are the squared
distances of some lines of W (rows of a wide one, columns of a tall one) from those before them:

- ``piece_will_lose_values``: from the first piece that is read, before there is a Gram matrix. A block of a matrix
  whose singular values fall steadily shows how they fall; what follows is continued.
- ``will_lose_values``: from a little more than half of the Gram matrix, which shows where the rank ends.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

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
