"""The Marchenko-Pastur fit: known noise, planted spikes, and the same sigma as the procedure written out plainly."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brute

from gpuherd.esd.fits.marchenko_pastur import estimated_density, fit_marchenko_pastur
from gpuherd.esd.schema import MarchenkoPasturFit

Float64 = npt.NDArray[np.float64]

RATIOS = [1.0, 1.5, 3.0, 8.0]


def spectrum(W: Float64) -> Float64:
    return np.asarray(np.linalg.svd(W, compute_uv=False)[::-1] ** 2, np.float64)


def noise(seed: int, small: int, ratio: float, scale: float = 1.0) -> Float64:
    return scale * np.random.default_rng(seed).standard_normal((small, int(small * ratio)))


def spiked(W: Float64, count: int, seed: int = 1) -> Float64:
    """W plus ``count`` orthogonal directions, far above the bulk's edge and apart from each other."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((side, count)))[0] for side in W.shape)
    edge = math.sqrt(W.shape[0]) + math.sqrt(W.shape[1])
    spikes: Float64 = left @ np.diag(edge * (1.5 + 0.2 * np.arange(count))) @ right.T
    return W + spikes


def fit(W: Float64) -> MarchenkoPasturFit:
    return fit_marchenko_pastur(spectrum(W), *W.shape)


def entry_deviation(found: MarchenkoPasturFit, W: Float64) -> float:
    """The standard deviation that the fit gives to the entries of W."""
    assert found.sigma_mp is not None
    assert found.W_scale is not None
    return found.sigma_mp / (found.W_scale * math.sqrt(max(W.shape)))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("seed", range(3))
def test_noise_has_its_sigma_and_no_spikes(ratio: float, seed: int) -> None:
    W = noise(seed, 400, ratio, scale=0.02)
    found = fit(W)
    assert found.mp_status == "ok"
    assert entry_deviation(found, W) == pytest.approx(0.02, rel=0.01)
    assert found.num_spikes is not None
    assert found.num_spikes <= 1
    assert found.bulk_max == pytest.approx((0.02 * (math.sqrt(400) + math.sqrt(400 * ratio))) ** 2, rel=0.02)
    assert found.mp_softrank == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("count", [1, 3, 7])
def test_planted_spikes_are_found(ratio: float, count: int) -> None:
    W = spiked(noise(0, 500, ratio), count)
    found = fit(W)
    assert found.num_spikes == count
    # The kernel blurs the steep lower edge of Q = 1.5, and of a square matrix only the density's height is fitted.
    assert entry_deviation(found, W) == pytest.approx(1.0, rel=0.02 if ratio >= 3 else 0.12)


def test_edges_are_in_the_units_of_the_spectrum() -> None:
    W = noise(2, 200, 2.0)
    plain, scaled = fit(W), fit(W * 2.0**-7)
    assert plain.bulk_max is not None
    assert plain.bulk_min is not None
    assert plain.tw_edge is not None
    assert plain.bulk_min < plain.bulk_max < plain.tw_edge
    assert scaled.bulk_max == pytest.approx(plain.bulk_max * 2.0**-14, rel=1e-12)
    assert scaled.tw_edge == pytest.approx(plain.tw_edge * 2.0**-14, rel=1e-12)
    assert scaled.sigma_mp == pytest.approx(plain.sigma_mp, rel=1e-12)
    assert scaled.num_spikes == plain.num_spikes
    evals = spectrum(W)
    assert plain.num_spikes == (evals > plain.tw_edge).sum()
    assert plain.mp_softrank == pytest.approx(plain.bulk_max / evals[-1], rel=1e-12)
    assert plain.W_scale is not None
    assert plain.W_scale == pytest.approx(math.sqrt(200 / evals.sum()), rel=1e-12)
    # Tracy and Widom's width as WeightWatcher takes it, for eigenvalues of mean 1
    unit = plain.W_scale**2
    width = math.sqrt((plain.bulk_max * unit) ** (2 / 3) * 200 ** (-2 / 3) / math.sqrt(2))
    assert plain.tw_edge * unit == pytest.approx(plain.bulk_max * unit + width, rel=1e-12)


def test_the_pooled_slices_of_a_convolution() -> None:
    rng = np.random.default_rng(4)
    slices = rng.standard_normal((9, 64, 96))
    evals = np.sort(np.concatenate([spectrum(each) for each in slices])) / 2
    found = fit_marchenko_pastur(evals, 64, 96)
    assert found.sigma_mp == pytest.approx(1.0, rel=0.02)
    assert found.num_spikes is not None
    assert found.num_spikes <= 9


def test_a_spectrum_without_a_bulk_is_a_reason_and_no_number() -> None:
    """Nearly everything in one eigenvalue: the density is known at 0 alone, and no bulk has its peak there."""
    found = fit_marchenko_pastur(np.array([*np.full(49, 1e-9), 1.0]), 50, 100)
    assert found.mp_status == "no bulk has its edges on both sides of the peak of the spectrum"
    assert astuple(found) == (None, pytest.approx(math.sqrt(50)), None, None, None, None, None, found.mp_status)


def test_a_spectrum_that_falls_between_the_points() -> None:
    """All but one of 5,000 at 0.8 of the mean; the one is so large that the points of the density are 1 apart."""
    found = fit_marchenko_pastur(np.array([*np.full(4999, 1.0), 1250.0]), 100, 200)
    assert found.mp_status == "the density of the spectrum is nowhere above 0.01"
    assert found.sigma_mp is None


# --- the procedure as its definition says, each density estimated anew -----------------------------------------------


def plain_density(values: Float64, points: Float64) -> Float64:
    distance = np.abs(points[:, None] - values[None, :])
    density: Float64 = np.maximum(1 - distance / 0.1, 0).sum(axis=1) / (0.1 * len(values))
    return density


def plain_misfit(sigma: Float64, values: Float64, ratio: float) -> float:
    points = np.linspace(0, values.max() + 0.5, 1000)
    density = plain_density(values, points)
    dense = density > 0.01
    points, density = points[dense], density[dense]
    s = float(sigma[0])
    if ratio == 1:
        law = np.sqrt(np.clip(4 - points**2, 0, None)) / (np.pi * s**2)
    else:
        low, high = (s * (1 - ratio**-0.5)) ** 2, (s * (1 + ratio**-0.5)) ** 2
        peak = points[density.argmax()]
        if high < peak or high > points.max() or low > peak:
            return 1000.0**2 * len(points)
        law = np.zeros_like(points)
        inside = (points > low) & (points < high)
        x = points[inside]
        law[inside] = np.sqrt((high - x) * (x - low)) * ratio / (2 * np.pi * s**2 * x)
    return float(((law - density) ** 2).sum())


def plain_sigma(evals: Float64, ratio: float) -> float:
    scaled = evals / evals.sum() * len(evals)
    unit = math.sqrt(scaled.max()) / (1 + ratio**-0.5)
    values = np.sqrt(scaled) if ratio == 1 else scaled

    def misfit(sigma: Float64) -> float:
        return plain_misfit(sigma, values, ratio)

    return float(brute(misfit, (slice(0.05 * unit, 2 * unit, 0.01 * unit),))[0])


def families(seed: int, small: int, ratio: float) -> dict[str, Float64]:
    rng = np.random.default_rng(seed)
    shape = (small, int(small * ratio))
    return {
        "noise": rng.standard_normal(shape),
        "spikes": spiked(rng.standard_normal(shape), 3, seed),
        "heavy entries": rng.standard_t(3, shape),
        "uneven rows": rng.standard_normal(shape) * rng.lognormal(0, 0.5, (small, 1)),
    }


@pytest.mark.parametrize("ratio", RATIOS)
def test_sigma_is_that_of_the_procedure_written_out(ratio: float) -> None:
    for name, W in families(3, 60, ratio).items():
        found = fit(W)
        assert found.sigma_mp == pytest.approx(plain_sigma(spectrum(W), ratio), rel=1e-9), name


@given(st.lists(st.floats(0, 50), min_size=2, max_size=60))
def test_the_density_is_that_of_the_plain_sum(values: list[float]) -> None:
    ascending = np.sort(np.array(values))
    points = np.linspace(0, ascending[-1] + 0.5, 1000)
    plain = plain_density(ascending, points)
    found, density = estimated_density(ascending)
    # A point within rounding of the least density may fall on either side.
    assert set(points[plain > 0.01 + 1e-9]) <= set(found) <= set(points[plain > 0.01 - 1e-9])
    assert density == pytest.approx(plain[np.isin(points, found)], abs=1e-9)
