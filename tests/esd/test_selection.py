"""--layers and --exclude: which matrices they leave, and what is said of a pattern that matches nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.errors import BadModel
from gpuherd.esd.selection import NOT_SELECTED, selected
from gpuherd.models.tensors.matrices import WeightMatrix

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")


def unread() -> list[object]:
    raise AssertionError("a choice reads no weights")


def matrix(longname: str, tensor: str | None = None, skip: str | None = None) -> WeightMatrix:
    tensor = f"{longname}.weight" if tensor is None else tensor
    return WeightMatrix(longname, "linear", (4, 4), 16, skip, unread, tensor)  # type: ignore[arg-type]


MODEL = [
    matrix("model.embed_tokens", skip="embedding"),
    matrix("model.layers.0.attn.c_attn_q", "model.layers.0.attn.c_attn.weight"),
]
MODEL += [matrix(f"model.layers.{layer}.{part}") for layer in range(12) for part in PARTS]
TENSORS = [m.tensor for m in MODEL] + ["model.layers.0.mlp.up_proj.bias", "model.norm.weight"]


def left(layers: Sequence[str] = (), exclude: Sequence[str] = ()) -> set[str]:
    return {m.longname for m in selected(MODEL, TENSORS, layers, exclude) if m.skip is None}


ALL = {m.longname for m in MODEL if m.skip is None}


def test_nothing_asked_leaves_all() -> None:
    assert selected(MODEL, TENSORS, (), ()) == MODEL


def test_patterns() -> None:
    assert left(["model.layers.0.*"]) == {name for name in ALL if ".layers.0." in name}
    assert left(["*.q_proj", "*.up_proj"]) == {name for name in ALL if name.endswith(("q_proj", "up_proj"))}
    assert left(["model.layers.[01].mlp.up_proj"]) == {f"model.layers.{n}.mlp.up_proj" for n in (0, 1)}
    assert left(["model.layers.?.mlp.up_proj"]) == {f"model.layers.{n}.mlp.up_proj" for n in range(10)}
    assert left(exclude=["*.mlp.*"]) == {name for name in ALL if ".mlp." not in name}
    assert left(["*.q_proj"], ["*.layers.1*"]) == {f"model.layers.{n}.self_attn.q_proj" for n in (0, *range(2, 10))}


def test_a_tensors_name_counts_like_a_matrixs() -> None:
    assert left(["model.layers.0.attn.c_attn.weight"]) == {"model.layers.0.attn.c_attn_q"}
    assert left(["*.c_attn_q"]) == {"model.layers.0.attn.c_attn_q"}


def test_what_is_left_out_says_why_and_keeps_its_own_reason() -> None:
    rows = {m.longname: m.skip for m in selected(MODEL, TENSORS, ["*.q_proj"], ["*.layers.0.*"])}
    assert rows["model.layers.1.mlp.up_proj"] == NOT_SELECTED
    assert rows["model.layers.0.self_attn.q_proj"] == "left out by --exclude '*.layers.0.*'"
    assert rows["model.embed_tokens"] == "embedding"
    assert [m.longname for m in selected(MODEL, TENSORS, ["*.q_proj"], [])] == [m.longname for m in MODEL]


def test_a_pattern_may_match_what_is_no_matrix() -> None:
    assert left(exclude=["*.bias"]) == ALL
    assert left(["model.embed_tokens"]) == set()


@pytest.mark.parametrize(
    ("layers", "exclude", "told"),
    [
        (["q_proj"], [], r"--layers 'q_proj' matches no tensor .*nearest: model\.layers\.0\.self_attn\.q_proj, .*"
                         r"the whole name: '\*q_proj\*'"),
        (["*.Q_PROJ"], [], r"matches no tensor .*nearest: .*q_proj"),
        (["*.layers.0.*", "*.layers.99.*"], [], r"'\*\.layers\.99\.\*' matches no"),
        ([], ["*.up_prj"], r"--exclude '\*\.up_prj' matches no tensor .*nearest: model\.layers\.0\.mlp\.up_proj"),
        (["*.self_atn.q_proj"], [], r"nearest: model\.layers\.0\.self_attn\.q_proj"),
        (["zzz"], [], r"its first is model\.embed_tokens"),
        ([""], [], r"matches no tensor"),
    ],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_names_the_nearest(layers: list[str], exclude: list[str], told: str) -> None:
    with pytest.raises(BadModel, match=told):
        selected(MODEL, TENSORS, layers, exclude)


def test_a_model_of_many_experts_is_told_one_name_of_a_kind() -> None:
    many = [matrix(f"model.layers.{n // 300}.mlp.experts.{n % 300}.up_proj") for n in range(20_000)]
    with pytest.raises(BadModel, match=r"nearest: model\.layers\.0\.mlp\.experts\.0\.up_proj"):
        selected(many, [m.tensor for m in many], ["*.experts.*.upproj"], [])


@given(st.lists(st.text(alphabet="am.*?[]!-0x\\", max_size=8), max_size=3), st.lists(st.text(max_size=6), max_size=3))
def test_any_pattern_is_a_choice_or_an_error(layers: list[str], exclude: list[str]) -> None:
    """Those left are all of the selected but the excluded, and order and number of matrices stay."""
    try:
        chosen = selected(MODEL, TENSORS, layers, exclude)
    except BadModel:
        return
    assert [m.longname for m in chosen] == [m.longname for m in MODEL]
    without = {m.longname for m in selected(MODEL, TENSORS, layers, []) if m.skip is None}
    assert {m.longname for m in chosen if m.skip is None} <= without
