"""The same weights in random order: nothing lost, the same order again, and noise where there was structure."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd.config import PRECISIONS, FitSettings
from gpuherd.esd.fits.marchenko_pastur import fit_marchenko_pastur
from gpuherd.esd.fits.power_law import generator
from gpuherd.esd.fits.randomised import (
    PURPOSE,
    compare_with_random_order,
    jensen_shannon_distance,
    shuffled,
)
from gpuherd.esd.schema import RandomisedFigures
from gpuherd.esd.spectra.pooled import layer_spectrum

Float64 = npt.NDArray[np.float64]


def structured(rows: int = 120, columns: int = 200, seed: int = 0) -> npt.NDArray[np.float32]:
    """Noise and five strong directions."""
    rng = np.random.default_rng(seed)
    low_rank = rng.standard_normal((rows, 5)) @ rng.standard_normal((5, columns))
    return (rng.standard_normal((rows, columns)) + low_rank).astype(np.float32)


def compare(W: npt.NDArray[np.floating], *, name: str = "w", seed: int = 0) -> RandomisedFigures:
    return compare_with_random_order(name, [W], layer_spectrum([W]).evals, FitSettings(seed=seed))


def test_seed_and_name_decide_the_order() -> None:
    W = structured()
    assert compare(W) == compare(W)
    assert compare(W) != compare(W, seed=1)
    assert compare(W) != compare(W, name="other")
    assert np.array_equal(shuffled(W, generator(PURPOSE, 3, "ä")), shuffled(W, generator(PURPOSE, 3, "ä")))


def test_structure_becomes_noise() -> None:
    W = structured()
    evals = layer_spectrum([W]).evals
    figures = compare(W)
    assert fit_marchenko_pastur(evals, *W.shape).num_spikes == 5
    assert figures.rand_num_spikes == 0
    assert figures.rand_status == "ok"
    assert figures.rand_bulk_max is not None
    assert figures.max_rand_eval is not None
    # The largest eigenvalue of noise is the bulk's edge within a few Tracy-Widom widths, n^(-2/3) of it.
    assert figures.max_rand_eval == pytest.approx(figures.rand_bulk_max, rel=4 * 120 ** (-2 / 3))
    assert figures.rand_softrank is not None
    assert figures.rand_softrank == pytest.approx(figures.max_rand_eval / evals[-1], rel=1e-12)
    assert 0 < figures.rand_softrank < 0.3
    assert figures.rand_distance is not None
    assert figures.rand_distance > 0.1


@pytest.mark.parametrize("ratio", [1.0, 1.5, 3.0])
def test_noise_stays_noise(ratio: float) -> None:
    W = np.random.default_rng(7).standard_normal((300, int(300 * ratio)))
    figures = compare(W)
    assert figures.rand_num_spikes in (0, 1)
    assert figures.rand_softrank == pytest.approx(1.0, abs=0.06)
    assert figures.rand_distance is not None
    assert figures.rand_distance < 0.01
    edge = (math.sqrt(300) + math.sqrt(300 * ratio)) ** 2
    assert figures.max_rand_eval == pytest.approx(edge, rel=4 * 300 ** (-2 / 3))


def test_a_weight_that_is_too_large_is_a_trap() -> None:
    W = np.random.default_rng(8).standard_normal((150, 300))
    W[3, 7] = 60.0
    assert compare(W).rand_num_spikes == 1


def test_at_the_limit_of_float64_there_may_be_no_random_spectrum() -> None:
    """Two squares in one row add up to the least number above 0 that float64 has; apart, each is rounded to 0."""
    W = np.zeros((40, 50))
    W[3, [5, 9]] = 1.5e-162
    assert layer_spectrum([W]).evals[-1] == 5e-324
    figures = compare(W)
    reason = "in random order: all eigenvalues are zero: the weights are too small for float64"
    assert figures == RandomisedFigures(None, None, None, None, None, None, None, None, reason)


def test_small_spectra_take_five_orders() -> None:
    W = structured(40, 60)
    evals = layer_spectrum([W]).evals
    figures = compare(W)
    rng = generator(PURPOSE, 0, "w")
    spectra = [layer_spectrum([shuffled(W, rng)]).evals for _ in range(5)]
    assert figures.max_rand_eval == max(each[-1] for each in spectra)
    assert figures.rand_softrank == pytest.approx(np.mean([each[-1] for each in spectra]) / evals[-1])
    assert figures.rand_distance == pytest.approx(np.mean([jensen_shannon_distance(evals, x) for x in spectra]))
    pooled = fit_marchenko_pastur(np.sort(np.concatenate(spectra)), 40, 60)
    assert (figures.rand_sigma_mp, figures.rand_num_spikes) == (pooled.sigma_mp, pooled.num_spikes)


def test_the_slices_of_a_convolution_are_shuffled_apart_at_half_weight() -> None:
    slices = [structured(30, 20, seed) * (1 + seed) for seed in range(9)]
    evals = layer_spectrum(slices, conv=True).evals
    figures = compare_with_random_order("conv", slices, evals, FitSettings(), conv=True)
    rng = generator(PURPOSE, 0, "conv")
    expected = np.sort(np.concatenate([np.linalg.svd(shuffled(W, rng), compute_uv=False) ** 2 for W in slices])) / 2
    assert figures.max_rand_eval == pytest.approx(expected[-1], rel=1e-5)
    assert expected.sum() == pytest.approx(evals.sum(), rel=1e-5)  # an order keeps the norm


def written_out(p: Float64, q: Float64) -> float:
    """WeightWatcher's form: the spectra themselves, their mean, each divided by its sum on the way."""
    m = (p + q) / 2

    def divergence(a: Float64) -> float:
        a, b = a / a.sum(), m / m.sum()
        return math.fsum(x * math.log(x / y) for x, y in zip(a.tolist(), b.tolist(), strict=True) if x > 0)

    return math.sqrt(max((divergence(p) + divergence(q)) / 2, 0))


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), min_size=2, max_size=30))
def test_the_distance_is_that_of_two_distributions(pairs: list[tuple[float, float]]) -> None:
    p, q = np.sort(np.array(pairs), axis=0).T
    if p[-1] < 1e-3 or q[-1] < 1e-3:
        return
    distance = jensen_shannon_distance(p, q)
    assert 0 <= distance <= math.sqrt(math.log(2)) + 1e-12
    assert distance == pytest.approx(jensen_shannon_distance(q, p), abs=1e-9)
    assert distance == pytest.approx(jensen_shannon_distance(p * 4, q), abs=1e-7)
    assert jensen_shannon_distance(p, p * 8) == pytest.approx(0, abs=1e-7)
    # Of one sum, as a matrix and its random order have, this is what WeightWatcher computes.
    q = q * (p.sum() / q.sum())
    assert jensen_shannon_distance(p, q) == pytest.approx(written_out(p, q), abs=1e-7)


def test_distance_of_opposites() -> None:
    assert jensen_shannon_distance(np.array([0.0, 1.0]), np.array([1.0, 0.0])) == pytest.approx(math.sqrt(math.log(2)))


@pytest.mark.parametrize("deficient", [False, True])
def test_float32_arithmetic_is_taken_where_it_is_asked_for(deficient: bool) -> None:
    """Also where rounding leaves eigenvalues below 0, as in most square matrices."""
    W = np.full((600, 600), 0.3, np.float32) if deficient else structured()
    evals = layer_spectrum([W]).evals
    exact, rounded = (
        compare_with_random_order("w", [W], evals, FitSettings(precision=precision)).max_rand_eval
        for precision in PRECISIONS
    )
    assert exact != rounded
    assert exact == pytest.approx(rounded, rel=1e-4)


def test_distance_of_what_is_next_to_nothing() -> None:
    """Half of the least number of float64 is 0: the mean of two shares can be, where one is not."""
    least = np.array([5e-324, 1.0])
    assert jensen_shannon_distance(least, np.array([0.0, 1.0])) == 0.0
