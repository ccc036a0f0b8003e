"""YAML without surprises."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.yaml_strict import parse_yaml, read_yaml


def test_values_are_what_people_mean() -> None:
    text = """
a: 1e-5
b: [1, -2, .5, 3., 1.5E+3, "1", null, ~]
c: {on: yes, true: TRUE}
d: 2024-01-01
e: -.inf
f: 0x1f
g: |
  two
  lines
"""
    assert parse_yaml(text) == {
        "a": 1e-5,
        "b": [1, -2, 0.5, 3.0, 1500.0, "1", None, None],
        "c": {"on": "yes", "true": True},
        "d": "2024-01-01",
        "e": -math.inf,
        "f": "0x1f",
        "g": "two\nlines\n",
    }


def test_anchors_and_merging() -> None:
    text = "base: &b {lr: 1, wd: 2}\nother: &o {lr: 5, x: 6}\nrun: {<<: [*b, *o], wd: 3}\nquoted: {'<<': 1}"
    assert parse_yaml(text)["run"] == {"lr": 1, "wd": 3, "x": 6}
    assert parse_yaml(text)["quoted"] == {"<<": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is there twice; the first is in line 1"),
        ("x:\n  a: 1\n  a: 1", "line 3: the key 'a' is there twice"),
        ("a: !!python/object:os.system x", "line 1: the tag tag:yaml.org,2002:python/object:os.system is not possible"),
        ("a: !thing x", "the tag !thing is not possible"),
        ("- 1", "it should be a mapping of keys at the top"),
        ("a: 1\n---\nb: 2", "no YAML"),
        ("a: [1", "line 1: no YAML"),
        ("? [a]\n: 1", "a key must be a word"),
        ("~: 1", "a key must be a word"),
        ("a: *b", "no YAML"),
        ("a: {<<: 1}", "<< takes a mapping"),
        ("[" * 400, "no YAML"),
        ("a: " + "[" * 40 + "]" * 40, "too large or too deep"),
        ("a: " + "9" * 5000, "a number of 5000 digits"),
        ("\n".join(["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 25)]), "too large"),
        ("a: \x00", "no YAML"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as problem:
        parse_yaml(text, "x.yaml")
    assert "x.yaml" in str(problem.value) and message in str(problem.value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path) == {"a": 1}
    path.write_text("")
    assert read_yaml(path) == {}
    path.write_bytes(b"a: \xff")
    with pytest.raises(UsageError, match="no UTF-8"):
        read_yaml(path)
    path.write_bytes(b"#" * 2_000_001)
    with pytest.raises(UsageError, match="more than"):
        read_yaml(path)
    with pytest.raises(UsageError, match="can't be read"):
        read_yaml(tmp_path / "none.yaml")


# PyYAML writes the text 1e5 without quotes: to YAML 1.1 it is no number. To people it is one, and so it is here.
texts = st.text(st.characters(codec="utf-8")).filter(lambda text: re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", text) is None)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.dictionaries(texts, values, max_size=3))
def test_what_pyyaml_writes_is_read_back(value: dict[str, Any]) -> None:
    assert parse_yaml(yaml.safe_dump(value)) == value


@settings(max_examples=50)
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(UsageError):
        parse_yaml(text)
