"""Takes a model's matrices through reading, spectrum and fit: one after the other, or in lanes on GPUs (`lanes`).

Knows what is done when something goes wrong, and that rows come in order. Knows neither files nor columns: a matrix
brings its own reader, a row its own figures.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpuherd.esd.views import SKIPPED

if TYPE_CHECKING:
    from gpuherd.esd.on_device import Result
    from gpuherd.esd.row import LayerRow
    from gpuherd.esd.settings import FitSettings, Precision
    from gpuherd.esd.spectra.pooled import LayerSpectrum
    from gpuherd.models.tensors.matrices import WeightMatrix

logger = logging.getLogger(__name__)


def analyse_matrices(
    matrices: Sequence[WeightMatrix],
    settings: FitSettings,
    devices: Sequence[str],
    *,
    parallel: bool,
    on_progress: Callable[[int], None],
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
    from gpuherd.esd.layer import with_figures

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
        on_progress(finished)

    def finish(result: Result) -> None:
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
    finish: Callable[[Result], None],
) -> None:
    """In lanes or one by one; then alone what ran out of memory beside others, and on the CPU what is left."""
    from gpuherd.esd.lanes import Lanes, Left
    from gpuherd.esd.on_device import alone
    from gpuherd.esd.spectra.device import device_arithmetic

    def on_cpu(index: int) -> Result:
        return _on_cpu(index, matrices[index], settings)

    def on_gpus(some: list[int], precision: Precision) -> list[int]:
        """Finishes what can be done in this precision, and returns the rest."""
        left = Left(alone=some)
        if parallel:
            arithmetic = [device_arithmetic(device, precision) for device in devices]
            left = Lanes(matrices, some, settings.needs_weights, devices, arithmetic, finish, on_cpu).run()
        for index in left.alone:
            result = alone(index, matrices[index], precision, settings.needs_weights, devices[0])
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


def _on_cpu(index: int, matrix: WeightMatrix, settings: FitSettings) -> Result:
    """One matrix by numpy and LAPACK: read in pieces, or whole where figures need its weights; freed on return."""
    from gpuherd.esd.on_device import Result
    from gpuherd.esd.spectra.pooled import layer_spectrum, spectrum_of

    weights = matrix.slices() if settings.needs_weights else None
    if weights is None or matrix.factors is not None:
        spectrum = spectrum_of(matrix, precision=settings.precision)
    else:
        spectrum = layer_spectrum(weights, conv=matrix.kind == "conv", precision=settings.precision)
    return Result(index, spectrum, weights, "cpu")


def _row(matrix: WeightMatrix, status: str = "not analysed") -> LayerRow:
    """The row of a matrix without figures: its name, its shape and its status."""
    from gpuherd.esd.row import LayerRow

    rows, columns = matrix.shape
    return LayerRow(longname=matrix.longname, M=rows, N=columns, params=matrix.params, fit_status=status)
