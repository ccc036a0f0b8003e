"""A model's matrices through reading, spectrum and fit: each becomes a row of the result table, in order.

Knows which eigenvalues each column is made from, what to say when a matrix can't be analysed, and what is done when
something goes wrong on a GPU. Doesn't know files: a matrix brings its own reader. docs/esd-numerics.md has the
definitions of the columns with their sources.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.config import FitSettings
from gpuherd.esd.fits.farms import fit_farms
from gpuherd.esd.fits.marchenko_pastur import detx_tail, fit_marchenko_pastur
from gpuherd.esd.fits.power_law import PowerLawFit, bootstrap_p_value, fit_by_settings, fit_clipped, generator
from gpuherd.esd.fits.randomised import compare_with_random_order
from gpuherd.esd.schema import LayerRow
from gpuherd.esd.spectra.pooled import LayerSpectrum, checked, layer_spectrum, spectrum_of
from gpuherd.esd.tails import tails
from gpuherd.esd.views import SKIPPED

if TYPE_CHECKING:
    from gpuherd.esd.config import Precision
    from gpuherd.esd.on_device import MatrixResult
    from gpuherd.models.tensors.matrices import WeightMatrix


Matrix = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

# ---- a row

EPS = float(np.finfo(np.float64).eps)

# λ below this count as lost in weak_rank_loss, as in WeightWatcher.
WEAK_RANK = 1e-6


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
        device: where the eigenvalues are computed (see ``spectra.eigenvalues``).
        eigenvalues: the pooled λ in any order, with the factor of a convolution already in, where they are known; the
            slices are then looked at for their shapes only, unless ``settings.needs_weights``.
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
    if eigenvalues is None:
        spectrum = layer_spectrum(slices, device=device, conv=conv, precision=settings.precision)
    elif bool((eigenvalues >= 0).all()):
        spectrum = checked(np.sort(eigenvalues))
    else:
        raise ValueError(f"{matrix_name}: eigenvalues of a Gram matrix can't be negative or NaN")
    return with_figures(row, spectrum, settings, slices=slices, conv=conv, device=device)


def with_figures(
    row: LayerRow,
    spectrum: LayerSpectrum,
    settings: FitSettings,
    *,
    slices: Sequence[Matrix] | None = None,
    conv: bool = False,
    device: str = "cpu",
) -> LayerRow:
    """The row of a matrix, filled in from its spectrum.

    Args:
        row: name, shape and params.
        spectrum: of this matrix.
        settings: how to fit.
        slices: the weights; may be None where ``settings.needs_weights`` is false.
        conv: the slices belong to a convolution.
        device: where further eigenvalues are computed, of the same weights in random order.

    Raises:
        ValueError: figures need the weights, and they are not there.
    """
    if spectrum.problem is not None:
        return replace(row, fit_status=spectrum.problem)
    evals = spectrum.evals
    x = evals[evals > settings.evals_thresh]
    row = _with_spectrum(row, evals, len(x))
    if len(x) < 2:
        row = replace(row, fit_status=f"too few eigenvalues above {settings.evals_thresh:g} ({len(x)} of {len(evals)})")
    else:
        row = _with_power_law(row, evals, x, settings)
    columns: dict[str, Any] = asdict(detx_tail(evals, row.num_pl_spikes))
    if settings.mp_fit:
        columns |= asdict(fit_marchenko_pastur(evals, row.M, row.N))
    if settings.needs_weights:
        if slices is None:
            raise ValueError(f"{row.longname}: randomize and farms need the weights")
        if settings.randomize:
            compared = compare_with_random_order(row.longname, slices, evals, settings, conv=conv, device=device)
            columns |= asdict(compared)
        if settings.farms:
            columns |= asdict(fit_farms(slices, settings, conv=conv))
    return replace(row, **columns)


def _row_without_figures(name: str, slices: Sequence[Matrix]) -> LayerRow:
    shapes = {s.shape for s in slices}
    if len(shapes) != 1 or any(s.ndim != 2 for s in slices):
        raise ValueError(f"{name}: slices must be matrices of one shape, not {sorted(shapes)}")
    rows, columns = shapes.pop()
    return LayerRow(longname=name, M=rows, N=columns, params=rows * columns * len(slices))


def _with_power_law(row: LayerRow, evals: Float64, x: Float64, settings: FitSettings) -> LayerRow:
    """Fills in the columns of the power law and of the other figures requested of it."""
    if settings.clip_xmax:
        clipped = fit_clipped(x, lambda values: fit_by_settings(values, settings))
        row = replace(row, num_fingers=clipped.num_fingers, raw_alpha=clipped.raw_alpha)
        x, fit = clipped.kept, clipped.fit
    else:
        fit = fit_by_settings(x, settings)
    if settings.bootstrap and fit.alpha is not None:
        rng = generator("bootstrap", settings.seed, row.longname)
        row = replace(row, p_value=bootstrap_p_value(x, fit, settings, rng))
    for tail in tails():
        if getattr(settings, tail.name):
            row = replace(row, **asdict(tail.fit(x, settings)))
    return _with_fit(row, evals, fit)


def _with_spectrum(row: LayerRow, evals: Float64, num_evals: int) -> LayerRow:
    """Fills in the columns that need no fit."""
    sides = (row.M, row.N)
    sigma = np.sqrt(evals)
    rank = int(np.count_nonzero(sigma > sigma[-1] * (max(sides) * EPS)))
    return replace(
        row,
        Q=max(sides) / min(sides),
        num_evals=num_evals,
        matrix_rank=rank,
        rank_loss=len(evals) - rank,
        weak_rank_loss=int(np.searchsorted(evals, WEAK_RANK)),
        sv_max=float(sigma[-1]),
        sv_min=float(sigma[0]),
        entropy=_entropy(evals / evals.sum(), rank) if rank > 1 else None,
        **norms(evals),
    )


def norms(evals: Float64) -> dict[str, Any]:
    """The columns of norms, of ascending eigenvalues."""
    norm, largest = float(evals.sum()), float(evals[-1])
    return {
        "norm": norm,
        "log_norm": math.log10(norm),
        "spectral_norm": largest,
        "log_spectral_norm": math.log10(largest),
        "stable_rank": norm / largest,
    }


def _entropy(p: Float64, rank: int) -> float:
    """-sum p ln p / ln rank. p = 0 adds 0, the limit, so nothing has to be added to p to avoid ln 0."""
    positive = p[p > 0]
    return float(-(positive * np.log(positive)).sum() / math.log(rank))


def _with_fit(row: LayerRow, evals: Float64, fit: PowerLawFit) -> LayerRow:
    """Fills in the columns that need a fit; where there is none, its status only."""
    if fit.alpha is None or fit.xmin is None:
        return replace(row, fit_status=fit.status)
    return replace(
        row,
        alpha=fit.alpha,
        alpha_lo=fit.alpha_lo,
        alpha_hi=fit.alpha_hi,
        sigma=fit.sigma,
        D=fit.D,
        xmin=fit.xmin,
        xmax=fit.xmax,
        num_pl_spikes=len(evals) - int(np.searchsorted(evals, fit.xmin)),
        alpha_weighted=fit.alpha * math.log10(float(evals[-1])),
        log_alpha_norm=log_alpha_norm(evals, fit.alpha),
        fit_status=fit.status,
    )


def log_alpha_norm(evals: Float64, alpha: float) -> float:
    """log10 sum λ^alpha, with the largest term taken out so that no power can overflow."""
    logs = alpha * np.log(evals[evals > 0])
    return float((logs[-1] + np.log(np.exp(logs - logs[-1]).sum())) / math.log(10.0))


# ---- all matrices of a model: one after the other, or in lanes on GPUs

logger = logging.getLogger(__name__)


def analyse_matrices(
    matrices: Sequence[WeightMatrix],
    settings: FitSettings,
    devices: Sequence[str],
    *,
    parallel: bool,
    on_progress: Callable[[int], None] | None = None,
    on_spectrum: Callable[[int, LayerSpectrum], None] | None = None,
) -> list[LayerRow]:
    """A row for each matrix, in the order of ``matrices``.

    Args:
        matrices: what to analyse; those with a ``skip`` reason become rows that say so and are not read.
        settings: how to fit.
        devices: ``("cpu",)`` or GPUs as torch names them.
        parallel: spread over all devices in lanes, reading ahead; else one matrix after the other on the first. On the
            CPU nothing runs in parallel: at any time one matrix is in memory, and BLAS uses the cores.
        on_progress: called with the number of finished matrices, from one thread at a time.
        on_spectrum: called with a matrix's index and its spectrum, in the order in which they are finished, from one
            thread at a time; what it doesn't keep is freed.

    Raises:
        MemoryError or torch.OutOfMemoryError: a matrix does not fit, even alone on the first device. (One that could
            not fit in the whole memory of a GPU is computed on the CPU.)
        BadModel: a matrix can't be read; what was not finished by then is lost.
    """

    rows: list[LayerRow | None] = [
        _row(matrix, SKIPPED + matrix.skip) if matrix.skip is not None else None for matrix in matrices
    ]
    todo = [index for index, row in enumerate(rows) if row is None]
    keeping = threading.Lock()
    finished = len(matrices) - len(todo)

    def keep(index: int, row: LayerRow, spectrum: LayerSpectrum) -> None:
        nonlocal finished
        rows[index] = row
        if on_spectrum is not None:
            on_spectrum(index, spectrum)
        finished += 1
        logger.debug("%s: %s", row.longname, row.fit_status)
        if on_progress is not None:
            on_progress(finished)

    def finish(result: MatrixResult) -> None:
        assert result.spectrum is not None  # noqa: S101 - what has none goes to the CPU
        matrix = matrices[result.index]
        row = with_figures(
            _row(matrix),
            result.spectrum,
            settings,
            slices=result.weights,
            conv=matrix.kind == "conv",
            device=result.device,
        )
        with keeping:
            keep(result.index, row, result.spectrum)

    if devices[0] == "cpu":
        for index in todo:
            finish(_on_cpu(index, matrices[index], settings))
    else:
        _on_gpus(matrices, todo, settings, devices if parallel else devices[:1], parallel, finish)
    return [row for row in rows if row is not None]


def _on_gpus(
    matrices: Sequence[WeightMatrix],
    todo: list[int],
    settings: FitSettings,
    devices: Sequence[str],
    parallel: bool,
    finish: Callable[[MatrixResult], None],
) -> None:
    """In lanes or one by one; then one at a time what ran out of memory in parallel, and on the CPU what is left."""
    from gpuherd.esd.lanes import Lanes, Left
    from gpuherd.esd.on_device import process_single
    from gpuherd.esd.spectra.device import device_arithmetic

    def on_cpu(index: int) -> MatrixResult:
        return _on_cpu(index, matrices[index], settings)

    def on_gpus(some: list[int], precision: Precision) -> list[int]:
        """Finishes what can be done in this precision, and returns the rest."""
        left = Left(alone=some)
        if parallel:
            arithmetic = [device_arithmetic(device, precision) for device in devices]
            left = Lanes(matrices, some, settings.needs_weights, devices, arithmetic, finish, on_cpu).run()
        for index in left.alone:
            result = process_single(index, matrices[index], precision, settings.needs_weights, devices[0])
            if result.spectrum is None:
                left.on_cpu.append(index)
            else:
                finish(result)
        return left.on_cpu

    rest = on_gpus(todo, settings.precision)
    if settings.precision != "float64":
        rest = on_gpus(rest, "float64")
    for index in rest:
        finish(on_cpu(index))


def _on_cpu(index: int, matrix: WeightMatrix, settings: FitSettings) -> MatrixResult:
    """One matrix by numpy and LAPACK: read in pieces, or whole where figures need its weights; freed on return."""
    from gpuherd.esd.on_device import MatrixResult

    weights = matrix.slices() if settings.needs_weights else None
    if weights is None or matrix.factors is not None:
        spectrum = spectrum_of(matrix, precision=settings.precision)
    else:
        spectrum = layer_spectrum(weights, conv=matrix.kind == "conv", precision=settings.precision)
    return MatrixResult(index, spectrum, weights, "cpu")


def _row(matrix: WeightMatrix, status: str = "not analysed") -> LayerRow:
    """The row of a matrix without figures: its name, its shape and its status."""
    rows, columns = matrix.shape
    return LayerRow(longname=matrix.longname, M=rows, N=columns, params=matrix.params, fit_status=status)
