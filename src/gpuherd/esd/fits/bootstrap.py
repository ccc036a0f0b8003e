"""Is the fitted law plausible at all? A p-value by the semi-parametric bootstrap.

Clauset, Shalizi and Newman, SIAM Review 51 (2009), section 4.1: draw spectra from the fitted law (above xmin) and from
the observed values (below it), fit each by the same method, and count how many are farther from their own fit than the
observed spectrum is from its fit. Small p (they take p <= 0.1) rules the power law out; large p does not prove it.

It knows how the samples are drawn and counted. The method is that of ``power_law``.
"""

from __future__ import annotations

import math

import numpy as np

from gpuherd.esd.fits.candidates import Candidates
from gpuherd.esd.fits.ks import Float64, Tails
from gpuherd.esd.fits.power_law import PowerLawFit, candidate_range
from gpuherd.esd.settings import FitSettings

# The largest logarithm of a value that a sample may have: squares of it still are finite numbers.
LARGEST_LOG = 350.0


def bootstrap_p_value(x: Float64, fit: PowerLawFit, settings: FitSettings, rng: np.random.Generator) -> float:
    """The share of samples whose distance from their own fit is larger than D: 0 to 1.

    Its standard error is sqrt(p (1 - p) / samples): 2500 samples give it to 0.01. Whether a sample's least distance is
    larger than D can be told without knowing it: one candidate within D is enough, and bounds rule the others out.

    Args:
        x: what was fitted: ascending, positive, finite.
        fit: of ``x``; it must have an alpha.
        settings: ``bootstrap`` samples, and the method of the fit.
        rng: the random numbers.

    Raises:
        ValueError: the fit has no alpha.
    """
    if fit.alpha is None or fit.D is None or fit.num_tail is None:
        raise ValueError(f"there is no fit to test: {fit.status}")
    farther = 0
    for _ in range(settings.bootstrap):
        sample = draw(x, fit.num_tail, fit.alpha, rng)
        farther += not _is_within(sample, fit.D, settings)
    return farther / settings.bootstrap


def draw(x: Float64, num_tail: int, alpha: float, rng: np.random.Generator) -> Float64:
    """One sample of n values, ascending: each with probability num_tail / n from the power law that starts at the
    num_tail-th largest value of ``x``, else one of the values before that one."""
    start = len(x) - num_tail
    body = x[:start]
    tail_size = int(rng.binomial(len(x), num_tail / len(x)))
    logs = math.log(x[start]) + rng.standard_exponential(tail_size) / (alpha - 1.0)
    tail = np.exp(np.minimum(logs, LARGEST_LOG))
    return np.sort(np.concatenate([tail, rng.choice(body, len(x) - tail_size)])) if body.size else np.sort(tail)


def _is_within(x: Float64, limit: float, settings: FitSettings) -> bool:
    """Whether the fit of ``x`` has a distance of at most ``limit``. A sample without a fit is as far off as can be."""
    tails = Tails.of(x, settings.ks)
    allowed = candidate_range(x, tails, settings.fix_fingers, bins=settings.bins, xmin_pos=settings.xmin_pos)
    return not isinstance(allowed, str) and Candidates(tails, *allowed).any_within(limit)
