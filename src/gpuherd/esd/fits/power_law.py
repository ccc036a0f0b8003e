"""Power-law fits p(x) ~ x^(-alpha), x >= xmin, to the upper tail of a spectrum; xmin is chosen by one of four methods.

It knows sorted numbers and how each method chooses. Exponents and distances are those of ``ks``, the exact search that
of ``candidates``. It doesn't know matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.esd.fits.candidates import TIE, Candidates
from gpuherd.esd.fits.interval import alpha_interval
from gpuherd.esd.fits.ks import Float64, Tails
from gpuherd.esd.fits.peak import peak_window
from gpuherd.esd.settings import KS, KS_KINDS, METHODS, FitSettings, Method


@dataclass(frozen=True, slots=True)
class PowerLawFit:
    """A fit, or the reason why there is none.

    Attributes:
        alpha: exponent of the density; None where there is no fit.
        D: Kolmogorov-Smirnov distance of the kind asked for, 0 to 1.
        xmin: the value from which on the law is fitted (one of the spectrum's own).
        xmax: the largest value of the spectrum. It takes no part in the likelihood.
        sigma: standard error of alpha, (alpha - 1) / sqrt(num_tail).
        num_tail: how many values are >= xmin in the sorted order, n - i.
        status: ``"ok"``, or one sentence that says why the rest is None.
        alpha_lo: the least alpha of the tails within ``delta`` of the distance D; None where it was not asked for.
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
    * ``xmin_peak``, ``xmin_peak_wide``: the candidate of smallest D_i in the window of ``peak.peak_window``.

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
    """``fit_power_law`` by the method, histogram, distance and delta of the settings (``clip_xmax`` is in ``clip``)."""
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
