"""Leaves out the largest eigenvalues where they inflate alpha ("fingers": a few values far above the rest of the tail).

The rule is WeightWatcher's ``clip_xmax``: with the k largest values left out, k = 2 … 9, the first fit counts whose
alpha is more than 1 below that of all values; an alpha of 2 or less before that ends the search. It knows fits only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuherd.esd.fits.ks import Float64
from gpuherd.esd.fits.power_law import PowerLawFit

# The numbers of largest values that are left out, in turn.
CLIPPED = range(2, 10)

# So much must alpha fall for the values left out to count as fingers.
FALL = 1.0

# At this alpha or below, a spectrum is as heavy-tailed as theory has it; there is nothing to mend.
LEAST_ALPHA = 2.0


@dataclass(frozen=True, slots=True)
class ClippedFit:
    """The fit that counts, and what it took.

    Attributes:
        fit: of the values kept.
        kept: the values that it was made of.
        num_fingers: 0 where nothing was left out; else the number left out less 1, as WeightWatcher counts them.
        raw_alpha: alpha of all values; None where they have no fit.
    """

    fit: PowerLawFit
    kept: Float64
    num_fingers: int
    raw_alpha: float | None


def fit_clipped(x: Float64, fit: Callable[[Float64], PowerLawFit]) -> ClippedFit:
    """Fits ``x``, and again without its largest values.

    Args:
        x: ascending, positive, finite.
        fit: by which method; called up to 9 times.
    """
    raw = fit(x)
    if raw.alpha is not None:
        for k in CLIPPED:
            clipped = fit(x[: max(len(x) - k, 0)])
            if clipped.alpha is None:
                break
            if clipped.alpha + FALL < raw.alpha:
                return ClippedFit(clipped, x[: len(x) - k], k - 1, raw.alpha)
            if clipped.alpha <= LEAST_ALPHA:
                break
    return ClippedFit(raw, x, 0, raw.alpha)
