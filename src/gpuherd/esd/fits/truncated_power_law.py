"""A truncated power law p(x) ~ x^(-alpha) e^(-lambda x), x >= xmin, fitted by the powerlaw package, version 1.5.

The fit itself (Nelder-Mead on the likelihood from the package's own start, its tolerances, its distance) is the
package's. Two things are ours: which xmin are tried (those that the method chooses from; the one of least distance
counts, as in WeightWatcher's TPL for ``DKS`` and E_TPL for ``xmin_peak_wide``), and the exponential integral in
which the law is normalised, in float64 for all values at once, where the package calls mpmath for each.

It knows sorted numbers. A distance here is one-sided, as the package computes it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuherd.errors import MissingExtra
from gpuherd.esd.config import FitSettings
from gpuherd.esd.fits.power_law import candidate_range
from gpuherd.esd.fits.search import Float64, Tails

# --- The package ------------------------------------------------------------------------------------------------------
#
# Its version is read without importing it, so that the option can be refused before any work.


def require() -> None:
    """Raises MissingExtra when the powerlaw package is not there in a version that this module can use."""
    try:
        version: str | None = importlib.metadata.version("powerlaw")
    except importlib.metadata.PackageNotFoundError:
        version = None
    problem = version_problem(version)
    if problem is not None:
        raise MissingExtra(problem)


def version_problem(version: str | None) -> str | None:
    """Why this version of the powerlaw package (None: not installed) can't be used, and what to do; None if it can."""
    if version is None:
        return "--tpl needs powerlaw 1.5; install it with: pip install 'gpuherd[tpl]'"
    if version.partition(".")[0] != "1":
        return (
            f"--tpl needs powerlaw 1.5, but powerlaw {version} is installed, which computes other fits (it caps "
            "exponents at 3); pip install 'gpuherd[tpl]' brings the right one"
        )
    return None


# --- The fit ----------------------------------------------------------------------------------------------------------

EPS = float(np.finfo(np.float64).eps)

# From here on the continued fraction of E_p converges fast; below, the recurrence loses no digits.
FRACTION_FROM = 1.0

# From this order on the fraction converges fast for every z, and the recurrence, a step for each whole number, does not
# end: the optimiser tries orders of 1e15 on values that are nearly equal.
FRACTION_FROM_ORDER = 1000.0

# At z = 1, the slowest, it takes about 50 steps for p near 1 and fewer for larger p.
MOST_STEPS = 200


@dataclass(frozen=True, slots=True)
class TruncatedPowerLaw:
    """A fit, or the reason why there is none. The names are those of the columns.

    Attributes:
        tpl_alpha: exponent; None where there is no fit.
        tpl_lambda: rate of the exponential decay, 1 / x.
        tpl_xmin: the value from which on the law is fitted.
        tpl_D: one-sided Kolmogorov-Smirnov distance.
        tpl_status: ``"ok"``, or one sentence.
    """

    tpl_alpha: float | None
    tpl_lambda: float | None
    tpl_xmin: float | None
    tpl_D: float | None  # noqa: N815 - D, as the other one
    tpl_status: str


def fit(x: Float64, settings: FitSettings) -> TruncatedPowerLaw:
    """Fits the law from each xmin that the method of ``settings`` chooses from; the first of least distance counts.

    Args:
        x: ascending, positive, finite, at least two values.
        settings: ``fix_fingers``, ``bins`` and ``xmin_pos``.

    Raises:
        MissingExtra: powerlaw is not installed, or it is version 2, which caps exponents at 3 and computes other fits.
    """
    law = package_distribution()
    tails = Tails.of(x, settings.ks)
    allowed = candidate_range(x, tails, settings.fix_fingers, bins=settings.bins, xmin_pos=settings.xmin_pos)
    if isinstance(allowed, str):
        return _no_fit(allowed)
    best: Any = None
    with np.errstate(all="ignore"):  # the search for the optimum passes through parameters far out
        for xmin, start in zip(*np.unique(x[slice(*allowed)], return_index=True), strict=True):
            found = law(xmin=float(xmin))
            found.fit(x[allowed[0] + start :], suppress_output=True)
            if found.in_range() and found.D >= 0 and (best is None or found.D < best.D):
                best = found
    if best is None:
        return _no_fit("no xmin has a truncated power law with alpha above 1 and lambda above 0")
    return TruncatedPowerLaw(float(best.alpha), float(best.Lambda), float(best.xmin), float(best.D), "ok")


@functools.cache
def package_distribution() -> Any:
    """The package's truncated power law with its integrals in float64. Raises MissingExtra."""
    require()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import powerlaw

    class Law(powerlaw.Truncated_Power_Law):  # type: ignore[misc]
        """∫_x^∞ t^(-alpha) e^(-lambda t) dt = x^(1 - alpha) E_alpha(lambda x)."""

        def _cdf_base_function(self, x: Any) -> Any:
            values = np.asarray(x, dtype=np.float64)
            return 1.0 - values ** (1.0 - self.alpha) * exponential_integral(self.alpha, self.Lambda * values)

        def cdf(self, data: Any = None, survival: bool = False) -> Any:
            """The package's own, but that it says nothing on standard error where the law is beyond float64."""
            if survival or not self.in_range():
                return super().cdf(data, survival)
            below = self._cdf_base_function(self.xmin)
            return (self._cdf_base_function(data) - below) / (1.0 - below)

        @property
        def _pdf_continuous_normalizer(self) -> float:
            return float(1.0 / (1.0 - self._cdf_base_function(self.xmin)))

    return Law


def exponential_integral(p: float, z: npt.ArrayLike) -> Float64:
    """E_p(z) = ∫_1^∞ t^(-p) e^(-z t) dt for real p > 0 and z > 0; the shape of ``z``, float64.

    The relative error is about 1e-13, and up to 1e-15 / d for p by d above a whole number (none at whole numbers).
    Below z = 1 by E_(q+1) = (e^-z - z E_q) / q from an order in (0, 1], where it is z^(q-1) times the incomplete gamma
    function; from there on by its continued fraction (Abramowitz and Stegun 5.1.14 and 5.1.22, which hold for real p).
    """
    values = np.asarray(z, dtype=np.float64)
    out = np.empty(values.shape)
    small = (values < FRACTION_FROM) & (p < FRACTION_FROM_ORDER)
    if small.any():
        out[small] = _by_recurrence(p, values[small])
    out[~small] = _by_fraction(p, values[~small])
    return out


def _by_recurrence(p: float, z: Float64) -> Float64:
    from scipy.special import exp1, gamma, gammaincc

    steps = int(np.ceil(p)) - 1
    order = p - steps  # in (0, 1]
    found: Float64 = exp1(z) if order == 1.0 else z ** (order - 1.0) * gamma(1.0 - order) * gammaincc(1.0 - order, z)
    decay = np.exp(-z)
    for step in range(steps):
        found = (decay - z * found) / (order + step)
    return found


def _by_fraction(p: float, z: Float64) -> Float64:
    """The continued fraction in its contracted form, by Lentz's method."""
    b = z + p
    c = np.full(z.shape, np.inf)
    d = 1.0 / b
    found = d.copy()
    for step in range(1, MOST_STEPS):
        a = -step * (p - 1.0 + step)
        b = b + 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        factor = c * d
        found *= factor
        if not z.size or float(np.abs(factor - 1.0).max()) < EPS:
            break
    return found * np.exp(-z)


def _no_fit(status: str) -> TruncatedPowerLaw:
    return TruncatedPowerLaw(None, None, None, None, status)
