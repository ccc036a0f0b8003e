"""Gram matrices on a torch device, added up from panels: in float64, in compensated float32, or in plain float32.

The compensated form is for cards whose float64 units are few (1/32 or 1/64 of float32): every number is split into
integers of 8 bits; sums of 1024 of their products are whole numbers of at most 24 bits, so that float32 matrix products
are exact, and only their sum is taken in float64 (Ozaki, Ogita, Oishi & Rump, "Error-free transformations of matrix
multiplication by using fast routines of matrix multiplication and its applications", Numerical Algorithms 59, 2012).

It knows panels and precision. It doesn't know where panels come from, nor what is done with the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from gpuherd.esd.spectra.batching import panel_length

if TYPE_CHECKING:
    import torch

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


class GramSum:
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
    if hasattr(matmul, "fp32_precision"):
        before = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before
        return
    allowed = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = allowed
