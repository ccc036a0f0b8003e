"""Eigenvalues of weight matrices by torch on a device: which arithmetic a card is good at, and how it is used.

It knows cards, panels and Gram matrices. It doesn't know layers, files or threads: who calls it has chosen the stream.
What a Gram matrix can't resolve is said, not computed: the CPU finishes it (`eigenvalues`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.device_band import Band, to_band
from gpuherd.esd.spectra.device_gram import Form, GramSum
from gpuherd.esd.spectra.eigenvalues import SAFE_EXPONENT
from gpuherd.esd.spectra.foresight import EPS
from gpuherd.runs.worker import is_out_of_memory

if TYPE_CHECKING:
    import torch

    from gpuherd.esd.settings import Precision

logger = logging.getLogger(__name__)

Float64 = npt.NDArray[np.float64]

# Compute capabilities whose float64 units are half of the float32 ones or more, as NVIDIA's tables of arithmetic
# throughput have them: P100, V100, A100, H100 and H200, B100 and B200. All others have 1/32 or 1/64, among them 8.6 and
# 8.9 (RTX 30 and 40, A10, A40, L4, L40), 10.3 (B300) and 12.x (RTX 50).
FAST_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})


# Beyond 2^±24 sums of squares could come near the ends of float32.
SAFE_EXPONENT_FLOAT32 = 24

# How far, relatively, sums over eigenvalues may be from the same sums over the matrix: their rounding is at most about
# n eps, and what a defective solver returns is far off.
LARGEST_MISFIT = {np.dtype(np.float64): 1e-10, np.dtype(np.float32): 1e-2}

Solver = Literal["device", "band"]
# What a device finds out about a Gram matrix: its eigenvalues in the precision that they were computed in, or its band.
Solved = npt.NDArray[Any] | Band


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a device computes: the form of its Gram matrices, and whether their eigenvalues are found on it, or their
    bands, whose eigenvalues are then found by the CPU."""

    gram: Form
    solver: Solver


def arithmetic_of(capability: tuple[int, int] | None, precision: Precision) -> Arithmetic:
    """What suits a card best, at the precision asked for; ``capability`` is None for torch on the CPU.

    In float64 a card with few float64 units multiplies exactly in float32 (`device_gram`). The reduction to a band is
    2 n³ operations in products of matrices, for n = 4096 0.1 to 0.5 s at the 0.3 to 1.4 Tflop/s that even such cards
    have in float64, where a core of a CPU takes 4 s. The rest, 0.7 s of a core, is left to the CPU.
    """
    if precision == "float32":
        return Arithmetic("float32", "device")
    if capability is None or capability in FAST_FLOAT64:
        return Arithmetic("float64", "device")
    return Arithmetic("split", "band")


def device_arithmetic(device: str, precision: Precision) -> Arithmetic:
    """The same, of a device as torch names it."""
    import torch

    if torch.device(device).type != "cuda":
        return arithmetic_of(None, precision)
    return arithmetic_of(torch.cuda.get_device_capability(device), precision)


def gram_on_device(
    panels: Iterable[torch.Tensor], shape: tuple[int, int], device: str, form: Form
) -> torch.Tensor | None:
    """The Gram matrix of the shorter side, float64 (float32 for that form), or None where it would mean nothing.

    Args:
        panels: pieces of the matrix along its longer side, as stored, on the CPU or on the device: (any, columns) where
            there are more rows than columns or as many, else (rows, any). Each is let go before the next is asked for.
        shape: of the matrix.
        device: where to compute.
        form: see ``GramSum``.

    Returns:
        None where an entry is NaN or infinite, all are zero, or sums of squares could leave the range of the form.
    """
    rows, columns = shape
    total = GramSum(min(shape), device, form)
    for panel in panels:
        there = panel.to(device, non_blocking=True)
        arrived = _arrival(device)
        total.add(there.T if rows >= columns else there)
        if arrived is not None:
            # The panel's memory is taken until it has been copied. Without this, a thread that only queues work would
            # get ahead of a slow card by as much as the whole matrix.
            arrived.synchronize()
        del panel, there
    peak = total.peak()
    range_ = SAFE_EXPONENT_FLOAT32 if form == "float32" else SAFE_EXPONENT
    safe = math.isfinite(peak) and peak > 0 and abs(math.frexp(peak)[1]) <= range_
    return total.result() if safe else None


def _arrival(device: str) -> torch.cuda.Event | None:
    """What tells when all that was queued for a GPU so far, by this thread's stream, is done."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def solved(grams: list[torch.Tensor], solver: Solver) -> list[Solved | None]:
    """What a device finds out about Gram matrices of one size: their eigenvalues or bands, for ``settled`` to finish.

    The list is emptied on the way, and the matrices are overwritten. None for one of which the result can't be right:
    sum and sum of squares of the eigenvalues have to be the trace and the squared norm of the matrix. cuSOLVER 11.7.1
    (CUDA 12.6) is known to return wrong results for batches, without an error (pytorch issue 192483).
    """
    import torch

    if solver == "band":
        return [_checked_band(grams.pop(0)) for _ in range(len(grams))]
    stacked = grams[0][None] if len(grams) == 1 else torch.stack(grams)
    grams.clear()  # the solver makes a copy of its own: one of three less
    sums = _sums(stacked)
    values: npt.NDArray[Any] = torch.linalg.eigvalsh(stacked).cpu().numpy()
    found = zip(values, *sums.cpu().numpy(), strict=True)
    return [
        each if _add_up(each, float(np.linalg.norm(each.astype(np.float64))), trace, norm) else None
        for each, trace, norm in found
    ]


def _checked_band(gram: torch.Tensor) -> Band | None:
    trace, norm = _sums(gram[None])[:, 0].cpu().numpy()
    band = to_band(gram)
    main, below = band.diagonals[0], band.diagonals[1:]
    found = math.hypot(float(np.linalg.norm(main)), math.sqrt(2.0) * float(np.linalg.norm(below)))
    return band if _add_up(main, found, trace, norm) else None


def _sums(matrices: torch.Tensor) -> torch.Tensor:
    """Traces and Frobenius norms of a stack of matrices (b, n, n), float64, shape (2, b), on their device."""
    import torch

    traces = matrices.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
    norms = torch.stack([torch.linalg.vector_norm(matrix, dtype=torch.float64) for matrix in matrices])
    return torch.stack((traces, norms))


def _add_up(diagonal: npt.NDArray[Any], found_norm: float, trace: float, norm: float) -> bool:
    """Whether a result has the trace and the norm of its matrix; ``diagonal``: of the result, or its eigenvalues."""
    allowed = LARGEST_MISFIT[diagonal.dtype]
    off = abs(float(diagonal.sum(dtype=np.float64)) - trace)
    right = bool(off <= allowed * trace and abs(found_norm - norm) <= allowed * norm)  # so that NaN is wrong
    if not right:
        logger.warning(
            "a GPU's eigenvalues of a matrix of side %d don't add up to its trace and norm: the CPU computes them",
            len(diagonal),
        )
    return right


def settled(found: Solved, *, resolve: bool = True) -> Float64 | None:
    """The eigenvalues, float64 (n,), ascending; None where the least one is no more than rounding. Needs no device.

    Of float32 matrices the small ones always are rounding, and that is the price of it, but none may be 0 or less.
    Without ``resolve`` what rounding leaves below 0 is 0.
    """
    values = found.eigenvalues() if isinstance(found, Band) else found
    least = 0.0 if values.dtype == np.float32 else EPS
    sound = bool(np.isfinite(values).all()) and (not resolve or 0.0 < values[0] >= len(values) * least * values[-1])
    return np.maximum(values, 0.0).astype(np.float64, copy=False) if sound else None


def eigenvalues_of_grams(grams: list[torch.Tensor], solver: Solver, *, resolve: bool = True) -> list[Float64 | None]:
    """Both: the eigenvalues of Gram matrices of one size; the list is emptied on the way."""
    return [None if each is None else settled(each, resolve=resolve) for each in solved(grams, solver)]


def did_not_converge(problem: BaseException) -> bool:
    """Whether a solver gave up on one matrix: it found no eigenvalues, or cuSOLVER takes no matrix of this side (its
    limits differ by version). Memory is another matter."""
    import torch

    if isinstance(problem, np.linalg.LinAlgError | torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return True
    refused = isinstance(problem, RuntimeError) and str(problem).startswith("cusolver error")
    return refused and not is_out_of_memory(problem)
