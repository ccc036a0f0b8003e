"""Outliers: planted ones are found, and nothing is where there is nothing to compare."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd.report.contents import LEAST, alpha_z, medians, outlying, robust_z


def test_planted_outliers_are_found_the_farthest_first() -> None:
    alpha = np.random.default_rng(1).uniform(3, 4, 60)
    alpha[[7, 30]] = 11.0, 1.1
    assert {index for index, _ in outlying(alpha)} == {7, 30}
    signs = {index: z > 0 for index, z in outlying(alpha)}
    assert signs == {7: True, 30: False}
    sizes = [abs(z) for _, z in outlying(alpha)]
    assert sizes == sorted(sizes, reverse=True)


def test_of_a_normal_sample_z_is_in_standard_deviations() -> None:
    z = robust_z(np.random.default_rng(2).normal(50, 7, 20_000))
    assert np.nanstd(z) == pytest.approx(1, abs=0.03)


def test_outliers_hardly_move_the_others() -> None:
    values = np.random.default_rng(3).normal(0, 1, 100)
    spoilt = np.append(values, [1e9] * 5)
    assert np.abs(robust_z(spoilt)[:100] - robust_z(values)).max() < 0.6


@pytest.mark.parametrize("values", [[], [3.0] * 50, [1.5, 2, 3, 4, 5, 6, 99][: LEAST - 1], [np.nan] * 20])
def test_without_anything_to_compare_nothing_stands_apart(values: list[float]) -> None:
    assert outlying(np.array(values)) == []


def test_what_has_no_alpha_has_no_score() -> None:
    z = alpha_z(np.array([np.nan, 1.0, *np.linspace(2, 5, 20)]))
    assert np.isnan(z[:2]).all()
    assert np.isfinite(z[2:]).all()


@given(st.lists(st.floats(1.01, 50), min_size=LEAST, max_size=40), st.floats(0.1, 10), st.floats(-5, 5))
def test_the_score_does_not_depend_on_units(values: list[float], scale: float, shift: float) -> None:
    x = np.array(values)
    z, moved = robust_z(x), robust_z(x * scale + shift)
    if np.isfinite(z).all() and np.abs(z).max() < 1e4:
        np.testing.assert_allclose(moved, z, rtol=1e-6, atol=1e-6)


def test_medians_of_models() -> None:
    found = medians([np.array([1.0, 2.0, np.nan, 9.0]), np.array([np.nan]), np.array([])])
    assert found[0] == 2.0
    assert np.isnan(found[1:]).all()
