"""Layouts of fused tensors by architecture, for those that transformers does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuherd.models.tensors.fused import FusedLayout, layout_of
from gpuherd.models.tensors.source import FloatArray

HEADS, KV, SIZE = 4, 2, 3
COLUMNS = HEADS * SIZE


def parts(kv_heads: int = HEADS) -> tuple[FloatArray, FloatArray, FloatArray]:
    """q, k and v, each row a number of its own."""
    sizes = [HEADS * SIZE, kv_heads * SIZE, kv_heads * SIZE]
    numbers = np.arange(sum(sizes) * COLUMNS, dtype=np.float32).reshape(-1, COLUMNS)
    q, k, v = np.split(numbers, np.cumsum(sizes)[:-1])
    return q, k, v


def by_head(q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
    blocks = []
    for head in range(HEADS):
        rows = slice(head * SIZE, (head + 1) * SIZE)
        blocks += [q[rows], k[rows], v[rows]]
    return np.concatenate(blocks)


def by_key_head(q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
    blocks = []
    each = HEADS // KV * SIZE
    for head in range(KV):
        rows = slice(head * SIZE, (head + 1) * SIZE)
        blocks += [q[head * each : (head + 1) * each], k[rows], v[rows]]
    return np.concatenate(blocks)


CASES: list[tuple[str, dict[str, Any], str, int, Any]] = [
    ("qwen", {}, "transformer.h.0.attn.c_attn.weight", HEADS, "behind"),
    ("baichuan", {}, "model.layers.0.self_attn.W_pack.weight", HEADS, "behind"),
    ("modernbert", {}, "layers.0.attn.Wqkv.weight", HEADS, "behind"),
    ("internlm2", {"num_attention_heads": HEADS, "num_key_value_heads": KV}, "model.layers.0.attention.wqkv.weight",
     KV, by_key_head),
    ("chatglm", {"num_attention_heads": HEADS, "multi_query_attention": True, "multi_query_group_num": KV},
     "transformer.encoder.layers.0.self_attention.query_key_value.weight", KV, "behind"),
    ("chatglm", {"num_attention_heads": HEADS}, "transformer.layers.0.attention.query_key_value.weight", HEADS,
     by_head),
    ("dbrx", {"n_heads": HEADS, "attn_config": {"kv_n_heads": KV}},
     "transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", KV, "behind"),
    ("mpt", {"n_heads": HEADS, "attn_config": {"attn_type": "multihead_attention"}},
     "transformer.blocks.0.attn.Wqkv.weight", HEADS, "behind"),
    ("mpt", {"n_heads": HEADS, "attn_config": {"attn_type": "multihead_attention", "kv_n_heads": KV}},
     "transformer.blocks.0.attn.Wqkv.weight", HEADS, "behind"),
    ("mpt", {"n_heads": HEADS, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": KV}},
     "transformer.blocks.0.attn.Wqkv.weight", KV, "behind"),
    ("mpt", {"n_heads": HEADS, "attn_config": {"attn_type": "multiquery_attention"}},
     "transformer.blocks.0.attn.Wqkv.weight", 1, "behind"),
    ("dbrx", {"n_heads": HEADS, "attn_config": {"kv_n_heads": 1}},
     "transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight", 1, "behind"),
    ("chatglm", {"num_attention_heads": HEADS, "kv_channels": SIZE, "multi_query_attention": False},
     "transformer.encoder.layers.0.self_attention.query_key_value.weight", HEADS, by_head),
    ("RefinedWebModel", {"n_head": HEADS, "multi_query": True}, "transformer.h.0.self_attention.query_key_value.weight",
     1, "behind"),
    ("gpt_bigcode", {"n_head": HEADS}, "transformer.h.0.attn.c_attn.weight", 1, "behind"),
    ("deberta", {"num_attention_heads": HEADS}, "deberta.encoder.layer.0.attention.self.in_proj.weight", HEADS,
     by_head),
    ("RefinedWeb", {"n_head": HEADS, "n_head_kv": KV}, "transformer.h.0.self_attention.query_key_value.weight", KV,
     by_key_head),
    ("some_vision_model", {}, "blocks.0.attn.qkv.weight", HEADS, "behind"),
    ("gpt_neox_japanese", {"num_attention_heads": HEADS}, "gpt_neox_japanese.layers.0.attention.query_key_value.weight",
     HEADS, by_head),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config", "name", "kv_heads", "fuse"), CASES)
def test_documented_layouts(model_type: str, config: dict[str, Any], name: str, kv_heads: int, fuse: Any) -> None:
    wanted = parts(kv_heads)
    fused = np.concatenate(wanted) if isinstance(fuse, str) else fuse(*wanted)
    layout = layout_of(name, fused.shape, {"model_type": model_type, **config})
    assert layout is not None and [suffix for suffix, _ in layout.parts] == ["_q", "_k", "_v"]
    for number, part in enumerate(wanted):
        assert np.array_equal(layout.take(fused, number), part)
        assert layout.part_shape(fused.shape, number) == part.shape


def test_the_text_part_of_a_config_counts() -> None:
    config = {"model_type": "some_vlm", "text_config": {"model_type": "bloom", "n_head": 4}}
    assert layout_of("h.0.query_key_value.weight", (36, 12), config) == FusedLayout(
        0, 4, (("_q", 3), ("_k", 3), ("_v", 3))
    )


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [
        ("h.0.query_key_value.weight", (36, 12), {}),  # whose layout is it? unknown: left whole
        ("h.0.query_key_value.weight", (37, 12), {"model_type": "bloom", "n_head": 4}),  # does not fit
        ("h.0.query_key_value.weight", (36, 12), {"model_type": "bloom"}),  # no number of heads
        ("h.0.query_key_value.weight", (36, 12), {"model_type": "bloom", "n_head": "4"}),
        ("h.0.attn.c_attn.weight", (36, 12), {}),  # rows: thirds (Qwen) or by head (StarCoder without MQA)
        ("h.0.attn.c_attn_extra.weight", (12, 36), {"model_type": "gpt2"}),
        ("model.layers.0.self_attn.q_proj.weight", (36, 12), {"model_type": "llama"}),
        (
            "model.layers.0.self_attn.qkv.weight",
            (36, 18),
            {},
        ),  # fewer key heads: whose rows are which?
        ("model.layers.0.self_attn.qkv_proj.weight", (36, 12), {"model_type": "phi3", "num_attention_heads": 5}),
        # The config gives another number of key heads than the shape shows, though the rows would divide.
        (
            "model.layers.0.self_attn.qkv_proj.weight",
            (24, 12),
            {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 4},
        ),
        ("blocks.0.attn.Wqkv.weight", (18, 12), {"model_type": "dbrx", "n_heads": 4}),
        ("blocks.0.attn.Wqkv.weight", (24, 12), {"model_type": "mpt", "n_heads": 4}),
        (
            "blocks.0.attn.Wqkv.weight",
            (36, 12),
            {
                "model_type": "mpt",
                "n_heads": 4,
                "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 1},
            },
        ),
        ("h.0.query_key_value.weight", (18, 12), {"model_type": "gpt_neox", "num_attention_heads": 2}),
        ("h.0.attn.qkv_proj.weight", (24, 12), {"model_type": "codegen", "n_head": 4}),
        ("h.0.attn.c_attn.weight", (24, 12), {"model_type": "qwen"}),
        ("layers.0.self_attn.W_pack.weight", (18, 12), {"model_type": "baichuan_m1"}),  # two key heads of six
        ("attn.in_proj_weight", (18, 12), {}),
        # ChatGLM-6B has no gate: its rows are one projection.
        (
            "transformer.layers.0.mlp.dense_h_to_4h.weight",
            (48, 12),
            {"model_type": "chatglm", "num_attention_heads": 4, "inner_hidden_size": 48},
        ),
    ],
)
def test_what_fits_no_rule_is_left_whole(name: str, shape: tuple[int, int], config: dict[str, Any]) -> None:
    assert layout_of(name, shape, config) is None


def test_the_gate_of_chatglm2() -> None:
    config = {"model_type": "chatglm", "num_attention_heads": 4, "ffn_hidden_size": 20}
    found = layout_of("transformer.encoder.layers.0.mlp.dense_h_to_4h.weight", (40, 12), config)
    assert found == FusedLayout(0, 1, (("_gate", 20), ("_up", 20)))


def test_cross_attention_of_gpt2_holds_keys_and_values() -> None:
    layout = layout_of("transformer.h.0.crossattention.c_attn.weight", (8, 16), {"model_type": "gpt2"})
    assert layout == FusedLayout(1, 1, (("_k", 8), ("_v", 8)))


@given(
    axis=st.integers(0, 1),
    groups=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    other=st.integers(1, 4),
)
def test_parts_partition_the_tensor(axis: int, groups: int, sizes: list[int], other: int) -> None:
    layout = FusedLayout(axis, groups, tuple((str(number), size) for number, size in enumerate(sizes)))
    total = groups * sum(sizes)
    shape = (total, other) if axis == 0 else (other, total)
    assert layout.fits(shape)
    tensor = np.arange(total * other, dtype=np.float32).reshape(shape)
    taken = [layout.take(tensor, number) for number in range(len(sizes))]
    assert sorted(np.concatenate([part.ravel() for part in taken])) == list(range(total * other))
    for number, part in enumerate(taken):
        assert part.shape == layout.part_shape(shape, number)
        block = layout.block(number)
        if block is not None:
            assert np.array_equal(part, tensor[slice(*block)])
