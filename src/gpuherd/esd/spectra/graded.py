"""Eigenvalues that a Gram matrix can't tell from its rounding, found without a singular value decomposition of W.

A Gram matrix W Wᵀ loses every λ below about n ε λ_max, that is every σ below about 1e-6 σ_max. Two ways find them from
the triangle R of W's QR factorisation (W is short and wide here: Wᵀ = Q R), which has the singular values of W with an
error of ε σ_max:

- ``graded_singular_values``: for many lost values. The rows of R fall from large to small, so R Rᵀ is a graded matrix:
  its entry (i, j) is of the size of r_ii r_jj. Reduced to tridiagonal form from the large end, a graded matrix keeps
  its small eigenvalues to a relative error of about ε (Barlow and Demmel 1990, "Computing accurate eigensystems of
  scaled diagonally dominant matrices"; Demmel and Veselić 1992). That fails where many equal large values stand before
  a gap, so R is first divided at its gaps; where there is none, the values that a Gram matrix does tell from rounding
  are kept, and the lost ones are found from the small rows.
- ``smallest_singular_values``: for a few lost values, by inverse iteration on a subspace; of a square matrix without R.

Whether the graded way held is checked, not assumed: Σ ln σ_i = Σ ln |r_ii|, and one small value that came out wrong
changes the sum on the left. It knows triangles; it doesn't know how W is read (``eigenvalues``).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.gram import EPS
from gpuherd.esd.spectra.solvers import aligned, symmetric_eigenvalues

Float64 = npt.NDArray[np.float64]

# R is divided where its diagonal falls by GAP at least (the gap in the values is wider: of many rows the last pivots
# before one are small), after few rows by WIDE_GAP over their number, if what the division leaves out changes no value
# by more than NEGLECTED of the largest.
GAP, WIDE_GAP, NEGLECTED = 20.0, 1e3, 1e-13
# A diagonal entry that is rounding, and later ones are so many times as large: a row that depends on earlier ones.
OUT_OF_PLACE = 1e3
# Small rows of at most FAINT of the largest value need no grading: what rounding leaves of their squares is 1e-15 of
# it. Up to DIM that is tried, and checked. A tilt whose square is below TILT changes no large value.
FAINT, DIM, TILT = 1e-7, 1e-5, 1e-13
# Without a gap, R is divided where its diagonal has fallen to this part of the largest value: a hundred times and more
# what a Gram matrix can tell from rounding.
OVERLAP = 1e-3
# Σ ln σ_i may differ from Σ ln |r_ii| by this: a relative error of as much in one value. Good results differ by 1e-8.
LARGEST_MISFIT = 1e-5
# Values of which more than this share is lost are not looked for one by one.
FEW = 1 / 16
ITERATIONS = 40
# Columns that are factorised at a time: LAPACK's dgeqrt takes 0.7 of the time of its dgeqrf, whose blocks have 32.
QR_BLOCK = 128


def graded_singular_values(R: Float64, known: Float64 | None = None) -> Float64 | None:
    """All singular values of a triangle, ascending, with errors of a few ε of the largest; None where the check says
    that they are not so exact.

    Args:
        R: upper triangular, shape (n, n), n at least 1, rows roughly from large to small; left as it is.
        known: the values as the roots of a Gram matrix's eigenvalues, ascending; those that it can tell from rounding
            are kept. They save the time of finding them again.
    """
    top = float(np.linalg.norm(R[0]))
    diagonal = np.abs(R.diagonal())
    # A row that depends on earlier ones has a tiny diagonal entry amid large ones: such rows are moved to the end.
    later = np.maximum.accumulate(diagonal[::-1])[::-1]
    tiny = diagonal < EPS * len(R) * top
    if np.any(tiny & (later > OUT_OF_PLACE * diagonal)):
        R = triangle(np.asfortranarray(R[:, np.argsort(tiny, kind="stable")]))
    few = 2 * int(np.count_nonzero(diagonal < OVERLAP * top)) <= len(R)  # else it takes as long as all of them
    values = None if known is None or not few else _peeled(R, known, top, 0.0)
    return _values(R, top, 0.0) if values is None else values


def triangle(tall: Float64) -> Float64:
    """R of the QR factorisation of a matrix of at least as many rows as columns; Fortran order, overwritten."""
    from scipy.linalg import lapack

    n = tall.shape[1]
    factored = lapack.dgeqrt(min(QR_BLOCK, n), tall, overwrite_a=1)[0]
    upper: Float64 = factored[:n]
    for start in range(0, n, QR_BLOCK):
        end = min(start + QR_BLOCK, n)
        upper[start:end, start:end] = np.triu(upper[start:end, start:end])
        upper[end:, start:end] = 0.0
    return upper


def smallest_singular_values(A: Float64, count: int, *, triangular: bool = False) -> Float64 | None:
    """The ``count`` smallest singular values of a square matrix, ascending; None where the iteration does not converge.

    Inverse iteration on a subspace of twice as many directions, from the same random start each time, with a triangle
    or the LU factors of what is none. Errors: 1e-4 of each value, or n ε of the largest where that is more.
    """
    from scipy.linalg import lapack, svdvals

    n = len(A)
    size = min(n, 2 * count + 8)
    scale = float(np.linalg.norm(A[0]))
    factors, pivots = A.copy(order="F"), np.arange(n, dtype=np.int32)
    if not triangular:
        factors, pivots, _ = lapack.dgetrf(factors, overwrite_a=1)
    diagonal = factors.diagonal()
    factors[np.diag_indices(n)] += np.where(diagonal == 0.0, EPS * scale, 0.0)  # what is singular can't be divided by

    def divide(block: Float64, trans: int) -> Float64:
        if triangular:
            return np.asarray(lapack.dtrtrs(factors, block, trans=trans)[0])
        return np.asarray(lapack.dgetrs(factors, pivots, block, trans=trans)[0])

    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((n, size)))[0]
    before = np.full(count, np.inf)
    for _ in range(ITERATIONS):
        half = divide(basis, 1)
        half /= np.abs(half).max(axis=0)  # of the inverse of something tiny
        basis = np.linalg.qr(divide(half, 0))[0]
        if not np.isfinite(basis).all():
            return None
        values = svdvals(np.linalg.qr(A @ basis, mode="r"), check_finite=False)[::-1][:count]
        if np.all(np.abs(values - before) <= np.maximum(1e-5 * values, EPS * scale)):
            return np.asarray(values, np.float64)
        before = values
    return None


def _values(R: Float64, top: float, log_factor: float) -> Float64 | None:
    """As ``graded_singular_values``; ``log_factor`` is Σ ln σ_i − Σ ln |r_ii| as the caller knows it."""
    rows = _gap(np.abs(R.diagonal()))
    if rows is not None:
        values = _divided(R, rows, top, log_factor)
        if values is not None:
            return values
    values = _of_gram(_upper_gram(R))
    if float(np.linalg.norm(R)) <= EPS * len(R) * top:  # nothing but noise
        return values
    return values if _fits(values, _log_diagonal(R) + log_factor) else _peeled(R, values, top, log_factor)


def _peeled(R: Float64, values: Float64, top: float, log_factor: float) -> Float64 | None:
    """``values``, the least of which are lost, with these found from the small rows of R; None where that is too
    inexact.

    The small rows are parted from the large ones as in ``_divided``, though there is no gap, and far above the largest
    value that is lost. What is neglected then changes values near the place of the division, and lost ones by the
    fourth power of how far they are below it. Those that both ways find have to agree.

    Args:
        values: all, ascending, with errors as those of a Gram matrix's eigenvalues.
    """
    from scipy.linalg import solve_triangular

    own = float(values[-1])
    cut = math.sqrt(len(R) * EPS) * own
    lost = int(np.searchsorted(values, cut))
    later = np.maximum.accumulate(np.abs(R.diagonal())[::-1])[::-1]
    rows = int(np.count_nonzero(later >= OVERLAP * own))
    if not 0 < rows < len(R) - lost:
        return None
    large, above, small = R[:rows, :rows], R[:rows, rows:], R[rows:, rows:]
    try:
        F = solve_triangular(large, above, check_finite=False)
        C, log_stretch = _root(F.T)
        block = solve_triangular(C, small.T, lower=True, check_finite=False).T
        half = F @ solve_triangular(C, block.T, trans="T", lower=True, check_finite=False)
        E = solve_triangular(large, half, trans="T", check_finite=False).T
        turned, log_turned = _shrunk(block.T, E)
    except np.linalg.LinAlgError:
        return None
    noise = float(np.linalg.norm(turned)) <= EPS * len(R) * top
    log_small = math.nan if noise else _log_diagonal(small) + log_factor - log_stretch - log_turned
    found = _settled(turned.T, top, log_small)
    if found is None:
        return None
    both = slice(lost, int(np.searchsorted(values, 30 * cut)))
    if both.stop > len(found):
        return None
    apart = np.abs(found[both] / values[both] - 1.0)
    if np.any(apart > np.maximum(1e-4, 1e-14 * (own / values[both]) ** 2)):
        return None
    return np.concatenate([found[:lost], values[lost:]])


def _gap(diagonal: Float64) -> int | None:
    """After how many rows the widest gap is; None where there is none."""
    if len(diagonal) < 2:
        return None
    later = np.maximum.accumulate(diagonal[::-1])[::-1][1:]
    earlier = np.minimum.accumulate(diagonal)[:-1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gaps = np.where(earlier > 0.0, earlier / later, 0.0)
    rows = int(np.argmax(gaps)) + 1
    return rows if gaps[rows - 1] > max(GAP, WIDE_GAP / rows) else None


def _divided(R: Float64, rows: int, top: float, log_factor: float) -> Float64 | None:
    """The values of the large rows and those of the small ones, found apart; None where that would be too inexact.

    With F = R11⁻¹ R12 an orthogonal transformation from the right takes R12 away. It leaves R11 (I + F Fᵀ)^½ and
    R22 (I + Fᵀ F)^-½, and below the former E times it, E = R22 (I + Fᵀ F)⁻¹ Fᵀ R11⁻¹. One from the left takes that
    away: the large block is multiplied by (I + Eᵀ E)^½, the small one by (I + E Eᵀ)^-½. What is now next to the large
    block is E times the small one, and neglected: it counts by its square.
    """
    from scipy.linalg import solve_triangular

    large, above, small = R[:rows, :rows], R[:rows, rows:], R[rows:, rows:]
    log_small = log_factor + _log_diagonal(small)
    noise = float(np.linalg.norm(small)) <= EPS * len(R) * top
    thin = 2 * rows < len(R)
    try:
        F = solve_triangular(large, above, check_finite=False)
        C, log_stretch = _root(F if thin else F.T)
        if thin:
            dim = float(np.linalg.norm(small)) <= DIM * top  # multiplied only where that is needed
            block = small if dim else _shrunk(small, F.T)[0]
            Y = solve_triangular(C, F @ small.T, lower=True, check_finite=False)
            half = solve_triangular(C, Y, trans="T", lower=True, check_finite=False)
        else:
            block = solve_triangular(C, small.T, lower=True, check_finite=False).T
            half = F @ solve_triangular(C, block.T, trans="T", lower=True, check_finite=False)
        E = solve_triangular(large, half, trans="T", check_finite=False).T
        root, log_turned = _root(E.T)
    except np.linalg.LinAlgError:
        return None
    log_large = _log_diagonal(large) + log_stretch
    log_small -= log_stretch
    size, tilt = float(np.linalg.norm(block)), float(np.linalg.norm(E))
    upper = R[:rows]
    if tilt**2 > TILT:
        upper, log_large = root.T @ upper, log_large + log_turned
    large_values = _of_gram(_gram(upper))
    if (tilt * size) ** 2 > 2 * NEGLECTED * top * large_values[0]:
        return None
    if not (_fits(large_values, log_large) or large_values[0] > math.sqrt(len(R) * EPS) * top):
        # The large ones are graded too.
        upper = triangle(np.asfortranarray(upper.T))
        found = _values(upper, top, log_large - _log_diagonal(upper))
        if found is None:
            return None
        large_values = found
    small_values = None
    level = tilt**2 * size <= NEGLECTED * top  # E changes no small value
    if level and (block is small or (size <= FAINT * top and not thin)):
        gram = _less(_upper_gram(block), Y) if thin else _upper_gram(block)
        small_values = _of_gram(gram)
        if size > FAINT * top and not _fits(small_values, log_small):
            small_values = None
    if small_values is None:
        if block is small:
            block = _shrunk(small, F.T)[0]
        if not level:
            block, log_small = _shrunk(block.T, E)[0].T, log_small - log_turned
        small_values = _settled(block, top, math.nan if noise else log_small)
    return None if small_values is None else np.sort(np.concatenate([small_values, large_values]))


def _root(tilt: Float64) -> tuple[Float64, float]:
    """The Cholesky factor of I + tilt tiltᵀ, lower, and the logarithm of its determinant."""
    from scipy.linalg import lapack

    gram = _gram(tilt)
    gram[np.diag_indices(len(gram))] += 1.0
    factor, info = lapack.dpotrf(gram, lower=1, clean=1, overwrite_a=1)
    if info:
        raise np.linalg.LinAlgError("I + F Fᵀ is beyond float64")
    return factor, _log_diagonal(factor)


def _gram(rows: Float64) -> Float64:
    """``rows rowsᵀ``; only the lower half is filled."""
    from scipy.linalg import blas

    if rows.flags.f_contiguous:
        return np.asarray(blas.dsyrk(1.0, rows, lower=1))
    return np.asarray(blas.dsyrk(1.0, np.ascontiguousarray(rows).T, trans=1, lower=1))


def _less(gram: Float64, Y: Float64) -> Float64:
    """``gram - Yᵀ Y``, in place and in its lower half."""
    from scipy.linalg import blas

    return np.asarray(blas.dsyrk(-1.0, np.asfortranarray(Y), beta=1.0, c=gram, trans=1, lower=1, overwrite_c=1))


def _shrunk(block: Float64, tilt: Float64) -> tuple[Float64, float]:
    """``block (I + tilt tiltᵀ)^-½``, but for a rotation from the right; and ln det (I + tilt tiltᵀ)^½."""
    from scipy.linalg import solve_triangular

    side, rank = tilt.shape
    if rank < side:
        basis, core = np.linalg.qr(tilt)
        squares, vectors = np.linalg.eigh(core @ core.T)
        stretch = np.sqrt(1.0 + np.maximum(squares, 0.0))
        basis = basis @ vectors
        return block + (block @ basis) * (1.0 / stretch - 1.0) @ basis.T, float(np.log(stretch).sum())
    factor = np.linalg.cholesky(np.eye(side) + tilt @ tilt.T)
    shrunk: Float64 = solve_triangular(factor, block.T, lower=True, check_finite=False).T
    return shrunk, float(np.log(factor.diagonal()).sum())


def _settled(part: Float64, top: float, log_values: float) -> Float64 | None:
    """The singular values of a square block whose logarithms add up to ``log_values`` (NaN: they are noise, and not
    checked)."""
    sizes = np.linalg.norm(part, axis=1)
    if math.isnan(log_values) or float(sizes.min()) > 1e-5 * float(sizes.max()):
        values = _of_gram(_gram(part))
        if math.isnan(log_values) or _fits(values, log_values):
            return values
    R = triangle(np.asfortranarray(part[np.argsort(-sizes, kind="stable")].T))
    return _values(R, top, log_values - _log_diagonal(R))


def _upper_gram(R: Float64) -> Float64:
    """R Rᵀ of a triangle; only the lower half is filled."""
    from scipy.linalg import lapack

    lower = aligned(R.shape, np.float64)
    lower[...] = R.T
    gram: Float64 = lapack.dlauum(lower, lower=1, overwrite_c=1)[0]
    return gram


def _of_gram(gram: Float64) -> Float64:
    """The roots of the eigenvalues of a symmetric matrix, ascending; it is overwritten."""
    values: Float64 = np.sqrt(np.maximum(symmetric_eigenvalues(np.asfortranarray(gram)), 0.0))
    return values


def _fits(values: Float64, log_values: float) -> bool:
    if not math.isfinite(log_values) or values[0] <= 0.0:
        return False
    return abs(float(np.log(values).sum()) - log_values) <= LARGEST_MISFIT


def _log_diagonal(R: Float64) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log(np.abs(R.diagonal())).sum())
