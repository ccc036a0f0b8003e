"""Matrices on a torch device: from pieces as they are read to spectra, one by one or several to a call of the solver.

Knows how a matrix is cut, sent and put together again. Doesn't know threads, order or fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.batching import HOST_SIDE, Size, lane_bytes, panel_length
from gpuherd.esd.spectra.device import (
    GramArithmetic,
    Solved,
    device_arithmetic,
    did_not_converge,
    gram_on_device,
    ieee_float32,
    settled,
    solved,
)
from gpuherd.esd.spectra.gram import slabs_of
from gpuherd.esd.spectra.pooled import CONV_NORM, LayerSpectrum, checked

if TYPE_CHECKING:
    import torch

    from gpuherd.esd.config import Precision
    from gpuherd.models.tensors.matrices import HalfSlabs, WeightMatrix
    from gpuherd.models.tensors.source import Codes

Float64 = npt.NDArray[np.float64]
Weights = list[npt.NDArray[np.floating[Any]]]
# What is read of a matrix at a time: a panel ready to be sent, or one whole slice.
Piece = Any


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """One matrix of a group, with its pieces on the way; ``whole`` says that they are its slices, not panels of it."""

    index: int
    matrix: WeightMatrix
    pieces: Iterable[Piece]
    whole: bool


@dataclass(frozen=True, slots=True)
class Computed:
    """What a device found out about a matrix; ``settle`` makes a spectrum of it.

    Attributes:
        index: its number in the model.
        pieces: of the matrix, or of each slice of a convolution; None where a piece can't be computed there.
        conv: it is a convolution.
        weights: its slices, if they came whole.
        device: where it was computed.
    """

    index: int
    pieces: tuple[Solved | None, ...]
    conv: bool
    weights: Weights | None
    device: str


@dataclass(frozen=True, slots=True)
class MatrixResult:
    """The result for one matrix.

    Attributes:
        index: its number in the model.
        spectrum: None where the CPU has to look at it.
        weights: its slices, if they came whole.
        device: where it was computed, and where more can be.
    """

    index: int
    spectrum: LayerSpectrum | None
    weights: Weights | None
    device: str


def size_of(index: int, matrix: WeightMatrix, total_bytes: int | None) -> Size:
    """What a plan has to know of a matrix; ``total_bytes`` is the memory of the smallest GPU, None if not known."""
    side, long = min(matrix.shape), max(matrix.shape)
    read_together = matrix.part.layout is not None and matrix.stream is None
    return Size(
        index,
        side,
        long,
        pieces=max(1, matrix.params // max(1, side * long)),
        bundle=(matrix.tensor, matrix.part.piece) if read_together else None,
        # Of a product of low rank only a small core is computed.
        on_host=matrix.factors is not None or (total_bytes is not None and lane_bytes(side) > total_bytes),
    )


def reads_slices(matrix: WeightMatrix, needs_weights: bool) -> bool:
    """Whether a matrix is read by slices: figures need its weights, or it is a convolution. Else it is by panels."""
    return needs_weights or matrix.kind == "conv"


def read_pieces(matrix: WeightMatrix, device: str, whole: bool) -> Iterator[Piece]:
    """Reads a matrix: its slices as they are, or panels in memory that the device can fetch by itself."""
    side = min(matrix.shape)
    if whole:
        yield from matrix.slices()
    elif matrix.half is not None:
        yield from _half_pieces(matrix.half, panel_length(side, 2), device)
    else:
        for slab in matrix.slabs(panel_length(side, 4)):
            yield staged(slab, device)


def _half_pieces(half: HalfSlabs, most: int, device: str) -> Iterator[torch.Tensor]:
    """16-bit numbers, read from the file into the memory that the GPU fetches them from, and widened there."""
    import torch

    made: list[torch.Tensor] = []

    def pinned(shape: tuple[int, int]) -> Codes:
        made.append(_pinned(shape, torch.int16, device))
        codes: Codes = made[0].numpy().view(np.uint16)
        return codes

    dtype = torch.bfloat16 if half.dtype == "BF16" else torch.float16
    for _ in half.stream(most, pinned):
        yield made.pop().view(dtype)


def staged(array: npt.NDArray[Any], device: str) -> torch.Tensor:
    """The numbers as a tensor in pinned memory, if it is for a GPU: the copy there then overlaps with other work."""
    import torch

    tensor = _pinned(array.shape, torch.float64 if array.dtype == np.float64 else torch.float32, device)
    tensor.numpy()[...] = array
    return tensor


def _pinned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    import torch

    return torch.empty(shape, dtype=dtype, pin_memory=torch.device(device).type == "cuda")


def piece_bytes(piece: Piece) -> int:
    """Bytes in memory of a slice or a panel."""
    return int(piece.nbytes)


def compute_group(
    group: Sequence[MatrixWork], device: str, arithmetic: GramArithmetic, batch: Callable[[int], int]
) -> Iterator[Computed]:
    """The spectra of matrices, in their order; those of one side that follow each other are solved together.

    Args:
        group: read on the way, in this order.
        device: where; on a GPU under the caller's stream.
        arithmetic: how.
        batch: how many Gram matrices of a side one call of the solver may take.
    """
    grams: list[torch.Tensor] = []
    owners: list[int] = []
    found: dict[int, list[Solved | None]] = {work.index: [] for work in group}
    weights: dict[int, Weights] = {}
    side = 0

    def solve() -> None:
        for owner, values in zip(owners, solved(grams, arithmetic.solver), strict=True):
            found[owner].append(values)
        owners.clear()

    for work in group:
        if grams and min(work.matrix.shape) != side:
            solve()
        side = min(work.matrix.shape)
        if work.whole:
            weights[work.index] = list(work.pieces)
        for gram in _grams(work, weights.get(work.index), device, arithmetic):
            if gram is None:
                found[work.index].append(None)
                continue
            grams.append(gram)
            owners.append(work.index)
            del gram
            if len(grams) >= batch(side):
                solve()
    if grams:
        solve()
    for work in group:
        pieces, conv = tuple(found[work.index]), work.matrix.kind == "conv"
        yield Computed(work.index, pieces, conv, weights.pop(work.index, None), device)


def settle(computed: Computed) -> MatrixResult:
    """The spectrum of what was computed; takes the CPU's time where only bands were. ``weights`` are handed on."""
    values: list[Float64] = []
    for piece in computed.pieces:
        each = None if piece is None else settled(piece)
        if each is None:
            return MatrixResult(computed.index, None, computed.weights, computed.device)
        values.append(each)
    evals = np.sort(np.concatenate(values))
    spectrum = checked(evals * CONV_NORM if computed.conv else evals)
    return MatrixResult(computed.index, spectrum, computed.weights, computed.device)


def process_single(
    index: int, matrix: WeightMatrix, precision: Precision, needs_weights: bool, device: str
) -> MatrixResult:
    """One matrix by itself, on this thread: what a lane does, with nothing else at the same time. ``spectrum`` is
    None for what the CPU has to look at, and for what it is better at (products of low rank, too large for the GPU)."""
    memory = memory_of([device])
    size = size_of(index, matrix, memory[1] if memory else None)
    if size.on_host or size.side <= HOST_SIDE:
        return MatrixResult(index, None, None, device)
    whole = reads_slices(matrix, needs_weights)
    work = MatrixWork(index, matrix, read_pieces(matrix, device, whole), whole)
    try:
        with ieee_float32():
            (computed,) = compute_group([work], device, device_arithmetic(device, precision), lambda _: 1)
            result = settle(computed)
    except Exception as problem:
        if did_not_converge(problem):
            return MatrixResult(index, None, None, device)
        raise
    return result


def _grams(
    work: MatrixWork, weights: Weights | None, device: str, arithmetic: GramArithmetic
) -> Iterator[torch.Tensor | None]:
    shape = work.matrix.shape
    if weights is None:
        yield gram_on_device(work.pieces, shape, device, arithmetic.gram)
        return
    for W in weights:
        panels = (staged(part, device) for part in slabs_of(W)(panel_length(min(shape), W.itemsize)))
        yield gram_on_device(panels, shape, device, arithmetic.gram)


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    """While it lasts, this thread's work on a GPU goes to a stream of its own, parallel to those of other threads."""
    import torch

    if torch.device(device).type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def warm_up(device: str) -> None:
    """Has torch load its solvers for a device and make what it keeps there. From one thread: torch loads its linear
    algebra for GPUs on first use, and fails with "lazy wrapper should be called at most once" where two threads do."""
    import torch

    identity = torch.eye(2, dtype=torch.float64, device=device)
    torch.linalg.eigvalsh(identity @ identity)


def free_cache(devices: Sequence[str]) -> None:
    """Gives freed GPU memory back before a larger piece is asked for."""
    import torch

    if any(torch.device(device).type == "cuda" for device in devices):
        torch.cuda.empty_cache()


def memory_of(devices: Sequence[str]) -> tuple[int, int] | None:
    """Free bytes of the GPU that has least free, all bytes of the smallest; None where torch computes on the CPU."""
    import torch

    if any(torch.device(device).type != "cuda" for device in devices):
        return None
    figures = [torch.cuda.mem_get_info(device) for device in devices]
    return min(free for free, _ in figures), min(total for _, total in figures)
