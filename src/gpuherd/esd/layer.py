"""One weight matrix in, one row of the result table out.

It knows which eigenvalues each column is made from and what to say when a matrix can't be analysed. It doesn't know
models or files. docs/esd-numerics.md has the same definitions with their sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.errors import UsageError
from gpuherd.esd import spectrum
from gpuherd.esd.fit import METHODS, Method, PowerLawFit, fit_power_law

Matrix = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)

# Convolution slices count as W sqrt(1/2), as in WeightWatcher, TempBalance and the published results.
CONV_NORM = 0.5


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How alpha is fitted. The same settings for every row of a result, or the rows can't be compared.

    Attributes:
        fix_fingers: how xmin is chosen: ``DKS``, ``xmin_mid`` or ``xmin_peak`` (see ``fit_power_law``).
        evals_thresh: only eigenvalues strictly above this take part in the fit. Absolute, not relative.
        bins: of the histogram that ``xmin_peak`` uses.
    """

    fix_fingers: Method
    evals_thresh: float = 1e-5
    bins: int = 100

    def __post_init__(self) -> None:
        if self.fix_fingers not in METHODS:
            raise UsageError(f"fix_fingers={self.fix_fingers!r} is unknown; use {', '.join(METHODS)}")
        if not (math.isfinite(self.evals_thresh) and self.evals_thresh >= 0):
            raise UsageError(f"evals_thresh={self.evals_thresh!r} must be a finite number, 0 or more")
        if self.bins < 1:
            raise UsageError(f"bins={self.bins!r} must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """The figures of one weight matrix, in the order of the output columns. None means: there is no value.

    λ are all squared singular values of the matrix (for a convolution: half of those of each kernel slice, pooled),
    ascending, not divided by its size. x are the λ above ``evals_thresh``; only the fit and num_evals use x.

    Attributes:
        longname: the matrix's name.
        M: rows as stored (of a slice, for a convolution).
        N: columns as stored.
        num_evals: how many λ are above ``evals_thresh``.
        matrix_rank: how many σ = sqrt(λ) are above σ_max max(M, N) eps64.
        params: how many weights: M N, times the slices.
        alpha: exponent of the power law fitted to x.
        D: its one-sided Kolmogorov-Smirnov distance.
        xmin: the eigenvalue from which on it is fitted. (Other tools write the smallest kept eigenvalue here.)
        xmax: the largest x.
        spectral_norm: max λ, the square of what mathematics calls so.
        norm: sum λ, the square of the Frobenius norm.
        log_norm: log10 norm.
        log_spectral_norm: log10 spectral_norm.
        alpha_weighted: alpha log_spectral_norm.
        log_alpha_norm: log10 sum λ^alpha.
        stable_rank: norm / spectral_norm.
        entropy: -sum p ln p / ln matrix_rank with p = λ / norm: 0 to 1. None for rank 1.
        fit_status: ``"ok"``; else the reason why alpha (and all that needs it) is None.
    """

    longname: str
    M: int
    N: int
    num_evals: int | None = None
    matrix_rank: int | None = None
    params: int
    alpha: float | None = None
    D: float | None = None
    xmin: float | None = None
    xmax: float | None = None
    spectral_norm: float | None = None
    norm: float | None = None
    log_norm: float | None = None
    log_spectral_norm: float | None = None
    alpha_weighted: float | None = None
    log_alpha_norm: float | None = None
    stable_rank: float | None = None
    entropy: float | None = None
    fit_status: str = "not analysed"


def analyse_layer(
    matrix_name: str,
    slices: Sequence[Matrix],
    settings: FitSettings,
    *,
    device: str = "cpu",
    eigenvalues: Float64 | None = None,
    conv: bool = False,
) -> LayerRow:
    """Spectrum, norms and power-law fit of one weight matrix.

    Args:
        matrix_name: goes into ``longname``.
        slices: the matrix; or for a convolution its kh·kw slices of one shape, whose eigenvalues are pooled.
        settings: how to fit.
        device: where the eigenvalues are computed (see ``spectrum.eigenvalues``).
        eigenvalues: the pooled λ in any order, with the factor of a convolution already in, where they are known; the
            slices are then looked at for their shapes only.
        conv: the slices belong to a convolution: every λ is multiplied by 0.5. Also true of a 1x1 kernel.

    Returns:
        A row, always. Where the spectrum is sound but can't be fitted, only the columns that need alpha are None. Where
        the matrix itself can't be analysed (NaN, infinite or all zero, fewer than 2 eigenvalues), all but M, N and
        params are. ``fit_status`` has the reason.

    Raises:
        ValueError: no slices, slices of different shapes, an array that is not a real matrix, or given eigenvalues that
            are negative or NaN.
    """
    row = _row_without_figures(matrix_name, slices)
    if eigenvalues is not None and not bool((eigenvalues >= 0).all()):
        raise ValueError(f"{matrix_name}: eigenvalues of a Gram matrix can't be negative or NaN")
    problem = _matrix_problem(slices) if eigenvalues is None else None
    if problem is None:
        evals = np.sort(eigenvalues) if eigenvalues is not None else _pooled(slices, device, conv)
        problem = _spectrum_problem(evals)
    if problem is not None:
        return replace(row, fit_status=problem)
    x = evals[evals > settings.evals_thresh]
    row = _with_spectrum(row, evals, len(x))
    if len(x) < 2:
        reason = f"too few eigenvalues above {settings.evals_thresh:g} ({len(x)} of {len(evals)})"
        return replace(row, fit_status=reason)
    return _with_fit(row, evals, fit_power_law(x, settings.fix_fingers, bins=settings.bins))


def _row_without_figures(name: str, slices: Sequence[Matrix]) -> LayerRow:
    shapes = {s.shape for s in slices}
    if len(shapes) != 1 or any(s.ndim != 2 for s in slices):
        raise ValueError(f"{name}: slices must be matrices of one shape, not {sorted(shapes)}")
    rows, columns = shapes.pop()
    return LayerRow(longname=name, M=rows, N=columns, params=rows * columns * len(slices))


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


def _pooled(slices: Sequence[Matrix], device: str, conv: bool) -> Float64:
    """The eigenvalues of all slices, ascending."""
    evals = np.sort(np.concatenate([spectrum.eigenvalues(s, device=device) for s in slices]))
    return evals * CONV_NORM if conv else evals


def _with_spectrum(row: LayerRow, evals: Float64, num_evals: int) -> LayerRow:
    """Fills in the columns that need no fit."""
    norm, largest = float(evals.sum()), float(evals[-1])
    sigma = np.sqrt(evals)
    rank = int(np.count_nonzero(sigma > sigma[-1] * (max(row.M, row.N) * EPS)))
    return replace(
        row,
        num_evals=num_evals,
        matrix_rank=rank,
        spectral_norm=largest,
        norm=norm,
        log_norm=math.log10(norm),
        log_spectral_norm=math.log10(largest),
        stable_rank=norm / largest,
        entropy=_entropy(evals / norm, rank) if rank > 1 else None,
    )


def _entropy(p: Float64, rank: int) -> float:
    """-sum p ln p / ln rank. p = 0 adds 0, the limit, so nothing has to be added to p to avoid ln 0."""
    positive = p[p > 0]
    return float(-(positive * np.log(positive)).sum() / math.log(rank))


def _with_fit(row: LayerRow, evals: Float64, fit: PowerLawFit) -> LayerRow:
    """Fills in the columns that need a fit; where there is none, its status only."""
    if fit.alpha is None:
        return replace(row, fit_status=fit.status)
    return replace(
        row,
        alpha=fit.alpha,
        D=fit.D,
        xmin=fit.xmin,
        xmax=fit.xmax,
        alpha_weighted=fit.alpha * math.log10(float(evals[-1])),
        log_alpha_norm=_log_alpha_norm(evals, fit.alpha),
        fit_status=fit.status,
    )


def _log_alpha_norm(evals: Float64, alpha: float) -> float:
    """log10 sum λ^alpha, with the largest term taken out so that no power can overflow."""
    logs = alpha * np.log(evals[evals > 0])
    return float((logs[-1] + np.log(np.exp(logs - logs[-1]).sum())) / math.log(10.0))
