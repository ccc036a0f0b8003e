"""The search is exact (test_every_candidate), and it looks at few candidates in full: counted, not timed."""

from __future__ import annotations

import numpy as np
import pytest
from tests.esd.fits.plain import FAMILIES, Float64, every_candidate, spectrum

from gpuherd.esd.config import KS, KS_KINDS
from gpuherd.esd.fits.search import TIE, Candidates, Tails, alpha_interval

N = 3000
HARD: dict[str, Float64] = {
    "geometric": np.exp(0.001 * np.arange(float(N))),
    "equidistant": np.arange(1.0, N + 1),
    "blocks": np.repeat(2.0 ** np.arange(30), N // 30),
    "quantiles of a power law": (1 - (np.arange(N) + 0.5) / N) ** -0.5,
    "sawtooth": np.sort(np.repeat(np.r_[np.linspace(1, 2, 30), np.linspace(10, 20, 30)], N // 60)),
    "bent up": np.exp(np.linspace(0, 4, N) ** 2),
    "bent down": np.exp(np.sqrt(np.linspace(0, 4, N))),
}


def in_full(x: Float64, ks: KS) -> int:
    """How many distances the search and the interval compute in full."""
    tails = Tails.of(x, ks)
    candidates = Candidates(tails, 0, tails.stop)
    _, distance = candidates.least()
    alpha_interval(candidates, distance + 1e-3)
    return len(candidates.distances)


@pytest.mark.parametrize("ks", KS_KINDS)
@pytest.mark.parametrize("name", HARD)
def test_few_distances_are_computed_in_full_on_spectra_made_to_be_hard(name: str, ks: KS) -> None:
    assert in_full(HARD[name], ks) <= N // 20


@pytest.mark.parametrize("family", FAMILIES)
def test_few_distances_are_computed_in_full_on_spectra_of_all_families(family: str) -> None:
    for seed in range(5):
        x = np.sort(FAMILIES[family](np.random.default_rng(seed), N)).astype(np.float64)
        assert in_full(x, "one-sided") <= 60


@pytest.mark.parametrize("ks", KS_KINDS)
def test_whether_any_is_within_a_limit(ks: KS) -> None:
    """Just at the least distance, just below it, and far off."""
    for seed in range(12):
        x = spectrum("two laws", seed, 300)
        tails = Tails.of(x, ks)
        least = float(every_candidate(x).distances(ks).min())
        for limit, expected in ((least + TIE, True), (least * 0.999, False), (1.0, True), (0.0, False)):
            assert Candidates(tails, 0, tails.stop).any_within(limit) == expected


def test_bounds_are_below_the_distances_all_along() -> None:
    x = spectrum("fingers", 1, 500)
    distances = every_candidate(x).one_sided
    candidates = Candidates(Tails.of(x, "one-sided"), 0, len(x) - 1)
    candidates.least()
    examined = np.array(sorted(candidates.distances))
    assert np.isinf(candidates.bounds[examined]).all()
    assert (np.delete(candidates.bounds, examined) <= np.delete(distances, examined) + 1e-13).all()


def test_a_window_is_searched_as_if_there_were_nothing_else() -> None:
    x = spectrum("two laws", 4, 400)
    distances = every_candidate(x).one_sided
    first, stop = len(x) // 4, len(x) // 2
    candidates = Candidates(Tails.of(x, "one-sided"), first, stop)
    chosen, distance = candidates.least()
    assert chosen == first + distances[first:stop].argmin()
    assert distance == pytest.approx(distances[chosen], abs=1e-12)
    assert all(first <= i < stop for i in candidates.distances)
