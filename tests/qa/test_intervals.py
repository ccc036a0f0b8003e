"""Closed-form intervals against scipy, against other derivations, and against what they promise: their coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gpuherd.qa.intervals import (
    Share,
    auroc_interval,
    cohen_kappa,
    hanley_mcneil,
    holm,
    mcnemar_p,
    wilson,
    z_of,
)


@settings(max_examples=30)
@given(st.integers(1, 500).flatmap(lambda of: st.tuples(st.integers(0, of), st.just(of))), st.sampled_from([0.9, 0.95]))
def test_wilson_is_scipys(counts: tuple[int, int], confidence: float) -> None:
    count, of = counts
    expected = stats.binomtest(count, of).proportion_ci(confidence, method="wilson")
    found = wilson(count, of, confidence)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= found.low <= count / of <= found.high <= 1


def test_share_of_none_has_neither_value_nor_interval() -> None:
    nothing = Share(0, 0)
    assert nothing.value is None
    assert nothing.interval is None
    assert Share(3, 4).value == 0.75


@settings(max_examples=30)
@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_the_binomial_test(first: int, second: int) -> None:
    p = mcnemar_p(first, second)
    if first + second == 0:
        assert p is None
    else:
        assert p == pytest.approx(stats.binomtest(first, first + second).pvalue, rel=1e-9, abs=1e-300)


def test_kappa_of_a_textbook_table() -> None:
    # 20 both yes, 5 and 10 apart, 15 both no: agreement 0.7, chance 0.5.
    kappa = cohen_kappa(20, 5, 10, 15)
    assert kappa.value == pytest.approx(0.4)


@settings(max_examples=30)
@given(st.tuples(*[st.integers(1, 200)] * 4))
def test_kappas_interval_is_the_delta_methods(table: tuple[int, int, int, int]) -> None:
    """Fleiss' formula is the delta method on the multinomial table: here with a numerical gradient."""

    def kappa_of(p: np.ndarray) -> float:
        chance = (p[0] + p[1]) * (p[0] + p[2]) + (p[2] + p[3]) * (p[1] + p[3])
        return float((p[0] + p[3] - chance) / (1 - chance))

    n = sum(table)
    p = np.array(table) / n
    gradient = np.empty(4)
    for at in range(4):
        step = np.zeros(4)
        step[at] = 1e-6
        # The cells sum to 1: the formula above is one of all four as they stand, chance included.
        gradient[at] = (kappa_free(p + step) - kappa_free(p - step)) / 2e-6
    variance = (gradient @ (np.diag(p) - np.outer(p, p)) @ gradient) / n
    found = cohen_kappa(*table)
    assert found.value == pytest.approx(kappa_of(p), abs=1e-12)
    assert found.interval is not None
    reach = z_of(0.95) * math.sqrt(max(float(variance), 0.0))
    expected = max(kappa_of(p) - reach, -1), min(kappa_of(p) + reach, 1)
    assert (found.interval.low, found.interval.high) == pytest.approx(expected, abs=1e-5)


def kappa_free(p: np.ndarray) -> float:
    """Kappa as a function of four free cells, brought to sum 1."""
    p = p / p.sum()
    chance = (p[0] + p[1]) * (p[0] + p[2]) + (p[2] + p[3]) * (p[1] + p[3])
    return float((p[0] + p[3] - chance) / (1 - chance))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ((0, 0, 0, 0), "no answer"),
        ((3, 4, 0, 0), "one calls all 7 correct"),
        ((0, 0, 4, 3), "one calls all 7 incorrect"),
        ((4, 0, 3, 0), "the other calls all 7 correct"),
    ],
)
def test_kappa_with_one_class_is_none(table: tuple[int, int, int, int], reason: str) -> None:
    kappa = cohen_kappa(*table)
    assert kappa.value is None
    assert kappa.reason is not None and kappa.reason.startswith(reason)


def test_kappa_of_perfect_agreement_is_not_certain() -> None:
    few, many = cohen_kappa(3, 0, 0, 3), cohen_kappa(300, 0, 0, 300)
    assert few.value == many.value == 1
    assert few.interval is not None and many.interval is not None
    assert few.interval.low < 0.3 < 0.98 < many.interval.low < 1


def test_kappa_of_perfect_disagreement_is_not_certain() -> None:
    few, many = cohen_kappa(0, 5, 5, 0), cohen_kappa(0, 500, 500, 0)
    assert few.value == many.value == -1
    assert few.interval is not None and many.interval is not None
    assert few.interval.low == many.interval.low == -1
    assert few.interval.high > -0.5 > many.interval.high > -1


def test_hanley_mcneil_by_hand() -> None:
    # Figures of the case that this project was warned by: 8 wrong answers of 400.
    assert hanley_mcneil(0.53, 8, 392) == pytest.approx(0.105, abs=5e-4)
    # With one answer of each class and chance order it is the standard deviation of a coin.
    assert hanley_mcneil(0.5, 1, 1) == pytest.approx(0.5)
    assert hanley_mcneil(1.0, 5, 5) == 0


def test_aurocs_score_interval_solves_its_equation() -> None:
    for auroc, wrong, right in itertools.product((0.02, 0.3, 0.5, 0.84, 0.999), (2, 8, 150), (2, 392)):
        interval = auroc_interval(auroc, wrong, right)
        assert 0 <= interval.low < auroc < interval.high <= 1
        for end in (interval.low, interval.high):
            size = (wrong + right) / 2 - 1
            spread = 1 + size * ((1 - end) / (2 - end) + end / (1 + end))
            error = math.sqrt(end * (1 - end) * spread / (wrong * right))
            assert abs(auroc - end) == pytest.approx(z_of(0.95) * error, abs=1e-9)


def test_a_perfect_auroc_of_few_has_a_wide_interval() -> None:
    assert auroc_interval(1.0, 8, 392).low == pytest.approx(0.876, abs=1e-3)
    assert auroc_interval(1.0, 8, 392).high == 1
    mirrored = auroc_interval(0.0, 8, 392)
    assert mirrored.low == 0
    assert mirrored.high == pytest.approx(1 - auroc_interval(1.0, 8, 392).low, abs=1e-9)


@settings(max_examples=30)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=20))
def test_holm_by_its_definition(values: list[float | None]) -> None:
    found = holm(values)
    known = sorted(p for p in values if p is not None)
    assert [each is None for each in found] == [each is None for each in values]
    for p, corrected in zip(values, found, strict=True):
        if p is not None and corrected is not None:
            # Equal p values share the correction of the first of them.
            steps = [min((len(known) - rank) * each, 1.0) for rank, each in enumerate(known) if each <= p]
            assert corrected == max(steps)
            assert p <= corrected <= 1
