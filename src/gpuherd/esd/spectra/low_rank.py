"""The spectrum of a product of two thin factors, such as the update s B A of a LoRA adapter, from its r x r core.

With the QR factorisations left = Q1 R1 and rightᵀ = Q2 R2, left right = Q1 (R1 R2ᵀ) Q2ᵀ: the product has the singular
values of the core R1 R2ᵀ, of r rows and columns at most, and min(M, N) - r that are exactly zero. No M x N matrix is
made, and the zeros are zeros: ranks come out right.

Knows factors. Doesn't know adapters, names or fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.spectra.pooled import CONV_NORM, LayerSpectrum, checked, too_small

Float64 = npt.NDArray[np.float64]
Factor = npt.NDArray[np.floating[Any]]


def low_rank_spectrum(products: Sequence[tuple[Factor, Factor]], *, conv: bool = False) -> LayerSpectrum:
    """The pooled spectrum of a product, or of those of a convolution's kernel positions.

    Args:
        products: left factors (M, r) and right factors (r, N), of one shape.
        conv: they belong to a convolution: every eigenvalue is multiplied by 0.5, as in ``layer_spectrum``.

    Returns:
        min(M, N) eigenvalues for each product, zeros with them; or the reason why there are none.
    """
    (rows, _), (_, columns) = products[0][0].shape, products[0][1].shape
    nothing = np.empty(0)
    problem = too_small(rows, columns, len(products))
    if problem is not None:
        return LayerSpectrum(nothing, problem)
    if not all(np.isfinite(factor).all() for product in products for factor in product):
        return LayerSpectrum(nothing, "the adapter's factors have NaN or infinite entries")
    if not any(left.any() and right.any() for left, right in products):
        return LayerSpectrum(nothing, "all weights are zero")
    values = np.sort(np.concatenate([low_rank_eigenvalues(left, right) for left, right in products]))
    return checked(values * CONV_NORM if conv else values)


def low_rank_eigenvalues(left: Factor, right: Factor) -> Float64:
    """The squared singular values of ``left @ right``, ascending.

    Args:
        left: (M, r), finite.
        right: (r, N), finite.

    Returns:
        float64, min(M, N) of them, of which at most r are not zero; absolute error about 1e-15 r times the largest for
        factors that are not themselves close to dependent. Work (M + N) r², memory (M + N) r.
    """
    from scipy.linalg import qr, svdvals

    (rows, _), (_, columns) = left.shape, right.shape
    result: Float64 = np.zeros(min(rows, columns))
    # Each factor is scaled to entries of 1 at most, so that no product leaves the range of float64.
    first, second = _exponent(left), _exponent(right)
    if first is None or second is None:
        return result
    (r1,) = qr(np.ldexp(left.astype(np.float64), -first), mode="r", overwrite_a=True, check_finite=False)
    (r2,) = qr(np.ldexp(right.T.astype(np.float64), -second), mode="r", overwrite_a=True, check_finite=False)
    rank = left.shape[1]
    sigma = svdvals(r1[:rank] @ r2[:rank].T, overwrite_a=True, check_finite=False)
    with np.errstate(over="ignore", under="ignore"):
        result[len(result) - len(sigma) :] = np.ldexp(sigma[::-1] ** 2, 2 * (first + second))
    return result


def _exponent(factor: Factor) -> int | None:
    """The binary exponent of the largest entry, None where all are zero."""
    peak = float(np.abs(factor).max(initial=0.0))
    return math.frexp(peak)[1] if peak else None
