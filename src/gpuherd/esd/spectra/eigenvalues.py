"""Eigenvalues of W Wᵀ (squared singular values of a weight matrix) in float64.

How: the float64 Gram matrix of the smaller side, added up panel by panel with BLAS dsyrk, then LAPACK's values-only
symmetric solver. Where the Gram matrix can't tell small eigenvalues from rounding (matrices of deficient rank), the
singular values themselves are computed, so that ranks come out right.

It knows matrices; it doesn't know models, layers or fits. The CPU way needs numpy and scipy only. BLAS takes as many
threads as OMP_NUM_THREADS (or OPENBLAS_NUM_THREADS) says when the process starts; nothing here changes that.

Precision: an eigenvalue from the Gram matrix has an absolute error of about 1e-15 to 1e-14 times the largest one. Never
float32: it moves fitted alphas by up to 0.1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import blas, eigh, lapack, svdvals

Float64 = npt.NDArray[np.float64]
Matrix = npt.NDArray[Any]

EPS = float(np.finfo(np.float64).eps)

# A panel is what is converted to float64 at a time: 32 MB, or 256 columns where that is more (dsyrk is slow below).
PANEL_BYTES = 32 << 20
PANEL_MIN = 256

# Beyond 2^±256 squares or sums of squares could leave the range of float64, so the weights are scaled on the way.
SAFE_EXPONENT = 256


def eigenvalues(W: Matrix, *, device: str = "cpu") -> Float64:
    """The squared singular values of a matrix, λ_i = σ_i(W)², ascending; not divided by the matrix's size.

    Args:
        W: shape (rows, cols), any real type; read, never changed. Nothing is rounded below float64.
        device: ``"cpu"``, or a torch device such as ``"cuda:0"`` for the Gram matrix and its eigenvalues (float64
            there too). Matrices of deficient rank are finished on the CPU.

    Returns:
        float64, shape (min(rows, cols),), no negative value. A value too large for float64 is inf, one too small is 0
        (weights beyond about 1e±150).

    Peak memory on the CPU over W itself: n² float64 for n = min(rows, cols), and one float64 panel of 32 MB (256 n
    values where that is more). For matrices of deficient rank about 4 n² float64.

    Raises:
        ValueError: W is not a real 2-D matrix, or has NaN or infinite entries (these never get as far as LAPACK).
    """
    if W.ndim != 2 or W.dtype.kind not in "fiu":
        raise ValueError(f"eigenvalues() takes a real matrix, not an array of shape {W.shape} and type {W.dtype}")
    if W.size == 0:
        return np.empty(0)
    peak = max(abs(float(W.min())), abs(float(W.max())))  # NaN, if there is one, comes through min and max
    if not math.isfinite(peak):
        raise ValueError("eigenvalues() takes a finite matrix; this one has NaN or infinite entries")
    exponent = math.frexp(peak)[1]
    if abs(exponent) <= SAFE_EXPONENT:
        exponent = 0
    wide = W if W.shape[0] <= W.shape[1] else W.T
    values = _gram_spectrum(wide, exponent) if device == "cpu" else _eigenvalues_torch(wide, device, exponent)
    if values[0] < wide.shape[0] * EPS * values[-1]:  # the least is rounding, and may be negative
        values = _singular_values(wide, exponent) ** 2
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(values, 2 * exponent)


def _panel(wide: Matrix, start: int, columns: int, exponent: int) -> Float64:
    """Some columns of ``wide``: float64, Fortran order, divided by 2^exponent. A view where nothing has to be done."""
    panel: Float64 = np.asarray(wide[:, start : start + columns], dtype=np.float64, order="F")
    return np.ldexp(panel, -exponent) if exponent else panel


def _panel_columns(n: int) -> int:
    """How many columns of n rows make a panel."""
    return max(PANEL_MIN, PANEL_BYTES // (8 * n))


def _gram_spectrum(wide: Matrix, exponent: int) -> Float64:
    """Eigenvalues of the Gram matrix of the rows of ``wide``, ascending; rounding can leave some below 0.

    The solver is LAPACK's dsyevd for values only, through scipy.linalg.eigh, in place. It is as fast as or faster than
    what else scipy, numpy and torch offer for n from 384 to 2048 (benchmarks/esd.py); scipy's plain ``lapack.dsyevd``
    takes up to twice as long, for want of workspace.
    """
    n, m = wide.shape
    step = _panel_columns(n)
    gram: Float64 = np.zeros((n, n), order="F")
    for start in range(0, m, step):
        # No name for the panel: the last one has to be gone when the next one is made.
        gram = blas.dsyrk(1.0, _panel(wide, start, step, exponent), beta=1.0, c=gram, lower=1, overwrite_c=1)
    values: Float64 = eigh(gram, lower=True, eigvals_only=True, overwrite_a=True, check_finite=False, driver="evd")
    return values


def _singular_values(wide: Matrix, exponent: int) -> Float64:
    """Singular values, ascending, accurate to rounding of the largest: they resolve rank where a Gram matrix can't.

    A long matrix is first reduced to the triangle R of its QR factorisation, n columns at a time (W = Rᵀ Qᵀ has the
    singular values of R), so that no float64 copy of the whole is needed.
    """
    n, m = wide.shape
    if 2 * m <= 3 * n:
        core = _panel(wide, 0, m, exponent)
        # The solver overwrites what it works on.
        return _ascending_svdvals(core.copy(order="F") if np.may_share_memory(core, wide) else core)
    stacked: Float64 = np.zeros((2 * n, n), order="F")  # the triangle so far, and below it the next columns of wide
    workspace = int(lapack.dgeqrf_lwork(2 * n, n)[0])
    for start in range(0, m, n):
        used = min(n, m - start)
        stacked[n : n + used] = _panel(wide, start, n, exponent).T
        stacked[n + used :] = 0.0
        stacked = lapack.dgeqrf(stacked, lwork=workspace, overwrite_a=1)[0]
        stacked[:n] = np.triu(stacked[:n])
    return _ascending_svdvals(stacked[:n].copy(order="F"))


def _ascending_svdvals(core: Float64) -> Float64:
    values: Float64 = svdvals(core, overwrite_a=True, check_finite=False)[::-1]
    return values


def _eigenvalues_torch(wide: Matrix, device: str, exponent: int) -> Float64:
    """As ``_gram_spectrum``, by torch on ``device``: panels go over as they are stored and become float64 there."""
    import torch

    n, m = wide.shape
    step = _panel_columns(n)
    gram = torch.zeros((n, n), dtype=torch.float64, device=device)
    for start in range(0, m, step):
        part = wide[:, start : start + step]
        part = np.ldexp(part.astype(np.float64), -exponent) if exponent else part.copy()
        panel = torch.from_numpy(part).to(device).to(torch.float64)
        gram.addmm_(panel, panel.T)
    values: Float64 = torch.linalg.eigvalsh(gram).cpu().numpy()
    return values
