"""Where the tail of a spectrum has determinant 1: the ERG (exact renormalisation group) condition, det X = 1.

The eigenvalues are scaled so that their mean is 1. From the largest one down, the product first rises and then falls,
since it gains factors above 1 as long as λ is above the mean; the tail ends with the eigenvalue that brings it below
1. WeightWatcher takes a layer as ideal where the power law's tail and this one end together: ERG_gap = 0.

Knows sorted numbers only. Products are sums of logarithms, so that nothing over- or underflows at any n. (The product
itself does: WeightWatcher 0.7.7, which multiplies, found 5,482 where it is 6,063, at n = 8192.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True)
class DetXTail:
    """The tail of determinant 1.

    Attributes:
        detX_num: how many of the largest eigenvalues it takes for the product to fall below 1, that one included. None
            where all are equal within rounding: the product then is 1 whatever the number.
        detX_val: the smallest of them, in the units of the spectrum.
    """

    detX_num: int | None  # noqa: N815 - WeightWatcher's name, and the column's
    detX_val: float | None  # noqa: N815


def detx_tail(evals: Float64) -> DetXTail:
    """The tail of determinant 1, in O(n).

    Args:
        evals: ascending, not negative, finite, at least one above 0; shape (n,). A zero ends the tail at the latest.
    """
    n = len(evals)
    if n < 2 or evals[0] >= evals[-1] * (1.0 - n * EPS):
        return DetXTail(None, None)
    # The largest is taken out first: no sum overflows, and the mean is between 1/n and 1.
    relative = evals[::-1] / evals[-1]
    with np.errstate(divide="ignore"):  # λ = 0: its logarithm is -inf, and the product 0
        log_product = np.cumsum(np.log(relative) - np.log(relative.mean()))
    # By the inequality of the means the product of all is below 1; rounding can hide that for nearly equal values.
    below = log_product < 0.0
    number = int(below.argmax()) + 1 if bool(below.any()) else n
    return DetXTail(number, float(evals[n - number]))
