"""Eigenvalues of weight matrices by torch on a device: which arithmetic a card is good at, and how it is used.

It knows cards, panels and Gram matrices. It doesn't know layers, files or threads: who calls it has chosen the
stream. What a Gram matrix can't resolve is said, not computed: the CPU finishes it (`eigenvalues`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.batching import panel_length
from gpuherd.esd.spectra.eigenvalues import SAFE_EXPONENT
from gpuherd.esd.spectra.gram import EPS
from gpuherd.esd.spectra.solvers import LapackError, loaded_library
from gpuherd.runs.worker import is_out_of_memory

if TYPE_CHECKING:
    import torch

    from gpuherd.esd.config import Precision

# --- Gram matrices ----------------------------------------------------------------------------------------------------
#
# Gram matrices on a torch device, added up from panels: in float64, in compensated float32, or in plain float32.
#
# The compensated form is for cards whose float64 units are few (1/32 or 1/64 of float32): every number is split into
# integers of 8 bits; sums of 1024 of their products are whole numbers of at most 24 bits, so that float32 matrix
# products are exact, and only their sum is taken in float64 (Ozaki, Ogita, Oishi & Rump, "Error-free transformations
# of matrix multiplication by using fast routines of matrix multiplication and its applications", Numerical Algorithms
# 59, 2012).
#
# It knows panels and precision. It doesn't know where panels come from, nor what is done with the result.

Form = Literal["float64", "split", "float32"]

# 1024 products of two integers of at most 2^7 add up to at most 2^24: the last integer up to which float32 has all.
SLICE_BITS = 8
CHUNK = 1024
MOST_SLICES = 8
# Rows this much smaller (powers of two) than the largest of their chunk are split as if they were not smaller still, so
# that the products of two of them, down to 2^-120, are normal numbers of float32.
ROW_RANGE = 60
# Powers of two that float64 holds as normal numbers, with room for their squares' partners.
_EXPONENT_MIN, _EXPONENT_MAX = -1000, 1000


class DeviceGramSum:
    """The Gram matrix of the shorter side of a matrix that comes in pieces along its longer side.

    Error: with w_i the i-th row (of the side that stays), every entry is within c ‖w_i‖ ‖w_j‖ of the exact one, so that
    every eigenvalue is within c Σ‖w_i‖² <= c n λ_max. For sums of m terms c is at worst (in practice about its root)

    * ``float64``: m 2^-53;
    * ``split``: 4 · 1024 · 9 · 2^-64 < 2.1e-15 for what 8 slices leave out, and 20 ceil(m / 1024) 2^-53 for the sum in
      float64: a fiftieth of the above. Rows below 2^-60 of the largest count as 2^-60 of it here;
    * ``float32``: m 2^-24.

    Args:
        side: n.
        device: as torch names it.
        form: see above.
    """

    def __init__(self, side: int, device: str, form: Form) -> None:
        import torch

        self._torch = torch
        self._form = form
        self._sum = torch.zeros((side, side), dtype=self.dtype, device=device)
        self._least = torch.zeros((), dtype=torch.float64, device=device)
        self._most = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum."""
        return self._torch.float32 if self._form == "float32" else self._torch.float64

    def add(self, panel: torch.Tensor) -> None:
        """Adds a piece of shape (side, any), of any float type, on the same device; widened 32 MB at a time."""
        torch = self._torch
        least, most = torch.aminmax(panel)  # NaN, if there is one, comes through both
        self._least = torch.minimum(self._least, least.to(torch.float64))
        self._most = torch.maximum(self._most, most.to(torch.float64))
        step = CHUNK if self._form == "split" else panel_length(len(panel))
        for start in range(0, panel.shape[1], step):
            work = panel[:, start : start + step].to(self.dtype)
            if self._form == "split":
                _add_split(self._sum, work)
            else:
                self._sum.addmm_(work, work.T)
            del work

    def peak(self) -> float:
        """The largest |number| that came; NaN or inf if one was: the result then means nothing. Waits for the GPU."""
        return float(self._torch.maximum(self._most, -self._least).item())

    def result(self) -> torch.Tensor:
        """The Gram matrix, (side, side), float64 (``float32`` for that form). The sum is used up."""
        if self._form != "split":
            return self._sum
        # Of each pair of slices only one order was multiplied.
        return self._sum + self._sum.T


def _add_split(total: torch.Tensor, chunk: torch.Tensor) -> None:
    """Adds half of the Gram matrix of ``chunk`` (n x at most 1024, float64): ``total + total.T`` gets all.

    A row is 2^e Σ_a s_a 2^-(8a-1) with whole |s_a| <= 2^7, where 2^e is above its largest number; what 8 slices leave
    is at most 2^(e-64). Slices are made as long as anything is left: random bfloat16 weights are done after 3 or 4.
    """
    import torch

    largest = chunk.abs().amax(dim=1)
    exponents = torch.where(largest > 0, torch.frexp(largest).exponent, _EXPONENT_MIN)
    top = max(_EXPONENT_MIN, min(_EXPONENT_MAX, int(exponents.max().item())))
    below = (exponents - top).clamp(min=-ROW_RANGE, max=0)
    rest = chunk * _power_of_two(-top) * _powers_of_two(-below)[:, None]
    scale = _powers_of_two(below).to(torch.float32)[:, None]
    slices: list[torch.Tensor] = []
    for number in range(MOST_SLICES):
        rest = rest * 2.0 ** (SLICE_BITS - 1 if number == 0 else SLICE_BITS)
        whole = torch.round(rest)
        rest = rest - whole  # exact: both are multiples of the last bit of rest
        slices.append(whole.to(torch.float32) * scale)
        if not bool(rest.any()):
            break
    for first in range(len(slices)):
        # 0-based: orders from first + second = MOST_SLICES on are below what the slices leave out.
        for second in range(first, min(len(slices), MOST_SLICES - first)):
            order = 2 * top - (SLICE_BITS * (first + second + 2) - 2) - (1 if first == second else 0)
            total.add_(slices[first] @ slices[second].T, alpha=_power_of_two(order))


def _power_of_two(exponent: int) -> float:
    """2^exponent; 0 where float64 has no such number."""
    return math.ldexp(1.0, max(-1100, exponent))


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponents as float64, from their bits: no power function of a device is asked to be exact."""
    import torch

    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


@contextmanager
def ieee_float32() -> Iterator[None]:
    """While it lasts, float32 products on CUDA are float32 products, not TF32 (10 bits). For the whole process."""
    import torch

    matmul = torch.backends.cuda.matmul
    name, ieee = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    before = getattr(matmul, name)
    setattr(matmul, name, ieee)
    try:
        yield
    finally:
        setattr(matmul, name, before)


# --- From a Gram matrix to a band -------------------------------------------------------------------------------------
#
# The first half of a symmetric eigenvalue problem on a GPU: an orthogonal similarity that leaves a narrow band.
#
# All of its n³ work is products of matrices, which a GPU does well and a CPU slowly; what follows (from the band to a
# tridiagonal matrix and its eigenvalues) is a chain of small steps in a cache, which a core of a CPU does well and a
# GPU slowly. Only the band crosses over. It knows Gram matrices and bands; it doesn't know cards or layers.
#
# Source: the two-stage reduction of Haidar, Ltaief & Dongarra ("Parallel reduction to condensed forms for symmetric
# eigenvalue problems using aggregated fine-grained and memory-aware kernels", SC 2011), here with dense products.

Float64 = npt.NDArray[np.float64]

# A wider band makes fewer steps for the GPU and more work for the CPU: for n = 4096 a core takes 0.65, 0.71 and 0.88 s
# for 32, 48 and 64 diagonals.
BAND = 48


@dataclass(frozen=True, slots=True)
class Band:
    """A symmetric band matrix. ``diagonals``: (width + 1, n) in LAPACK's lower band storage, Fortran order."""

    diagonals: Float64

    def eigenvalues(self) -> Float64:
        """All of them, ascending; by one core. The band is left as it is.

        Raises:
            numpy.linalg.LinAlgError: they can't be found.
        """
        library = loaded_library()
        if library is None or self.diagonals.shape[0] < 3:
            from scipy.linalg import eigvals_banded

            return np.asarray(eigvals_banded(self.diagonals, lower=True, check_finite=False), np.float64)
        try:
            return np.asarray(library.sterf(*library.band_to_tridiagonal(self.diagonals)), np.float64)
        except LapackError as problem:
            raise np.linalg.LinAlgError(str(problem)) from None


def to_band(gram: torch.Tensor, width: int = BAND) -> Band:
    """A band matrix with the eigenvalues of ``gram`` (float64, symmetric, both triangles), which is overwritten.

    Each step takes the next ``width`` columns below the band, P = Q R with Q = I - V T Vᵀ, and turns the rest A into
    Qᵀ A Q = A - V Wᵀ - W Vᵀ with W = (A V - ½ V Tᵀ (Vᵀ A V)) T. Backward stable, as every sequence of orthogonal
    similarities. Memory on the device: 4 n ``width`` numbers in addition to the matrix.
    """
    import torch

    n = len(gram)
    width = min(width, max(1, n - 1))
    for start in range(0, n - width - 1, width):
        rest = start + width
        reflectors, factor, triangle = _reflect(gram[rest:, start:rest])
        gram[rest:, start:rest] = 0.0
        gram[rest : rest + len(triangle), start:rest] = triangle
        trailing = gram[rest:, rest:]
        product = trailing @ reflectors
        inner = factor.T @ (reflectors.T @ product)
        other = (product - 0.5 * (reflectors @ inner)) @ factor
        trailing.addmm_(torch.cat((reflectors, other), 1), torch.cat((other, reflectors), 1).T, alpha=-1.0)
    return Band(_diagonals(gram, width))


def _reflect(panel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Householder vectors V, the triangle T and R, so that panel = (I - V T Vᵀ) R.

    T is the inverse of the upper triangle of Vᵀ V with 1/τ on its diagonal (Puglisi, SIAM J. Sci. Stat. Comput. 13,
    1992). A column that needs no reflection has τ = 0: its vector is made 0.
    """
    import torch

    packed, tau = torch.geqrf(panel)
    count = tau.shape[0]
    vectors = torch.tril(packed, -1)[:, :count]
    vectors.diagonal().fill_(1.0)
    needed = tau != 0
    vectors = vectors * needed
    inverse = torch.triu(vectors.T @ vectors, 1)
    inverse.diagonal().copy_(torch.where(needed, 1.0 / torch.where(needed, tau, 1.0), 1.0))
    identity = torch.eye(count, dtype=panel.dtype, device=panel.device)
    factor = torch.linalg.solve_triangular(inverse, identity, upper=True)
    return vectors, factor, torch.triu(packed[:count])


def _diagonals(matrix: torch.Tensor, width: int) -> Float64:
    """The main diagonal and those below it, on the CPU; what sticks out at the end of a diagonal is 0."""
    import torch

    n = len(matrix)
    found = torch.zeros((n, width + 1), dtype=matrix.dtype, device=matrix.device)
    for below in range(width + 1):
        found[: n - below, below] = matrix.diagonal(-below)
    return np.asfortranarray(found.cpu().numpy().T)


# --- Which arithmetic, and the solver ---------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


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
class GramArithmetic:
    """How a device computes: the form of its Gram matrices, and whether their eigenvalues are found on it, or their
    bands, whose eigenvalues are then found by the CPU."""

    gram: Form
    solver: Solver


def arithmetic_of(capability: tuple[int, int] | None, precision: Precision) -> GramArithmetic:
    """What suits a card best, at the precision asked for; ``capability`` is None for torch on the CPU.

    In float64 a card with few float64 units multiplies exactly in float32. The reduction to a band is
    2 n³ operations in products of matrices, for n = 4096 0.1 to 0.5 s at the 0.3 to 1.4 Tflop/s that even such cards
    have in float64, where a core of a CPU takes 4 s. The rest, 0.7 s of a core, is left to the CPU.
    """
    if precision == "float32":
        return GramArithmetic("float32", "device")
    if capability is None or capability in FAST_FLOAT64:
        return GramArithmetic("float64", "device")
    return GramArithmetic("split", "band")


def device_arithmetic(device: str, precision: Precision) -> GramArithmetic:
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
        form: see ``DeviceGramSum``.

    Returns:
        None where an entry is NaN or infinite, all are zero, or sums of squares could leave the range of the form.
    """
    rows, columns = shape
    total = DeviceGramSum(min(shape), device, form)
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
