"""The bootstrap p-value: equal to one that fits every sample in full, reproducible, right where the law is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.esd.fits.plain import Float64, spectrum

from gpuherd.esd import FitSettings, analyse_layer, fit_power_law
from gpuherd.esd.config import KS, KS_KINDS, METHODS, Method
from gpuherd.esd.fits.power_law import LARGEST_LOG, bootstrap_p_value, draw, fit_by_settings, generator


def in_full(x: Float64, settings: FitSettings, rng: np.random.Generator) -> float:
    """By the definition: fit each sample, compare its distance with that of the spectrum."""
    fit = fit_by_settings(x, settings)
    assert fit.D is not None
    assert fit.alpha is not None
    assert fit.num_tail is not None
    samples = [draw(x, fit.num_tail, fit.alpha, rng) for _ in range(settings.bootstrap)]
    fits = [fit_by_settings(sample, settings) for sample in samples]
    return sum(each.D is None or each.D > fit.D for each in fits) / settings.bootstrap


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ks", KS_KINDS)
@pytest.mark.parametrize("family", ["pareto", "two laws", "random matrix", "duplicates and ties"])
def test_p_is_that_of_full_fits(method: Method, ks: KS, family: str) -> None:
    for seed in range(2):
        x = spectrum(family, seed, 250)
        settings = FitSettings(method, ks=ks, bootstrap=25)
        fit = fit_by_settings(x, settings)
        if fit.alpha is not None:
            p = bootstrap_p_value(x, fit, settings, np.random.default_rng(seed))
            assert p == in_full(x, settings, np.random.default_rng(seed))


def test_the_samples_are_the_tail_by_the_law_and_the_rest_as_observed() -> None:
    x = np.sort(np.concatenate([np.linspace(0.1, 0.9, 3000), np.random.default_rng(0).pareto(1.5, 1000) + 1]))
    sample = draw(x, 1000, 2.5, np.random.default_rng(1))
    assert len(sample) == 4000
    assert (np.diff(sample) >= 0).all()
    body, tail = sample[sample < x[3000]], sample[sample >= x[3000]]
    assert abs(len(tail) - 1000) < 5 * math.sqrt(750)
    assert set(body) <= set(x[:3000])
    assert np.log(tail / x[3000]).mean() == pytest.approx(1 / 1.5, rel=0.15)
    assert fit_power_law(tail, "xmin_mid", xmin_pos=len(tail)).alpha == pytest.approx(2.5, rel=0.1)


def test_a_spectrum_that_is_all_tail_has_no_body_to_draw_from() -> None:
    x = np.sort(np.random.default_rng(0).pareto(2, 50) + 1)
    sample = draw(x, 50, 3.0, np.random.default_rng(0))
    assert len(sample) == 50
    assert (sample >= x[0]).all()


def test_an_alpha_near_one_draws_finite_values() -> None:
    x = 10.0 ** np.linspace(-300, 300, 60)
    settings = FitSettings("DKS", bootstrap=20)
    fit = fit_by_settings(x, settings)
    assert fit.alpha is not None
    assert fit.alpha < 1.01
    sample = draw(x, 60, fit.alpha, np.random.default_rng(0))
    assert np.isfinite(sample).all()
    assert sample[-1] <= math.exp(LARGEST_LOG)
    assert 0 <= bootstrap_p_value(x, fit, settings, np.random.default_rng(0)) <= 1


def p_of(x: Float64, seed: int) -> float:
    settings = FitSettings("DKS", bootstrap=60)
    return bootstrap_p_value(x, fit_by_settings(x, settings), settings, np.random.default_rng(seed))


def test_p_is_spread_evenly_where_the_law_holds() -> None:
    """Of 40 samples of power laws, about 4 have p <= 0.1, and half have p >= 0.5."""
    found = np.array([p_of(np.sort(np.random.default_rng(s).pareto(1.5, 120) + 1), s) for s in range(40)])
    assert (found <= 0.1).sum() <= 10
    assert 10 <= (found >= 0.5).sum() <= 32


def test_p_is_small_where_the_law_does_not_hold() -> None:
    x = np.sort(np.random.default_rng(0).uniform(1, 2, 600))
    settings = FitSettings("xmin_mid", bootstrap=100)
    assert bootstrap_p_value(x, fit_by_settings(x, settings), settings, np.random.default_rng(0)) == 0.0


def test_without_a_fit_there_is_nothing_to_test() -> None:
    x, settings = np.full(5, 2.0), FitSettings("DKS", bootstrap=10)
    with pytest.raises(ValueError, match="no fit to test: all 5 eigenvalues are equal"):
        bootstrap_p_value(x, fit_by_settings(x, settings), settings, np.random.default_rng(0))


def test_the_random_numbers_depend_on_purpose_seed_and_name_alone() -> None:
    def first(purpose: str, seed: int, name: str) -> float:
        return float(generator(purpose, seed, name).random())

    assert first("bootstrap", 1, "h.0") == first("bootstrap", 1, "h.0")
    keys = [("bootstrap", 1, "h.0"), ("bootstrap", 1, "h.1"), ("bootstrap", 2, "h.0"), ("order", 1, "h.0")]
    assert len({first(*key) for key in keys}) == 4
    assert 0 <= first("bootstrap", 0, "\udcff surrogate") < 1


def test_a_row_has_p_when_asked_and_the_same_one_each_time() -> None:
    W = np.random.default_rng(8).standard_normal((60, 90))
    settings = FitSettings("DKS", bootstrap=40)
    row = analyse_layer("a", [W], settings)
    assert row.p_value is not None
    assert 0 < row.p_value < 1
    assert analyse_layer("a", [W], settings) == row
    seeds = {analyse_layer("a", [W], FitSettings("DKS", bootstrap=40, seed=seed)).p_value for seed in range(6)}
    names = {analyse_layer(f"a{k}", [W], settings).p_value for k in range(6)}
    assert len(seeds) > 1
    assert len(names) > 1
    assert analyse_layer("a", [W], FitSettings("DKS")).p_value is None
    assert analyse_layer("eye", [np.eye(5)], settings).p_value is None
