"""Takes a model's matrices through reading, spectrum and fit: one after the other, or in lanes that read ahead.

Knows order, threads and memory. Knows neither files nor columns: a matrix brings its own reader, a row its own figures.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpuherd.esd.results import SKIPPED

if TYPE_CHECKING:
    from gpuherd.esd.layer import FitSettings, LayerRow
    from gpuherd.models.dtypes import FloatArray
    from gpuherd.models.matrices import WeightMatrix

# Two a GPU: while the one computes, the other reads the next matrix, uploads it and fits the last one.
LANES_PER_DEVICE = 2


def analyse_matrices(
    matrices: Sequence[WeightMatrix],
    settings: FitSettings,
    devices: Sequence[str],
    *,
    parallel: bool,
    on_progress: Callable[[int], None],
) -> list[LayerRow]:
    """A row for each matrix, in the order of ``matrices``.

    Args:
        matrices: what to analyse; those with a ``skip`` reason become rows that say so and are not read.
        settings: how to fit.
        devices: ``("cpu",)`` or GPUs as torch names them.
        parallel: spread over all devices, reading ahead; else one matrix after the other on the first. On the CPU
            nothing runs in parallel: at any time one matrix is in memory, and BLAS uses the cores.
        on_progress: called with the number of finished matrices, from one thread at a time.

    Raises:
        MemoryError or torch.OutOfMemoryError: a matrix does not fit, even alone on the first device.
    """
    rows: list[LayerRow | None] = [_skipped_row(matrix) if matrix.skip is not None else None for matrix in matrices]
    todo = [index for index, row in enumerate(rows) if row is None]
    finished = len(matrices) - len(todo)

    def keep(index: int, row: LayerRow) -> None:
        nonlocal finished
        rows[index] = row
        finished += 1
        on_progress(finished)

    if parallel and devices[0] != "cpu":
        # What ran out of memory beside another matrix is tried again alone.
        todo = _run_lanes(matrices, todo, settings, devices, keep)
    for index in todo:
        keep(index, _analyse(matrices[index], settings, devices[0]))
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
    keep: Callable[[int, LayerRow], None],
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
                    slices = None if index is None else matrices[index].slices()
                if index is None or slices is None:
                    return
                row = _analyse(matrices[index], settings, device, slices)
                with keeping:
                    keep(index, row)
            except BaseException as problem:
                with keeping:
                    if is_out_of_memory(problem) and index is not None:
                        too_large.append(index)
                    else:
                        errors.append(problem)
            slices = None

    lanes = [threading.Thread(target=lane, args=(device,)) for device in devices for _ in range(LANES_PER_DEVICE)]
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
) -> LayerRow:
    """One matrix; its weights are freed on return."""
    from gpuherd.esd.layer import analyse_layer

    weights = matrix.slices() if slices is None else slices
    return analyse_layer(matrix.longname, weights, settings, device=device, conv=matrix.kind == "conv")


def _skipped_row(matrix: WeightMatrix) -> LayerRow:
    """The row of a matrix that is not analysed: its name, its shape and why."""
    from dataclasses import fields

    from gpuherd.esd.layer import LayerRow

    rows, columns = matrix.shape
    given = {"longname": matrix.longname, "M": rows, "N": columns, "params": matrix.params}
    cells: dict[str, Any] = {column.name: None for column in fields(LayerRow)}
    return LayerRow(**(cells | given | {"fit_status": SKIPPED + str(matrix.skip)}))


def _free_gpu_cache() -> None:
    """Gives freed GPU memory back before a larger piece is asked for."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
