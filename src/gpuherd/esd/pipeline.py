"""Takes a model's matrices through reading, spectrum and fit: one after the other, or in lanes that read ahead.

Knows order, threads and memory. Knows neither files nor columns: a matrix brings its own reader, a row its own figures.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpuherd.esd.tables.stats import SKIPPED

if TYPE_CHECKING:
    from gpuherd.esd.row import LayerRow
    from gpuherd.esd.settings import FitSettings
    from gpuherd.esd.spectra.pooled import LayerSpectrum
    from gpuherd.models.dtypes import FloatArray
    from gpuherd.models.matrices import WeightMatrix

logger = logging.getLogger(__name__)

# Two a GPU: while the one computes, the other reads the next matrix, uploads it and fits the last one.
LANES_PER_DEVICE = 2


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
        parallel: spread over all devices, reading ahead; else one matrix after the other on the first. On the CPU
            nothing runs in parallel: at any time one matrix is in memory, and BLAS uses the cores.
        on_progress: called with the number of finished matrices, from one thread at a time.
        on_spectrum: called with a matrix's index and its spectrum, in the order in which they are finished, from one
            thread at a time; what it doesn't keep is freed.

    Raises:
        MemoryError or torch.OutOfMemoryError: a matrix does not fit, even alone on the first device.
    """
    rows: list[LayerRow | None] = [
        _row(matrix, SKIPPED + matrix.skip) if matrix.skip is not None else None for matrix in matrices
    ]
    todo = [index for index, row in enumerate(rows) if row is None]
    finished = len(matrices) - len(todo)

    def keep(index: int, row: LayerRow, spectrum: LayerSpectrum) -> None:
        nonlocal finished
        rows[index] = row
        if on_spectrum is not None:
            on_spectrum(index, spectrum)
        finished += 1
        logger.debug("%s: %s", row.longname, row.fit_status)
        on_progress(finished)

    if parallel and devices[0] != "cpu":
        # What ran out of memory beside another matrix is tried again alone.
        todo = _run_lanes(matrices, todo, settings, devices, keep)
    for index in todo:
        keep(index, *_analyse(matrices[index], settings, devices[0]))
    return [row for row in rows if row is not None]


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether host or GPU memory ran out. Does not import torch."""
    if isinstance(problem, MemoryError):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(problem, torch.OutOfMemoryError)


def _run_lanes(
    matrices: Sequence[WeightMatrix],
    todo: Sequence[int],
    settings: FitSettings,
    devices: Sequence[str],
    keep: Callable[[int, LayerRow, LayerSpectrum], None],
) -> list[int]:
    """Analyses ``todo`` in parallel. Returns what ran out of memory; raises the first other error."""
    remaining: Iterator[int] = iter(todo)
    reading, keeping = threading.Lock(), threading.Lock()
    too_large: list[int] = []
    errors: list[BaseException] = []

    def lane(device: str) -> None:
        while not errors:
            try:
                with reading:  # one reader at a time: the disk is one, and host memory holds few matrices
                    index = next(remaining, None)
                    factored = index is not None and matrices[index].factors is not None
                    slices = None if index is None or factored else matrices[index].slices()
                if index is None:
                    return
                row, spectrum = _analyse(matrices[index], settings, device, slices)
                with keeping:
                    keep(index, row, spectrum)
            except BaseException as problem:
                with keeping:
                    if is_out_of_memory(problem) and index is not None:
                        too_large.append(index)
                    else:
                        errors.append(problem)
            slices = None

    lanes = [
        threading.Thread(target=lane, args=(device,), name=f"lane on {device}")
        for device in devices
        for _ in range(LANES_PER_DEVICE)
    ]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    if errors:
        raise errors[0]
    if too_large:
        _free_gpu_cache()
    return sorted(too_large)


def _analyse(
    matrix: WeightMatrix, settings: FitSettings, device: str, slices: list[FloatArray] | None = None
) -> tuple[LayerRow, LayerSpectrum]:
    """One matrix; its weights are freed on return."""
    from gpuherd.esd.layer import with_figures
    from gpuherd.esd.spectra.low_rank import low_rank_spectrum
    from gpuherd.esd.spectra.pooled import layer_spectrum

    if matrix.factors is not None:
        spectrum = low_rank_spectrum(matrix.factors(), conv=matrix.kind == "conv")
        return with_figures(_row(matrix), spectrum, settings), spectrum
    weights = matrix.slices() if slices is None else slices
    spectrum = layer_spectrum(weights, device=device, conv=matrix.kind == "conv")
    return with_figures(_row(matrix), spectrum, settings), spectrum


def _row(matrix: WeightMatrix, status: str = "not analysed") -> LayerRow:
    """The row of a matrix without figures: its name, its shape and its status."""
    from gpuherd.esd.row import LayerRow

    rows, columns = matrix.shape
    return LayerRow(longname=matrix.longname, M=rows, N=columns, params=matrix.params, fit_status=status)


def _free_gpu_cache() -> None:
    """Gives freed GPU memory back before a larger piece is asked for."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
