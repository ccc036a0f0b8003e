"""The figures of one weight matrix: a row of the result table.

Knows the columns, what they mean and their order. Computes nothing, imports no numpy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

Cell = str | int | float | bool | None

# The columns of LayerRow that are not figures to be averaged.
NOT_METRICS = frozenset({"longname", "M", "N", "params", "fit_status"})


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

    def cells(self) -> dict[str, Cell]:
        """The columns by name, in order."""
        return asdict(self)
