"""The figures of one weight matrix: a row of the result table.

Knows the columns, what they mean and their order. Computes nothing, imports no numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.esd.tails.registry import tails

Cell = str | int | float | bool | None


def only_with(option: str) -> Any:
    """A column that is there only when the analysis was asked for it: where this option of FitSettings is on."""
    return field(default=None, metadata={"option": option})


@dataclass(frozen=True, slots=True, kw_only=True)
class _PowerLawRow:
    longname: str
    M: int
    N: int
    Q: float | None = None
    num_evals: int | None = None
    matrix_rank: int | None = None
    rank_loss: int | None = None
    weak_rank_loss: int | None = None
    params: int
    alpha: float | None = None
    alpha_lo: float | None = None
    alpha_hi: float | None = None
    sigma: float | None = None
    D: float | None = None
    xmin: float | None = None
    xmax: float | None = None
    num_pl_spikes: int | None = None
    num_fingers: int | None = only_with("clip_xmax")
    raw_alpha: float | None = only_with("clip_xmax")
    p_value: float | None = only_with("bootstrap")


if TYPE_CHECKING:
    _WithTails = _PowerLawRow
else:
    _WithTails = make_dataclass(
        "_WithTails",
        [
            (column, kind, only_with(tail.name))
            for tail in tails()
            for column, kind in (*((name, "float | None") for name in tail.columns), (tail.status, "str | None"))
        ],
        bases=(_PowerLawRow,),
        frozen=True,
        slots=True,
        kw_only=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow(_WithTails):
    """The figures of one weight matrix, in the order of the output columns. None means: there is no value.

    λ are all squared singular values of the matrix (for a convolution: half of those of each kernel slice, pooled),
    ascending, not divided by its size. x are the λ above ``evals_thresh``; only the fit and num_evals use x.

    Attributes:
        longname: the matrix's name.
        M: rows as stored (of a slice, for a convolution).
        N: columns as stored.
        Q: max(M, N) / min(M, N), 1 or more.
        num_evals: how many λ are above ``evals_thresh``.
        matrix_rank: how many σ = sqrt(λ) are above σ_max max(M, N) eps64.
        rank_loss: how many are not.
        weak_rank_loss: how many λ are below 1e-6.
        params: how many weights: M N, times the slices.
        alpha: exponent of the power law fitted to x.
        alpha_lo: the least alpha of all tails whose distance is at most D + ``delta``.
        alpha_hi: the largest one.
        sigma: standard error of alpha, (alpha - 1) / sqrt(n) for the n values of the tail.
        D: its Kolmogorov-Smirnov distance, of the kind that the convention column ``ks`` names.
        xmin: the eigenvalue from which on it is fitted. (Other tools write the smallest kept eigenvalue here.)
        xmax: the largest x that was fitted.
        num_pl_spikes: how many λ are at least xmin.
        num_fingers: (clip_xmax) 0 where nothing was left out; else the number of largest x left out, less 1.
        raw_alpha: (clip_xmax) alpha of all x, nothing left out.
        p_value: (bootstrap) the share of samples of the fitted law whose own fit is farther off than D.
        tpl_alpha, …, tpl_status: (tpl, and each other tail distribution that is found) see its module in ``tails``.
        spectral_norm: max λ, the square of what mathematics calls so.
        sv_max: max σ, its root.
        sv_min: min σ.
        norm: sum λ, the square of the Frobenius norm.
        log_norm: log10 norm.
        log_spectral_norm: log10 spectral_norm.
        alpha_weighted: alpha log_spectral_norm.
        log_alpha_norm: log10 sum λ^alpha.
        stable_rank: norm / spectral_norm.
        entropy: -sum p ln p / ln matrix_rank with p = λ / norm: 0 to 1. None for rank 1.
        detX_num: how many of the largest λ, scaled to a mean of 1, it takes for their product to fall below 1.
        detX_val: the smallest of these λ.
        ERG_gap: detX_num - num_pl_spikes: 0 where the power law and det X = 1 have one tail.
        sigma_mp, W_scale, bulk_min, bulk_max, tw_edge, num_spikes, mp_softrank, mp_status: (mp_fit) the law of
            Marchenko and Pastur, see ``fits.marchenko_pastur.MarchenkoPasturFit``.
        max_rand_eval, rand_softrank, rand_distance, rand_sigma_mp, rand_bulk_min, rand_bulk_max, rand_num_spikes,
            rand_mp_softrank, rand_status: (randomize) the same weights in random order, see
            ``fits.randomised.RandomisedFigures``.
        farms_alpha, farms_D, farms_xmin, farms_num_evals, farms_status: (farms) the power law of the matrix's windows,
            see ``fits.farms.FarmsFit``.
        fit_status: ``"ok"``; else the reason why alpha (and all that needs it) is None.
    """

    spectral_norm: float | None = None
    sv_max: float | None = None
    sv_min: float | None = None
    norm: float | None = None
    log_norm: float | None = None
    log_spectral_norm: float | None = None
    alpha_weighted: float | None = None
    log_alpha_norm: float | None = None
    stable_rank: float | None = None
    entropy: float | None = None
    detX_num: int | None = None  # noqa: N815 - WeightWatcher's name
    detX_val: float | None = None  # noqa: N815
    ERG_gap: int | None = None
    sigma_mp: float | None = only_with("mp_fit")
    W_scale: float | None = only_with("mp_fit")
    bulk_min: float | None = only_with("mp_fit")
    bulk_max: float | None = only_with("mp_fit")
    tw_edge: float | None = only_with("mp_fit")
    num_spikes: int | None = only_with("mp_fit")
    mp_softrank: float | None = only_with("mp_fit")
    mp_status: str | None = only_with("mp_fit")
    max_rand_eval: float | None = only_with("randomize")
    rand_softrank: float | None = only_with("randomize")
    rand_distance: float | None = only_with("randomize")
    rand_sigma_mp: float | None = only_with("randomize")
    rand_bulk_min: float | None = only_with("randomize")
    rand_bulk_max: float | None = only_with("randomize")
    rand_num_spikes: int | None = only_with("randomize")
    rand_mp_softrank: float | None = only_with("randomize")
    rand_status: str | None = only_with("randomize")
    farms_alpha: float | None = only_with("farms")
    farms_D: float | None = only_with("farms")  # noqa: N815
    farms_xmin: float | None = only_with("farms")
    farms_num_evals: int | None = only_with("farms")
    farms_status: str | None = only_with("farms")
    fit_status: str = "not analysed"

    def cells(self, options: Mapping[str, Any] | None = None) -> dict[str, Cell]:
        """The columns by name, in order.

        Args:
            options: the fields of FitSettings by name, as the convention of a result has them. The columns of an option
                that is off are left out, of all rows alike. None: every column.
        """
        return {
            column.name: getattr(self, column.name)
            for column in fields(self)
            if options is None or "option" not in column.metadata or options.get(column.metadata["option"])
        }


# The columns that are not figures to be averaged.
NOT_METRICS = frozenset({"M", "N", "Q", "params"}) | {each.name for each in fields(LayerRow) if "str" in str(each.type)}
