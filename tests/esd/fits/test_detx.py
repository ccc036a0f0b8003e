"""The tail of determinant 1 against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.esd.fits.marchenko_pastur import detx_tail
from gpuherd.esd.schema import DetXTail

Float64 = npt.NDArray[np.float64]


def exact_number(evals: Float64) -> int:
    """How many factors it takes, in rational numbers: no rounding at all."""
    values = [Fraction(float(value)) for value in evals]
    mean = sum(values, Fraction()) / len(values)
    product = Fraction(1)
    for number, value in enumerate(reversed(values), start=1):
        product *= value / mean
        if product < 1:
            return number
    raise AssertionError("the product of all is below 1, by the inequality of the means")


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=40).filter(lambda values: len(set(values)) > 1))
def test_number_and_value_are_exact(values: list[int]) -> None:
    evals = np.sort(np.array(values, dtype=np.float64)) / 1024
    number = exact_number(evals)
    assert detx_tail(evals) == DetXTail(number, evals[len(evals) - number])


@pytest.mark.parametrize("n", [64, 8192])
def test_large_spectra_against_fifty_digits(n: int) -> None:
    """Where the product itself under- or overflows: mpmath has neither."""
    mpmath = pytest.importorskip("mpmath")
    for seed, evals in enumerate(
        (
            np.random.default_rng(0).chisquare(3, n),
            np.random.default_rng(1).lognormal(0, 3, n) * 1e-30,
            np.random.default_rng(2).pareto(1.2, n) * 1e200,
        )
    ):
        evals = np.sort(evals)
        with mpmath.workdps(50):
            values = [mpmath.mpf(float(value)) for value in evals[::-1]]
            mean = mpmath.fsum(values) / n
            product, number = mpmath.mpf(1), 0
            while product >= 1 or number == 0:
                product *= values[number] / mean
                number += 1
                if product < 1:
                    break
        assert detx_tail(evals) == DetXTail(number, evals[n - number]), seed


def test_multiplying_underflows_where_logarithms_do_not() -> None:
    """The plain product of 8192 values with a few large ones among many below the mean ends too soon."""
    evals = np.sort(np.random.default_rng(3).chisquare(1, 8192))
    number = detx_tail(evals).detX_num
    assert number is not None
    scaled = np.log(evals / evals.mean())[::-1]
    assert scaled[: number - 1].sum() >= 0 > scaled[:number].sum()


def test_scaling_changes_the_value_alone() -> None:
    evals = np.sort(np.random.default_rng(4).chisquare(4, 300))
    plain, scaled = detx_tail(evals), detx_tail(evals * 2.0**-40)
    assert plain.detX_val is not None
    assert scaled == DetXTail(plain.detX_num, plain.detX_val * 2.0**-40)


def test_equal_eigenvalues_have_no_such_tail() -> None:
    assert detx_tail(np.ones(6)) == DetXTail(None, None)
    assert detx_tail(np.array([1.0, 1.0, 1 + 4e-16])) == DetXTail(None, None)
    assert detx_tail(np.array([3.0])) == DetXTail(None, None)


def test_nearly_equal_eigenvalues() -> None:
    evals = np.sort(np.random.default_rng(5).normal(1, 1e-9, 50))
    number = detx_tail(evals).detX_num
    assert number is not None
    assert 2 <= number <= 50


def test_a_zero_ends_the_tail() -> None:
    assert detx_tail(np.array([0.0, 0.0, 0.0, 4.0])) == DetXTail(2, 0.0)
    assert detx_tail(np.array([0.0, 5.0, 5.0, 5.0])) == DetXTail(4, 0.0)
