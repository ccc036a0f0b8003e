"""Plain values become dataclasses, or a sentence that names the full key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuherd.errors import UsageError
from gpuherd.posttrain.config.typed import known_keys, nearest_or_all, read, read_keys
from gpuherd.runs.records import jsonable


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-5
    micro_batch_size: int = 4
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise UsageError(f"lr={self.lr}: it must be above 0")


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.999)
    etas: tuple[float, ...] = ()
    kind: Literal["ddp", "fsdp"] | None = None
    size: int | str = 0
    several: str | tuple[str, ...] | None = None
    enabled: bool = False
    folder: Path | None = None
    extra: Any = None


def test_a_mapping_becomes_the_dataclass() -> None:
    found = read(
        Outer,
        {
            "name": 2024,
            "inner": {"lr": 1, "colour": "green"},
            "by_name": {"PITA": {"micro_batch_size": 1e2}},
            "betas": [0.5, 1],
            "etas": [1, math.inf],
            "kind": "fsdp",
            "size": "7B",
            "several": ["a", "b"],
            "enabled": True,
            "folder": "x/y",
            "extra": {"any": [1]},
        },
    )
    assert found == Outer(
        "2024",
        Inner(1.0, 4, Colour.GREEN),
        {"PITA": Inner(micro_batch_size=100)},
        (0.5, 1.0),
        (1.0, math.inf),
        "fsdp",
        "7B",
        ("a", "b"),
        True,
        Path("x/y"),
        {"any": [1]},
    )
    assert isinstance(found.inner.lr, float) and isinstance(found.by_name["PITA"].micro_batch_size, int)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "name is missing"),
        ({"name": "x", "iner": {}}, "there is no key iner; did you mean inner?"),
        (
            {"name": "x", "inner": {"micro_batchsize": 1}},
            "no key inner.micro_batchsize; did you mean inner.micro_batch",
        ),
        ({"name": "x", "lr": 1}, "there is no key lr; did you mean inner.lr?"),
        ({"name": "x", "zzz": 1}, "there is no key zzz; possible here: name, inner"),
        ({"name": "x", "inner": {"lr": "1e-5"}}, "inner.lr=1e-5: it should be a number"),
        ({"name": "x", "inner": {"lr": math.nan}}, "inner.lr=nan: it should be a number"),
        ({"name": "x", "inner": {"lr": True}}, "inner.lr=true: it should be a number"),
        ({"name": "x", "inner": {"lr": None}}, "inner.lr=null: it should be a number"),
        ({"name": "x", "inner": {"lr": 0}}, "inner.lr=0.0: it must be above 0"),
        ({"name": "x", "inner": 3}, "inner=3: it should be a mapping of keys"),
        ({"name": "x", "inner": {"micro_batch_size": 1.5}}, "inner.micro_batch_size=1.5: it should be a whole number"),
        ({"name": "x", "inner": {"micro_batch_size": True}}, "inner.micro_batch_size=true: it should be a whole"),
        ({"name": "x", "inner": {"colour": "gren"}}, "inner.colour=gren: it is one of red, green; did you mean green?"),
        ({"name": "x", "by_name": {"a": {"lrr": 1}}}, "there is no key by_name.a.lrr; did you mean by_name.a.lr?"),
        ({"name": "x", "by_name": [1]}, "by_name=[1]: it should be a mapping of names"),
        ({"name": "x", "betas": [1]}, "betas: a list of 2, and 1 are given"),
        ({"name": "x", "betas": "ab"}, "betas=ab: it should be a list"),
        ({"name": "x", "etas": [1, "a"]}, "etas[1]=a: it should be a number"),
        ({"name": "x", "kind": "dp"}, "kind=dp: it is one of ddp, fsdp; did you mean ddp?"),
        ({"name": "x", "size": 1.5}, "size=1.5: it should be a whole number or a text"),
        ({"name": "x", "several": [1.5]}, "several[0]=1.5: it should be a text"),
        ({"name": "x", "enabled": "yes"}, "enabled=yes: it should be true or false"),
        ({"name": "x", "enabled": 1}, "enabled=1: it should be true or false"),
        ({"name": 1e5}, "name=100000.0: it should be a text; a text of such a form stands in quotes"),
        ({"name": "x", "\x1b[31m": 1}, "there is no key \\x1b[31m"),
        ([], "the configuration is [], and should be a mapping of keys"),
    ],
)
def test_a_complaint_names_the_full_key(values: Any, message: str) -> None:
    with pytest.raises(UsageError) as problem:
        read(Outer, values)
    assert message in str(problem.value)


def test_what_is_typed_already_stays() -> None:
    assert read(Outer, {"name": "x", "inner": Inner(2.0)}).inner == Inner(2.0)


def test_all_keys_are_known() -> None:
    keys = list(known_keys(Outer))
    assert keys[:5] == ["name", "inner", "inner.lr", "inner.micro_batch_size", "inner.colour"]
    assert "by_name.*.lr" in keys


def test_keys_of_another_name_are_named_so() -> None:
    names = {"lr": "training.learning_rate"}
    with pytest.raises(UsageError, match=r"^training\.learning_rate=0\.0: it must be above 0$"):
        read(Inner, {"lr": 0}, "grpo", names)
    with pytest.raises(UsageError, match=r"^training\.learning_rate=x: it should be a number$"):
        read(Inner, {"lr": "x"}, "", names)
    with pytest.raises(UsageError, match=r"^grpo\.colour=blue: it is one of red, green"):
        read(Inner, {"colour": "blue"}, "grpo", names)


def test_keys_alone_are_read_as_those_of_a_dataclass_are() -> None:
    kinds = {"lr": float, "sizes": tuple[int, ...], "colour": Colour}
    assert read_keys(kinds, {"lr": 1, "colour": "green"}, "a") == {"lr": 1.0, "colour": Colour.GREEN}
    for values, told in (
        ({"lrr": 1}, r"there is no key a\.lrr; did you mean a\.lr\?"),
        ({"batch": 1}, r"there is no key a\.batch; did you mean b\.batch\?"),
        ({"sizes": 3}, r"a\.sizes=3: it should be a list"),
        (["lr"], r"a=\['lr'\]: it should be a mapping of keys"),
    ):
        with pytest.raises(UsageError, match=told):
            read_keys(kinds, values, "a", ["b.batch"])


def test_the_nearest_name_or_all() -> None:
    assert nearest_or_all("reed", ["red", "green"]) == "; did you mean red?"
    assert nearest_or_all("xyz", ["red", "green"]) == "; possible: red, green"
    assert nearest_or_all("xyz", []) == ""


inner = st.builds(Inner, st.floats(1e-9, 1e9), st.integers(-(10**20), 10**20), st.sampled_from(Colour))


@settings(max_examples=50)
@given(
    st.builds(
        Outer,
        st.text(),
        inner,
        st.dictionaries(st.text(), inner, max_size=3),
        st.tuples(st.floats(0, 1), st.floats(0, 1)),
        st.lists(st.floats(allow_nan=False)).map(tuple),
        st.sampled_from(["ddp", "fsdp", None]),
        st.one_of(st.integers(), st.text()),
        st.one_of(st.none(), st.text(), st.lists(st.text()).map(tuple)),
        st.booleans(),
        st.none(),
        st.none(),
    )
)
def test_there_and_back(value: Outer) -> None:
    assert read(Outer, jsonable(value)) == value
    assert read(Outer, json.loads(json.dumps(jsonable(value)))) == value
