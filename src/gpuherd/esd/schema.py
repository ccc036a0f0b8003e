"""The figures of a weight matrix, and the schema of the data set of results; both declared once.

``LayerRow`` has the columns, what they mean and their order. The data set is ``stats/*.parquet``: a row a weight
matrix, of one model or (imported results) of many. Its columns are whose weights these are, the figures, the
convention (``config.AnalysisOptions``) and the version; in what a worker writes also ``spectrum``, the matrix's
spectrum in a hundred points (``spectrum_files``). Importing this imports no numpy.

Columns are made from their buffers: ``pyarrow.array`` asks pandas, where that is installed, whether a list is a
series of it, which costs each worker 0.3 s of imports for files that need no pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from gpuherd.esd.config import CONVENTION, AnalysisOptions
from gpuherd.esd.tails import tails

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa


# ---- the figures of one weight matrix: a row of the result table

Cell = str | int | float | bool | None


def figure(meaning: str, option: str | None = None) -> Any:
    """A column of a figure.

    Args:
        meaning: what it means in a line, for readers of a page; ``LayerRow`` has the exact definitions.
        option: of FitSettings; the column is there only where the option is on.
    """
    return field(default=None, metadata={"meaning": meaning} | ({"option": option} if option else {}))


def reason_for(fit: str, option: str) -> Any:
    """A column that says why a further fit is not there; ``fit``: what was to be fitted."""
    return field(default=None, metadata={"fit": fit, "option": option})


@dataclass(frozen=True, kw_only=True)
class _PowerLawRow:
    longname: str
    M: int
    N: int
    Q: float | None = figure("longer side over shorter side of the matrix, 1 or more")
    num_evals: int | None = figure("eigenvalues above the threshold, which the fit uses")
    matrix_rank: int | None = figure("numerical rank")
    rank_loss: int | None = figure("by how much the rank is below the shorter side")
    weak_rank_loss: int | None = figure("eigenvalues below 1e-6")
    params: int
    alpha: float | None = figure("exponent of the power law fitted to the eigenvalues from xmin on")
    alpha_lo: float | None = figure("least alpha of all xmin whose D is within delta of the chosen one")
    alpha_hi: float | None = figure("largest alpha of all xmin whose D is within delta of the chosen one")
    sigma: float | None = figure("standard error of alpha, (alpha − 1) / √n for n eigenvalues in the tail")
    D: float | None = figure(
        "Kolmogorov-Smirnov distance of the eigenvalues from xmin on from that law; 0 is a perfect fit"
    )
    xmin: float | None = figure("eigenvalue from which on the power law is fitted")
    xmax: float | None = figure("largest eigenvalue that was fitted")
    num_pl_spikes: int | None = figure("eigenvalues in the tail, from xmin on")
    num_fingers: int | None = figure(
        "0 where nothing was clipped, else the number of largest eigenvalues left out, less 1", "clip_xmax"
    )
    raw_alpha: float | None = figure("alpha of all eigenvalues, nothing clipped", "clip_xmax")
    p_value: float | None = figure(
        "share of samples of the fitted law that fit worse; a small one speaks against a power law", "bootstrap"
    )


if TYPE_CHECKING:
    _WithTails = _PowerLawRow
else:
    _WithTails = make_dataclass(
        "_WithTails",
        [
            column
            for tail in tails()
            for column in (
                *((name, "float | None", figure(meaning, tail.name)) for name, meaning in tail.columns.items()),
                (tail.status, "str | None", reason_for(tail.title, tail.name)),
            )
        ],
        bases=(_PowerLawRow,),
        frozen=True,
        kw_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class _SpectrumRow(_WithTails):
    spectral_norm: float | None = figure("largest eigenvalue λ, the square of the largest singular value")
    sv_max: float | None = figure("largest singular value, √λ")
    sv_min: float | None = figure("smallest singular value")
    norm: float | None = figure("sum of all eigenvalues, the square of the Frobenius norm")
    log_norm: float | None = figure("log10 of norm")
    log_spectral_norm: float | None = figure("log10 of spectral_norm")
    alpha_weighted: float | None = figure("alpha times log_spectral_norm (alpha-hat)")
    log_alpha_norm: float | None = figure("log10 of the sum of λ^alpha")
    stable_rank: float | None = figure("norm / spectral_norm")
    entropy: float | None = figure("entropy of the eigenvalues' shares over ln(matrix_rank): 1 where all are equal")


@dataclass(frozen=True)
class DetXTail:
    """The tail of determinant 1.

    Attributes:
        detX_num: how many of the largest λ, scaled to a mean of 1, it takes for their product to fall below 1, the one
            that takes it there included. None where all are equal within rounding: the product then is 1 whatever the
            number.
        detX_val: the smallest of them, in the units of the spectrum.
        ERG_gap: detX_num - num_pl_spikes: 0 where the power law and det X = 1 have one tail.
    """

    detX_num: int | None = figure(  # noqa: N815 - WeightWatcher's name
        "how many of the largest eigenvalues, scaled to a mean of 1, it takes for a product below 1"
    )
    detX_val: float | None = figure("the smallest of these eigenvalues")  # noqa: N815
    ERG_gap: int | None = figure("detX_num − num_pl_spikes: 0 where the power law and det X = 1 have the same tail")


@dataclass(frozen=True)
class MarchenkoPasturFit:
    """A fit, or the reason why there is none. Names and definitions are WeightWatcher's.

    Attributes:
        sigma_mp: standard deviation of the bulk, for the eigenvalues scaled to a mean of 1. The entries of the matrix
            have sigma_mp / (W_scale sqrt(N)) for the larger side N.
        W_scale: what the matrix is multiplied by for that, sqrt(n / sum λ).
        bulk_min: lower edge of the bulk, in the units of λ.
        bulk_max: upper edge of the bulk, in the units of λ.
        tw_edge: bulk_max and the width of its fluctuation (Tracy and Widom), in the units of λ.
        num_spikes: how many λ are above tw_edge.
        mp_softrank: bulk_max / max λ (Martin and Mahoney 2018, 1810.01075).
        mp_status: ``"ok"``, or one sentence that says why the rest is None (W_scale is always known).
    """

    sigma_mp: float | None = figure(
        "standard deviation of the Marchenko–Pastur bulk, for eigenvalues scaled to a mean of 1", "mp_fit"
    )
    W_scale: float | None = figure("what the matrix is multiplied by for that scale", "mp_fit")
    bulk_min: float | None = figure("lower edge of the Marchenko–Pastur bulk, in units of λ", "mp_fit")
    bulk_max: float | None = figure("upper edge of the Marchenko–Pastur bulk, in units of λ", "mp_fit")
    tw_edge: float | None = figure("upper edge of the bulk with its Tracy–Widom fluctuation, in units of λ", "mp_fit")
    num_spikes: int | None = figure("eigenvalues above tw_edge", "mp_fit")
    mp_softrank: float | None = figure("bulk_max / spectral_norm: near 1 without spikes", "mp_fit")
    mp_status: str | None = reason_for("Marchenko–Pastur", "mp_fit")


@dataclass(frozen=True)
class RandomisedFigures:
    """How a spectrum compares with that of the same weights in random order.

    Attributes:
        max_rand_eval: the largest eigenvalue of the random matrices.
        rand_softrank: the same over the largest eigenvalue of the matrix itself (ww_softrank in WeightWatcher), the
            mean over the replicas. 1 for a matrix that can't be distinguished from noise.
        rand_distance: Jensen-Shannon distance of the two spectra, each divided by its sum and in ascending order
            (natural logarithm: 0 to sqrt(ln 2)), the mean over the replicas.
        rand_sigma_mp, rand_bulk_min, rand_bulk_max, rand_num_spikes, rand_mp_softrank: the Marchenko-Pastur fit of the
            random spectrum, see ``MarchenkoPasturFit``; of all replicas together. rand_num_spikes above 0 (num_traps in
            WeightWatcher) tells of single weights that are too large.
        rand_status: ``"ok"``; or why there is no Marchenko-Pastur fit, and its five figures are None; or, at the limits
            of float64, why there is no random spectrum, and all are None.
    """

    max_rand_eval: float | None = figure("largest eigenvalue of the same weights in random order", "randomize")
    rand_softrank: float | None = figure("max_rand_eval / spectral_norm", "randomize")
    rand_distance: float | None = figure(
        "Jensen-Shannon distance of the spectrum from that of the same weights in random order", "randomize"
    )
    rand_sigma_mp: float | None = figure("sigma_mp of the same weights in random order", "randomize")
    rand_bulk_min: float | None = figure("bulk_min of the same weights in random order", "randomize")
    rand_bulk_max: float | None = figure("bulk_max of the same weights in random order", "randomize")
    rand_num_spikes: int | None = figure(
        "num_spikes of the same weights in random order (correlation traps)", "randomize"
    )
    rand_mp_softrank: float | None = figure("mp_softrank of the same weights in random order", "randomize")
    rand_status: str | None = reason_for("random order", "randomize")


@dataclass(frozen=True)
class FarmsFit:
    """The power law of a layer's windows, or the reason why there is none.

    Attributes:
        farms_alpha: exponent of the power law of the windows' pooled eigenvalues; of a convolution the mean over the
            groups of windows that have a fit.
        farms_D: its Kolmogorov-Smirnov distance; of a convolution the mean.
        farms_xmin: the eigenvalue from which on it is fitted; of a convolution the mean.
        farms_num_evals: eigenvalues of all windows above the threshold.
        farms_status: ``"ok"``, or one sentence that says why alpha, D and xmin are None.
    """

    farms_alpha: float | None = figure("alpha of the pooled eigenvalues of windows of one shape (FARMS)", "farms")
    farms_D: float | None = figure("Kolmogorov-Smirnov distance of that fit", "farms")  # noqa: N815
    farms_xmin: float | None = figure("xmin of that fit", "farms")
    farms_num_evals: int | None = figure("eigenvalues of all windows above the threshold", "farms")
    farms_status: str | None = reason_for("FARMS", "farms")


# Columns come in the order of the bases, the last one first. Slots for all of them: a model can have 50,000 such rows.
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow(FarmsFit, RandomisedFigures, MarchenkoPasturFit, DetXTail, _SpectrumRow):
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
        detX_num, detX_val, ERG_gap: see ``DetXTail``.
        sigma_mp, …, mp_status: (mp_fit) the law of Marchenko and Pastur, see ``MarchenkoPasturFit``.
        max_rand_eval, …, rand_status: (randomize) the same weights in random order, see ``RandomisedFigures``.
        farms_alpha, …, farms_status: (farms) the power law of the matrix's windows, see ``FarmsFit``.
        fit_status: ``"ok"``; else the reason why alpha (and all that needs it) is None.
    """

    fit_status: str = "not analysed"

    def cells(self, options: Mapping[str, Any] | None = None) -> dict[str, Cell]:
        """The columns by name, in order.

        Args:
            options: the fields of FitSettings by name, as the convention of a result has them. The columns of an option
                that is off are left out, of all rows alike. None: every column.
        """
        return {name: getattr(self, name) for name in figures_of(options)}


def figures_of(options: Mapping[str, Any] | None = None) -> list[str]:
    """The columns of ``LayerRow`` in order; see ``LayerRow.cells``."""
    return [
        declared.name
        for declared in fields(LayerRow)
        if options is None or "option" not in declared.metadata or options.get(declared.metadata["option"])
    ]


# What each figure means, and what was to be fitted where a column says why it was not.
MEANINGS = {each.name: each.metadata["meaning"] for each in fields(LayerRow) if "meaning" in each.metadata}
FITS = {each.name: each.metadata["fit"] for each in fields(LayerRow) if "fit" in each.metadata}
# The columns that are not figures to be averaged.
NOT_METRICS = frozenset({"M", "N", "Q", "params"}) | {each.name for each in fields(LayerRow) if "str" in str(each.type)}


# ---- the schema of the data set, and Python values as its columns

LINEAGE_COLUMNS = ("model_id", "source_model", "base_model_relation")
CONVENTION_COLUMNS = (*CONVENTION, "gpuherd_version")

# The column of downsampled spectra, null for a matrix without one. It is in no CSV file.
SPECTRUM = "spectrum"

_NUMBERS = ("bool", "int", "float")
_ALIASES = {"int": "int64", "float": "float64", "bool": "bool", "str": "string"}  # of Arrow's types
_DECLARED = {declared.name: str(declared.type).split(" | ")[0] for declared in fields(LayerRow)} | {
    declared.name: kind if (kind := type(declared.default).__name__) in _NUMBERS else "str"
    for declared in fields(AnalysisOptions)
}


def schema(convention: Mapping[str, Any] | None = None) -> pa.Schema:
    """The columns of the data set, in order.

    Args:
        convention: of the results; the columns of an option that is off are left out. None: every column.
    """
    import pyarrow as pa

    names = (*LINEAGE_COLUMNS, *figures_of(convention), *CONVENTION_COLUMNS)
    return pa.schema([(name, pa.type_for_alias(_ALIASES[kind_of_column(name)])) for name in names])


def spectrum_type() -> pa.StructType:
    """The type of the column ``spectrum``: the fields of ``spectrum_files.Sketch``."""
    import pyarrow as pa

    return pa.struct(
        [
            ("log10_lambda", pa.list_(pa.float32())),
            ("log10_ccdf", pa.list_(pa.float32())),
            ("histogram", pa.list_(pa.uint32())),
            ("count", pa.int64()),
            ("below", pa.int64()),
        ]
    )


def kind_of_column(name: str, values: Sequence[Any] = ()) -> str:
    """``int``, ``float``, ``bool`` or ``str``: as LayerRow or AnalysisOptions declare the column, else by its first
    value; text where there is none."""
    if name in _DECLARED:
        return _DECLARED[name]
    first = next((value for value in values if value is not None), "")
    kind = type(first).__name__
    return kind if kind in _NUMBERS else "str"


def is_declared(name: str) -> bool:
    """Whether LayerRow or AnalysisOptions declare this column."""
    return name in _DECLARED


def column(kind: str, values: Sequence[Any]) -> pa.Array:
    """The values as a column, None as null.

    Args:
        kind: ``int`` (int64), ``float`` (float64), ``bool`` or ``str``, which all values that are not None must be.

    Raises:
        OverflowError: a whole number of more than 64 bits.
    """
    import numpy as np
    import pyarrow as pa

    known = np.array([value is not None for value in values], np.bool_)
    valid = None if known.all() else pa.py_buffer(_bits(known))
    if kind == "str":
        parts = [b"" if value is None else value.encode("utf-8") for value in values]
        data = [pa.py_buffer(offsets_of([len(part) for part in parts])), pa.py_buffer(b"".join(parts))]
    elif kind == "bool":
        data = [pa.py_buffer(_bits(np.array([bool(value) for value in values], np.bool_)))]
    else:
        numbers = [0 if value is None else value for value in values]
        data = [pa.py_buffer(np.array(numbers, np.int64 if kind == "int" else np.float64))]
    return pa.Array.from_buffers(pa.type_for_alias(_ALIASES[kind]), len(values), [valid, *data])


def lists(rows: Sequence[npt.NDArray[Any]], kind: pa.ListType[Any]) -> pa.Array:
    """Arrays as a column of lists of this type; fewer than 2^31 numbers in all."""
    import numpy as np
    import pyarrow as pa

    numbers = np.concatenate([np.empty(0, kind.value_type.to_pandas_dtype()), *rows])
    values = pa.Array.from_buffers(kind.value_type, len(numbers), [None, pa.py_buffer(numbers)])
    starts = offsets_of([len(row) for row in rows])
    offsets = pa.Array.from_buffers(pa.int32(), len(starts), [None, pa.py_buffer(starts)])
    return pa.ListArray.from_arrays(offsets, values, type=kind)


def offsets_of(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """Where each of so many elements starts, and where the last ends: int32 (len + 1,)."""
    import numpy as np

    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


def _bits(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    import numpy as np

    return np.packbits(flags, bitorder="little")
