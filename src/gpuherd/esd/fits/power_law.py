"""Power-law fits p(x) ~ x^(-alpha), x >= xmin, to the upper tail of a spectrum; xmin is chosen by one of four methods.

It knows sorted numbers and how each method chooses. Exponents, distances and the exact search are those of
``search``. It doesn't know matrices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpuherd.esd.config import KS, KS_KINDS, METHODS, FitSettings, Method
from gpuherd.esd.fits.search import TIE, Candidates, Float64, Tails, alpha_interval

# --- The window around the peak ---------------------------------------------------------------------------------------
#
# The window around the peak of a spectrum in which ``xmin_peak`` looks for xmin.

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


# --- The four methods -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PowerLawFit:
    """A fit, or the reason why there is none.

    Attributes:
        alpha: exponent of the density; None where there is no fit.
        D: Kolmogorov-Smirnov distance of the requested kind, 0 to 1.
        xmin: the value from which on the law is fitted (one of the spectrum's own).
        xmax: the largest value of the spectrum. It takes no part in the likelihood.
        sigma: standard error of alpha, (alpha - 1) / sqrt(num_tail).
        num_tail: how many values are >= xmin in the sorted order, n - i.
        status: ``"ok"``, or one sentence that says why the rest is None.
        alpha_lo: the least alpha of the tails within ``delta`` of the distance D; None where it was not requested.
        alpha_hi: the largest one.
    """

    alpha: float | None
    D: float | None
    xmin: float | None
    xmax: float | None
    sigma: float | None
    num_tail: int | None
    status: str
    alpha_lo: float | None = None
    alpha_hi: float | None = None


def fit_power_law(
    evals: npt.NDArray[np.floating[Any]],
    method: Method,
    *,
    bins: int = 100,
    xmin_pos: float = 2,
    ks: KS = "one-sided",
    delta: float | None = None,
) -> PowerLawFit:
    """Fits a power law to a spectrum, with xmin chosen by ``method``.

    * ``DKS``: the candidate of smallest D_i, over all of them, exactly; the first if several are equal (within 1e-12).
    * ``xmin_mid``: the candidate i = int(n / xmin_pos), at most n - 2.
    * ``xmin_peak``, ``xmin_peak_wide``: the candidate of smallest D_i in the window of ``peak_window``.

    A candidate whose whole tail is equal within rounding (n eps of the largest value, the error of an eigenvalue) has
    no finite alpha and is passed over. alpha > 1 then holds for every other candidate.

    Args:
        evals: ascending, positive, finite; shape (n,). What is to be left out has been left out.
        method: one of ``METHODS``.
        bins: of the histogram for ``xmin_peak`` and ``xmin_peak_wide``.
        xmin_pos: the middle for ``xmin_mid``: 2 is the median.
        ks: the distance: one of ``KS_KINDS``.
        delta: alpha_lo and alpha_hi then span the alphas of all tails whose distance is at most D + delta: of the
            candidates that the method chooses from; of all, for ``xmin_mid``. None: they are not computed.

    Raises:
        ValueError: an unknown method or distance, bins < 1, xmin_pos < 1, delta < 0 or not finite, or a spectrum that
            is not as above.
    """
    x = np.asarray(evals, dtype=np.float64)
    _check_arguments(method, bins, xmin_pos, ks, delta)
    _check_spectrum(x)
    if len(x) < 2:
        return _no_fit(f"too few eigenvalues for a fit: {len(x)}, at least 2 are needed")
    tails = Tails.of(x, ks)
    allowed = candidate_range(x, tails, method, bins=bins, xmin_pos=xmin_pos)
    if isinstance(allowed, str):
        return _no_fit(allowed)
    candidates = Candidates(tails, *allowed)
    chosen, distance = candidates.least()
    if method == "xmin_mid":  # chosen by its place: any tail could have been
        candidates = Candidates(tails, 0, tails.stop)
        candidates.distances[chosen] = distance
    return _result(x, candidates, chosen, distance, delta)


def candidate_range(x: Float64, tails: Tails, method: Method, *, bins: int, xmin_pos: float) -> tuple[int, int] | str:
    """The candidates first … stop-1 that a method chooses from, at least one; or one sentence that says why there is
    none.

    Args:
        x: ascending, positive, finite, at least two values.
        tails: of ``x``.
    """
    n = len(x)
    if tails.stop == 0:
        return f"all {n} eigenvalues are equal: alpha is infinite"
    if method == "DKS":
        return 0, tails.stop
    if method == "xmin_mid":
        middle = min(int(n / xmin_pos), n - 2)
        if middle < tails.stop:
            return middle, middle + 1
        return f"the {n - middle} eigenvalues from the middle up are equal: alpha is infinite"
    low, high = peak_window(x, bins, method)
    first = int(np.searchsorted(x, low, side="left"))
    stop = min(int(np.searchsorted(x, high, side="right")), tails.stop)
    if first < stop:
        return first, stop
    return f"no candidate for xmin in the window around the peak, {low:.6g} to {high:.6g}"


def fit_by_settings(evals: npt.NDArray[np.floating[Any]], settings: FitSettings) -> PowerLawFit:
    """``fit_power_law`` by the method, histogram, distance and delta of the settings (without ``clip_xmax``)."""
    return fit_power_law(
        evals,
        settings.fix_fingers,
        bins=settings.bins,
        xmin_pos=settings.xmin_pos,
        ks=settings.ks,
        delta=settings.delta,
    )


def _check_arguments(method: str, bins: int, xmin_pos: float, ks: str, delta: float | None) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r} to choose xmin; use {', '.join(METHODS)}")
    if ks not in KS_KINDS:
        raise ValueError(f"unknown distance {ks!r}; use {', '.join(KS_KINDS)}")
    if bins < 1 or not xmin_pos >= 1:
        raise ValueError(f"bins ({bins}) and xmin_pos ({xmin_pos}) must be at least 1")
    if delta is not None and not 0 <= delta < math.inf:
        raise ValueError(f"delta ({delta}) must be a finite number, 0 or more")


def _check_spectrum(x: Float64) -> None:
    if x.ndim != 1 or (x.size and not (x[0] > 0 and math.isfinite(x[-1]) and bool((x[1:] >= x[:-1]).all()))):
        raise ValueError("a spectrum to fit must be one ascending row of positive, finite numbers")


def _no_fit(status: str) -> PowerLawFit:
    return PowerLawFit(None, None, None, None, None, None, status)


def _result(x: Float64, candidates: Candidates, i: int, distance: float, delta: float | None) -> PowerLawFit:
    slope = float(candidates.tails.slopes[i])
    low, high = (None, None) if delta is None else alpha_interval(candidates, distance + max(delta, TIE))
    return PowerLawFit(
        alpha=1.0 + slope,
        D=distance,
        xmin=float(x[i]),
        xmax=float(x[-1]),
        sigma=slope / math.sqrt(len(x) - i),
        num_tail=len(x) - i,
        status="ok",
        alpha_lo=low,
        alpha_hi=high,
    )


# --- Fingers ----------------------------------------------------------------------------------------------------------
#
# Leaves out the largest eigenvalues where they inflate alpha ("fingers": a few values far above the rest of the
# tail).
#
# The rule is WeightWatcher's ``clip_xmax``: with the k largest values left out, k = 2 … 9, the first fit counts whose
# alpha is more than 1 below that of all values; an alpha of 2 or less before that ends the search. It knows fits
# only.

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


# --- Random numbers of a matrix ---------------------------------------------------------------------------------------
#
# Random numbers that a matrix gets whatever else is analysed, before it or at the same time, and on any machine.


def generator(purpose: str, seed: int, name: str) -> np.random.Generator:
    """The random numbers of one matrix for one purpose: they depend on these three alone.

    Args:
        purpose: what they are for, so that two uses don't draw the same numbers.
        seed: 0 or more.
        name: of the matrix; any text.
    """
    digest = hashlib.sha256(f"{purpose}\0{name}".encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, dtype="<u4").tolist()])


# --- p-value ----------------------------------------------------------------------------------------------------------
#
# Is the fitted law plausible at all? A p-value by the semi-parametric bootstrap.
#
# Clauset, Shalizi and Newman, SIAM Review 51 (2009), section 4.1: draw spectra from the fitted law (above xmin) and
# from the observed values (below it), fit each by the same method, and count how many are farther from their own fit
# than the observed spectrum is from its fit. Small p (they take p <= 0.1) rules the power law out; large p does not
# prove it.
#
# It knows how the samples are drawn and counted. The method is that of ``power_law``.

# The largest logarithm of a value that a sample may have: squares of it still are finite numbers.
LARGEST_LOG = 350.0


def bootstrap_p_value(x: Float64, fit: PowerLawFit, settings: FitSettings, rng: np.random.Generator) -> float:
    """The share of samples whose distance from their own fit is larger than D: 0 to 1.

    Its standard error is sqrt(p (1 - p) / samples): 2500 samples give it to 0.01. Whether a sample's least distance is
    larger than D can be decided without knowing it: one candidate within D is enough, and bounds rule the others out.

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
