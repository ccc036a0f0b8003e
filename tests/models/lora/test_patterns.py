"""Patterns match as PEFT matches them, and no pattern can keep us busy."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import BadModel
from gpuherd.models.lora.adapter import first_matches

MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.11.mlp.up_proj"]
LONG = "model.layers.0." + "a" * 40


def as_peft(patterns: list[str], names: list[str]) -> list[str | None]:
    from peft.utils.other import get_pattern_key

    keys = [get_pattern_key(patterns, name) for name in names]
    return [key if key in patterns else None for key in keys]


@pytest.mark.parametrize(
    "patterns",
    [
        [],
        ["q_proj"],
        ["proj"],
        ["layers.1.self_attn.q_proj", "q_proj"],
        ["^model.layers.0.self_attn.q_proj"],
        ["^q_proj"],
        [r"layers\.0\..*q_proj", "up_proj"],
        [r"layers.(1|11)\..*"],
        ["q_.roj", r".*\.mlp\..*"],
        [r"(?:self_attn|mlp)\.\w+_proj"],
        ["q_proj|up_proj"],
    ],
)
def test_as_peft_matches(patterns: list[str]) -> None:
    assert first_matches(patterns, MODULES) == as_peft(patterns, MODULES)


@given(
    st.lists(st.from_regex(r"\A\^?[ab.]{1,4}\Z"), max_size=3), st.lists(st.from_regex(r"\A[ab.]{1,6}\Z"), max_size=3)
)
def test_plain_names_match_as_peft_matches(patterns: list[str], names: list[str]) -> None:
    assert first_matches(patterns, names) == as_peft(patterns, names)


@pytest.mark.parametrize("pattern", ["(a+)+x", "(a|a)*(a|a)*y", "(.*)*(.*)*z"])
def test_a_pattern_that_would_never_end_is_refused(pattern: str) -> None:
    began = time.monotonic()
    with pytest.raises(BadModel, match="can't be matched in"):
        first_matches([pattern], [LONG], limit_s=0.5)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("pattern", ["(", "*", "[", "a{99999999999999}"])
def test_what_is_no_pattern_is_named(pattern: str) -> None:
    with pytest.raises(BadModel, match="no regular expression"):
        first_matches(["q_proj", pattern], MODULES)
