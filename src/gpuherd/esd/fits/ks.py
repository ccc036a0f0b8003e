"""The tails of one spectrum: their exponents, and how far each fitted law is from its values.

For a spectrum x_0 <= … <= x_{n-1} the tail i = 0 … n-2 has xmin = x_i and the n_i = n - i values from there on:

    alpha_i = 1 + n_i / S_i,   S_i = sum_{j>=i} ln(x_j / x_i)     maximum likelihood, no upper cut-off (Clauset, Shalizi
                                                                  and Newman 2009, eq. 3.1)
    F_j     = 1 - (x_j / x_i)^(1 - alpha_i),  E_j = (j - i) / n_i  the fitted and the empirical distribution at x_j
    D_i     = max_{j>=i} |F_j - E_j|                               one-sided: the left limits of E only
    D_i     = max_{j>=i} max(|F_j - E_j|, |E_j + 1 / n_i - F_j|)   two-sided: both limits, the textbook's distance

It knows sorted numbers. It doesn't know which tail to choose.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpuherd.esd.settings import KS

Float64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

EPS = float(np.finfo(np.float64).eps)


class Tails:
    """All tails of one spectrum: their slopes alpha_i - 1, and their distances on demand.

    Attributes:
        n: number of values.
        stop: tails 0 … stop-1 have a finite alpha. From ``stop`` on, all values are equal within n eps of the largest,
            the error of an eigenvalue.
        slopes: alpha_i - 1, shape (n - 1,), float64; of use below ``stop`` only.
    """

    def __init__(self, logs: Float64, steps: Float64, stop: int, ks: KS) -> None:
        """From ln(x_j / x_{n-1}), ascending to 0, shape (n,), and ln(x_{j+1} / x_j), shape (n - 1,).

        The sums S_i follow from S_i = S_{i+1} + (n - 1 - i) ln(x_{i+1} / x_i), a sum of terms of one sign: no digit is
        lost, as it would be in the difference of a sum of logarithms and n_i ln x_i.
        """
        self.n = len(logs)
        self.stop = stop
        self._logs = logs
        self._ranks = np.arange(self.n, dtype=np.float64)
        self._right = 1.0 if ks == "two-sided" else 0.0
        sums = np.cumsum(self._ranks[1:] * steps[::-1])  # from the top down
        with np.errstate(divide="ignore"):  # equal top values: tails from ``stop`` on
            self.slopes: Float64 = ((self._ranks[1:] + 1.0) / sums)[::-1]

    @classmethod
    def of(cls, x: Float64, ks: KS) -> Tails:
        """The tails of ``x``: ascending, positive, finite."""
        stop = int(np.searchsorted(x, x[-1] * (1.0 - len(x) * EPS)))
        return cls(_log_ratio(x, x[-1:]), _log_ratio(x[1:], x[:-1]), stop, ks)

    def distance(self, i: int) -> tuple[float, int]:
        """D_i exactly, and a j at which it is reached."""
        size = self.n - i
        gaps = self._logs[i:] - self._logs[i]
        gaps *= -self.slopes[i]
        np.expm1(gaps, out=gaps)
        gaps += self._ranks[:size] / size
        above, below = int(gaps.argmax()), int(gaps.argmin())
        over, under = float(gaps[above]) + self._right / size, -float(gaps[below])
        return (over, i + above) if over >= under else (under, i + below)

    def sampled(self, i: Indices, j: Indices | np.intp) -> Float64:
        """The distance of the tails ``i`` at single points ``j`` >= i: a lower bound of D_i. The arrays broadcast."""
        size = self.n - i
        gaps: Float64 = self._logs[i] - self._logs[j]
        gaps *= self.slopes[i]
        np.expm1(gaps, out=gaps)
        gaps += (j - i) / size
        if self._right:
            return np.maximum(gaps + self._right / size, -gaps)
        return np.abs(gaps, out=gaps)


def _log_ratio(x: Float64, base: Float64) -> Float64:
    """ln(x / base) to full relative accuracy also where the ratio is near 1, and without over- or underflow."""
    out: Float64 = np.log(x)
    out -= np.log(base)
    near = np.flatnonzero((0.5 * x < base) & (x > 0.5 * base))
    close = np.broadcast_to(base, x.shape)[near]
    out[near] = np.log1p((x[near] - close) / close)
    return out
