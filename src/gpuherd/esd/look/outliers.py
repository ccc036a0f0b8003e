"""Layers and models whose alpha stands apart, by the robust z-score. Pure.

z = 0.6745 (x - median) / MAD, and |z| > 3.5 is an outlier (Iglewicz and Hoaglin, How to Detect and Handle Outliers,
1993). x is ln(alpha - 1), because alpha itself is skewed to the right: 1 / (alpha - 1) is the mean of ln(λ / xmin) in
the tail, so that a factor up and one down are as far. Median and MAD barely move with the outliers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LIMIT = 3.5
# With fewer values median and MAD say little.
LEAST = 8
_SCALE = 0.6745  # the upper quartile of the normal distribution: z is in standard deviations where x is normal


@dataclass(frozen=True, slots=True)
class Outlier:
    """A value that stands apart: which of those given, and how far (in robust standard deviations, signed)."""

    index: int
    z: float


def robust_z(values: Floats) -> Floats:
    """The robust z-score of each value; NaN for NaN, and for all where there are too few or half of them are equal."""
    import numpy as np

    present = values[np.isfinite(values)]
    if len(present) < LEAST:
        return np.full(values.shape, np.nan)
    middle = np.median(present)
    spread = np.median(np.abs(present - middle))
    if spread == 0:
        return np.full(values.shape, np.nan)
    return np.asarray(_SCALE * (values - middle) / spread)


def alpha_z(alpha: Floats) -> Floats:
    """The robust z-score of each alpha among the others, on ln(alpha - 1)."""
    import numpy as np

    return robust_z(np.log(np.where(alpha > 1, alpha - 1, np.nan)))


def outlying(alpha: Floats) -> list[Outlier]:
    """The alphas beyond LIMIT, the farthest first."""
    z = alpha_z(alpha)
    found = [Outlier(index, float(each)) for index, each in enumerate(z) if abs(each) > LIMIT]
    return sorted(found, key=lambda outlier: -abs(outlier.z))


def medians(alphas: Sequence[Floats]) -> Floats:
    """The median alpha of each model, NaN for a model without any."""
    import numpy as np

    return np.array([np.median(each[np.isfinite(each)]) if np.isfinite(each).any() else np.nan for each in alphas])
