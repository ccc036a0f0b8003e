"""The window around the peak of a spectrum in which ``xmin_peak`` looks for xmin.

It knows a histogram. It doesn't know distances.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
PeakMethod = Literal["xmin_peak", "xmin_peak_wide"]


def peak_window(x: Float64, bins: int, method: PeakMethod) -> tuple[float, float]:
    """The least and the largest xmin allowed.

    p is the left edge of the first fullest of ``bins`` equal bins of log10 x over [min, max].

    * ``xmin_peak``: 0.95 p to 1.5 p, as its inventors document it.
    * ``xmin_peak_wide``: log10(0.95 p) to 1.5 p, as WeightWatcher, TempBalance, AlphaPruning and FARMS compute it: they
      compare eigenvalues with a logarithm. For p < 1.05 that is negative, and the window has no lower end. (The
      powerlaw package, which searches for WeightWatcher, also leaves out the last value of a window.)

    Where the values lie so close together that float64 has no ``bins`` numbers between their logarithms, every edge is
    the least value within rounding, and p is that.

    Args:
        x: ascending, positive, finite, two values at least.
        bins: at least 1.
        method: one of the two.
    """
    logs = np.log10(x)
    edges = np.linspace(logs[0], logs[-1], bins + 1)
    peak = float(x[0])
    if bool((edges[1:] > edges[:-1]).all()):  # else numpy makes no histogram
        counts, edges = np.histogram(logs, bins=bins)
        peak = 10.0 ** float(edges[int(counts.argmax())])
    low = math.log10(0.95 * peak) if method == "xmin_peak_wide" else 0.95 * peak
    return low, 1.5 * peak
