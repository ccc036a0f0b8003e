"""clip_xmax: the rule, its counts, and that it goes through to the row."""

from __future__ import annotations

import numpy as np
import pytest

from gpuherd.esd import FitSettings, PowerLawFit, analyse_layer, fit_power_law
from gpuherd.esd.fits.power_law import fit_clipped
from gpuherd.esd.fits.search import Float64


def told(alphas: dict[int, float | None]) -> list[int]:
    """Runs the rule on a spectrum of 20 values whose fits have the alphas given by number of values left out. Returns
    num_fingers and every number that was tried."""
    x = np.arange(1.0, 21.0)
    tried: list[int] = []

    def fit(values: Float64) -> PowerLawFit:
        left_out = len(x) - len(values)
        tried.append(left_out)
        assert (values == x[: len(values)]).all()
        alpha = alphas.get(left_out, 5.0)
        return PowerLawFit(alpha, None, None, None, None, None, "ok" if alpha is not None else "none")

    clipped = fit_clipped(x, fit)
    assert clipped.raw_alpha == alphas.get(0, 5.0)
    assert len(clipped.kept) == 20 - (clipped.num_fingers + 1 if clipped.num_fingers else 0)
    assert clipped.fit.alpha == alphas.get(20 - len(clipped.kept), 5.0)
    return [clipped.num_fingers, *tried]


def test_the_rule() -> None:
    assert told({}) == [0, 0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert told({2: 3.9}) == [1, 0, 2]
    assert told({2: 4.0, 5: 3.99}) == [4, 0, 2, 3, 4, 5]
    assert told({9: 3.0}) == [8, 0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_an_alpha_of_two_ends_the_search() -> None:
    assert told({0: 2.9, 2: 2.5, 3: 2.0, 4: 1.0}) == [0, 0, 2, 3]


def test_no_fit_of_all_or_of_fewer_values_ends_it() -> None:
    assert told({0: None}) == [0, 0]
    assert told({3: None, 4: 1.0}) == [0, 0, 2, 3]


@pytest.mark.parametrize("count", range(2, 13))
def test_short_spectra_are_left_alone(count: int) -> None:
    x = np.geomspace(1.0, 2.0, count)
    clipped = fit_clipped(x, lambda values: fit_power_law(values, "DKS"))
    assert clipped.fit.status == "ok"
    assert clipped.raw_alpha is not None


def test_a_row_says_what_was_left_out() -> None:
    """A flat bulk and six values above it, of which seven are cut; both alphas are those of WeightWatcher 0.7.7."""
    rng = np.random.default_rng(13)
    W = np.diag(np.sqrt(np.concatenate([rng.uniform(0.5, 1.5, 100), 1.5 + rng.uniform(0, 2, 6)])))
    plain, clipped = (analyse_layer("w", [W], FitSettings("DKS", clip_xmax=on)) for on in (False, True))
    assert (plain.num_fingers, plain.raw_alpha) == (None, None)
    assert (clipped.num_fingers, clipped.raw_alpha) == (6, plain.alpha)
    assert (clipped.raw_alpha, clipped.alpha) == pytest.approx((5.594399343426711, 4.302433879644529), rel=1e-9)
    x = np.sort(np.diag(W) ** 2)
    fit = fit_power_law(x[:-7], "DKS", delta=1e-3)
    assert (clipped.alpha, clipped.xmin, clipped.D) == pytest.approx((fit.alpha, fit.xmin, fit.D), rel=1e-9)
    assert (clipped.alpha_lo, clipped.alpha_hi) == pytest.approx((fit.alpha_lo, fit.alpha_hi), rel=1e-9)
    assert clipped.xmax == pytest.approx(x[-8])
    assert clipped.num_pl_spikes == (x >= x[-7 - (fit.num_tail or 0)]).sum()  # those left out too
    assert clipped.spectral_norm == plain.spectral_norm
