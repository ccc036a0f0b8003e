"""Reasons as a page tells them."""

from __future__ import annotations

import doctest

import pytest

from gpuherd.esd.report import reading
from gpuherd.esd.report.reading import MOST_REASON, short_reason


def test_the_docstrings_examples() -> None:
    assert doctest.testmod(reading).failed == 0


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("model '/home/me/secret project/m/': there is no such folder", "model 'm': there is no such folder"),
        ("/a/b/m.bin and (/c/d.bin), at=/e/f.json:3", "m.bin and (d.bin), at=f.json:3"),
        ("file:///home/me/x.gguf", "x.gguf"),
        ("see https://host.org/a/b/c and ../x/y, and/or 1/2", "see https://host.org/a/b/c and ../x/y, and/or 1/2"),
        ('"/home/me/a" is "no"/"yes"', '\'a\' is "no"/"yes"'),
        ("it's in '/home/me/it'", "it's in 'it'"),
        ("nothing / here", "nothing / here"),
        ("", ""),
    ],
)
def test_folders_of_this_machine_are_left_out(reason: str, told: str) -> None:
    assert short_reason(reason) == told


def test_a_long_reason_ends_with_a_sign_that_it_goes_on() -> None:
    assert short_reason("x" * MOST_REASON) == "x" * MOST_REASON
    assert short_reason("x" * (MOST_REASON + 1)) == "x" * (MOST_REASON - 1) + "…"


def test_an_endless_line_of_slashes_takes_no_time() -> None:
    for text in ("/" * 50_000, "/a" * 50_000, "'/" * 20_000, "~" * 50_000):
        assert len(short_reason(text)) <= 2 * MOST_REASON
