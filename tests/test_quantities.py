"""Sizes and times as people write them."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd import units
from gpuherd.units import duration_s, gpu_range, size_mb, size_or_none_mb


def test_examples() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize("word", ["", "x", "-1GB", "0", "20 GBs", "1e9", "nan", "٣GB", "1.5.2GB", "GB", "0MB", "1GB2"])
def test_bad_sizes(word: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size_mb(word)


@pytest.mark.parametrize("word", ["0", "00", "0MB", "0 gb", "0.0"])
def test_a_size_that_may_be_none(word: str) -> None:
    assert size_or_none_mb(word) == 0


@pytest.mark.parametrize("word", ["", "-0", "0x", "none", "0 0"])
def test_what_is_no_size_is_not_none(word: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size_or_none_mb(word)


@pytest.mark.parametrize(
    "word", ["", "0", "-5", "2 hours", "1h-", "h", "1:99", "nan", "inf", "1e3", "2h 3x", "1-12:00"]
)
def test_bad_durations(word: str) -> None:
    with pytest.raises(ValueError, match="is not a length of time"):
        duration_s(word)


@pytest.mark.parametrize("word", ["", "-1", "4-1", "0-4", "1-", "a", "1.5", "2-2-2"])
def test_bad_gpu_ranges(word: str) -> None:
    with pytest.raises(ValueError, match="is no number of GPUs"):
        gpu_range(word)


def test_slurm_forms() -> None:
    assert duration_s("90:00") == 5400
    assert duration_s("1:30:00") == 5400


@given(st.integers(1, 10**6))
def test_units_agree(number: int) -> None:
    assert size_mb(f"{number}GB") == size_mb(f"{number * 1024}MB") == size_mb(f"{number * 1024}")
    assert duration_s(f"{number}h") == duration_s(f"{number * 60}m") == duration_s(str(number * 3600))


@given(st.text(max_size=30))
def test_any_text_gives_a_value_or_a_sentence(word: str) -> None:
    for parse in (size_mb, duration_s, gpu_range):
        try:
            assert parse(word) is not None
        except ValueError as problem:
            assert repr(word) in str(problem)
