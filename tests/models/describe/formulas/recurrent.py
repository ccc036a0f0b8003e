"""Families with state-space layers: Mamba, Mamba 2, and hybrids of these with attention. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.describe.formulas.fields import Fields
from tests.models.describe.formulas.layout import (
    LayerKind,
    Layout,
    Modules,
    Parts,
    all_alike,
    attention,
    every,
    experts,
    gated,
    last_norm,
    linear,
    norm,
    other,
    plain_cache,
    table,
    within,
)
from tests.models.describe.formulas.mixtures import of_chosen, qwen_mixture, sparse_by_step

from gpuherd.models.describe.description import LayerCache, Tensor

ATTENTION = ("full_attention", "attention")


def depthwise(name: str, channels: int, kernel: int, bias: bool) -> Parts:
    """A convolution over time with a kernel of its own for each channel."""
    yield Tensor(f"{name}.weight", (channels, 1, kernel))
    if bias:
        yield Tensor(f"{name}.bias", (channels,))


def _rank(c: Fields, name: str) -> int:
    """Rank of the step's projection: a number, or ``auto`` for a sixteenth of the width."""
    return -(-c.hidden // 16) if c.get(name) == "auto" else c.size(name)


def _selective(c: Fields, inner: int, state: int, rank: int, kernel: int, *, bias: bool, conv_bias: bool) -> Parts:
    """A Mamba mixer (Gu & Dao, arXiv 2312.00752)."""
    yield Tensor("A_log", (inner, state))
    yield Tensor("D", (inner,))
    yield from depthwise("conv1d", inner, kernel, conv_bias)
    yield from linear("in_proj", 2 * inner, c.hidden, bias)
    yield from linear("x_proj", rank + 2 * state, inner)
    yield from linear("dt_proj", inner, rank, True)
    yield from linear("out_proj", c.hidden, inner, bias)


def _mamba_inner(c: Fields) -> int:
    return c.size("expand") * c.hidden


def _mamba(c: Fields, _: LayerKind) -> Parts:
    yield from norm("norm", c.hidden)
    mixer = _selective(
        c, _mamba_inner(c), c.size("state_size"), _rank(c, "time_step_rank"), c.size("conv_kernel"),
        bias=c.flag("use_bias"), conv_bias=c.flag("use_conv_bias"),
    )  # fmt: skip
    yield from within("mixer", mixer)


def _mamba_cache(c: Fields, _: LayerKind) -> LayerCache:
    inner = _mamba_inner(c)
    return LayerCache(per_sequence=inner * c.size("conv_kernel"), per_sequence_fp32=inner * c.size("state_size"))


def tokens(c: Fields) -> Modules:
    """An embedding of tokens alone."""
    yield "embed_tokens", table("", c.vocabulary, c.hidden)


def _tokens_and_rotary_if_said(c: Fields) -> Modules:
    yield from tokens(c)
    if c.get("position_embedding_type") == "rope":
        yield "rotary_emb", iter(())


def _recurrent(c: Fields) -> list[LayerKind]:
    return [LayerKind("linear_attention")] * c.layers


def _backbone(c: Fields) -> Modules:
    yield "embeddings", table("", c.vocabulary, c.hidden)


def _mixer2(
    c: Fields, inner: int, heads: int, groups: int, state: int, kernel: int, *, bias: bool, conv_bias: bool,
    out_bias: bool, normed: bool = True,
) -> Parts:  # fmt: skip
    """A Mamba 2 mixer (Dao & Gu, arXiv 2405.21060)."""
    channels = inner + 2 * groups * state
    for name in ("dt_bias", "A_log", "D"):
        yield from other(name, heads)
    yield from depthwise("conv1d", channels, kernel, conv_bias)
    yield from linear("in_proj", inner + channels + heads, c.hidden, bias)
    if normed:
        yield from norm("norm", inner)
    yield from linear("out_proj", c.hidden, inner, out_bias)


def _mamba2(c: Fields, _: LayerKind) -> Parts:
    yield from norm("norm", c.hidden)
    bias = c.flag("use_bias")
    mixer = _mixer2(
        c, _mamba_inner(c), c.size("num_heads"), c.size("n_groups"), c.size("state_size"), c.size("conv_kernel"),
        bias=bias, conv_bias=c.flag("use_conv_bias"), out_bias=bias,
    )  # fmt: skip
    yield from within("mixer", mixer)


def _mamba2_cache(c: Fields, _: LayerKind) -> LayerCache:
    inner, state = _mamba_inner(c), c.size("state_size")
    channels = inner + 2 * c.size("n_groups") * state
    return LayerCache(per_sequence=channels * c.size("conv_kernel"), per_sequence_fp32=inner * state)


def _inner2(c: Fields) -> int:
    """Width of the Mamba 2 part of a hybrid."""
    return c.size("mamba_d_ssm") if c.says("mamba_d_ssm") else c.size("mamba_expand") * c.hidden


def _hybrid_mixer(c: Fields, *, out_bias: bool, normed: bool = True) -> Parts:
    return _mixer2(
        c, _inner2(c), c.size("mamba_n_heads"), c.size("mamba_n_groups"), c.size("mamba_d_state"),
        c.size("mamba_d_conv"), bias=c.flag("mamba_proj_bias"), conv_bias=c.flag("mamba_conv_bias"), out_bias=out_bias,
        normed=normed,
    )  # fmt: skip


def _state2(c: Fields) -> LayerCache:
    inner, state = _inner2(c), c.size("mamba_d_state")
    channels = inner + 2 * c.size("mamba_n_groups") * state
    return LayerCache(per_sequence=channels * c.size("mamba_d_conv"), per_sequence_fp32=inner * state)


def _either2(c: Fields, kind: LayerKind) -> LayerCache:
    return plain_cache(c, kind) if kind.attention in ATTENTION else _state2(c)


def _bamba(c: Fields, kind: LayerKind) -> Parts:
    yield from within("feed_forward", gated(c, c.size("intermediate_size"), c.flag("mlp_bias")))
    yield from norm("input_layernorm", c.hidden)
    yield from norm("pre_ff_layernorm", c.hidden)
    if kind.attention in ATTENTION:
        bias = c.flag("attention_bias")
        yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    else:
        yield from within("mamba", _hybrid_mixer(c, out_bias=c.flag("mamba_proj_bias")))


def _bamba_kinds(c: Fields) -> list[LayerKind]:
    full = set(c.numbers("attn_layer_indices") or ())
    return [LayerKind("full_attention" if n in full else "linear_attention") for n in range(c.layers)]


def _granite_hybrid(c: Fields, kind: LayerKind) -> Parts:
    if c.count("num_local_experts"):
        mixture = experts(c, c.size("num_local_experts"), c.size("intermediate_size"), "router")
        yield from within("block_sparse_moe", mixture)
    yield from linear("shared_mlp.input_linear", 2 * c.size("shared_intermediate_size"), c.hidden)
    yield from linear("shared_mlp.output_linear", c.hidden, c.size("shared_intermediate_size"))
    yield from norm("input_layernorm", c.hidden)
    yield from norm("post_attention_layernorm", c.hidden)
    if kind.attention in ATTENTION:
        bias = c.flag("attention_bias")
        yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    else:
        yield from within("mamba", _hybrid_mixer(c, out_bias=c.flag("mamba_proj_bias")))


def _granite_hybrid_widest(c: Fields) -> int:
    chosen = c.count("num_experts_per_tok") if c.count("num_local_experts") else 0
    return chosen * c.size("intermediate_size") + c.size("shared_intermediate_size")


def _recurrent_unless_said(c: Fields) -> list[LayerKind]:
    return all_alike(c) if c.says("layer_types") else _recurrent(c)


def _falcon_h1(c: Fields, _: LayerKind) -> Parts:
    """Attention and Mamba 2 side by side in every layer."""
    yield from within("feed_forward", gated(c, c.size("intermediate_size"), c.flag("mlp_bias")))
    mixer = _hybrid_mixer(c, out_bias=c.flag("projectors_bias"), normed=c.flag("mamba_rms_norm"))
    yield from within("mamba", mixer)
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    yield from norm("input_layernorm", c.hidden)
    yield from norm("pre_ff_layernorm", c.hidden)


def _both(c: Fields, _: LayerKind) -> LayerCache:
    state = _state2(c)
    return LayerCache(2 * c.key_heads * c.head_dim, None, state.per_sequence, state.per_sequence_fp32)


def _jamba(c: Fields, kind: LayerKind) -> Parts:
    if kind.attention in ATTENTION:
        yield from within("self_attn", attention(c))
    else:
        rank, state = _rank(c, "mamba_dt_rank"), c.size("mamba_d_state")
        mixer = _selective(
            c, _jamba_inner(c), state, rank, c.size("mamba_d_conv"),
            bias=c.flag("mamba_proj_bias"), conv_bias=c.flag("mamba_conv_bias"),
        )  # fmt: skip
        yield from within("mamba", mixer)
        for name, size in (("dt", rank), ("b", state), ("c", state)):
            yield from norm(f"mamba.{name}_layernorm", size)
    if kind.sparse:
        mixture = experts(c, c.size("num_experts"), c.size("intermediate_size"), "router")
        yield from within("feed_forward", mixture)
    else:
        yield from within("feed_forward", gated(c, c.size("intermediate_size")))
    yield from norm("input_layernorm", c.hidden)
    yield from norm("pre_ff_layernorm", c.hidden)


def _jamba_inner(c: Fields) -> int:
    return c.size("mamba_expand") * c.hidden


def _jamba_kinds(c: Fields) -> list[LayerKind]:
    period, offset = c.size("attn_layer_period"), c.count("attn_layer_offset")
    expert_period, expert_offset = c.size("expert_layer_period"), c.count("expert_layer_offset")
    return [
        LayerKind(
            "full_attention" if n % period == offset else "linear_attention",
            n % expert_period == expert_offset and c.count("num_experts") > 1,
        )
        for n in range(c.layers)
    ]


def _jamba_cache(c: Fields, kind: LayerKind) -> LayerCache:
    if kind.attention in ATTENTION:
        return plain_cache(c, kind)
    inner = _jamba_inner(c)
    return LayerCache(per_sequence=inner * c.size("mamba_d_conv"), per_sequence_fp32=inner * c.size("mamba_d_state"))


_MAMBA_1 = Layout(
    _mamba,
    "backbone",
    _backbone,
    last_norm("norm_f"),
    kinds=_recurrent,
    cache=_mamba_cache,
    widest=_mamba_inner,
    embedding="embeddings.weight",
)

MAMBA: Mapping[str, Layout] = {
    "mamba": _MAMBA_1,
    "falcon_mamba": _MAMBA_1,
    "mamba2": Layout(
        _mamba2,
        "backbone",
        _backbone,
        last_norm("norm_f"),
        kinds=_recurrent,
        cache=_mamba2_cache,
        widest=_mamba_inner,
        embedding="embeddings.weight",
    ),
    "bamba": Layout(_bamba, after=last_norm("final_layernorm"), kinds=_bamba_kinds, cache=_either2),
    "granitemoehybrid": Layout(
        _granite_hybrid,
        before=_tokens_and_rotary_if_said,
        kinds=_recurrent_unless_said,
        cache=_either2,
        widest=_granite_hybrid_widest,
    ),
    "falcon_h1": Layout(_falcon_h1, after=last_norm("final_layernorm"), kinds=_recurrent, cache=_both),
    "jamba": Layout(
        _jamba,
        before=tokens,
        after=last_norm("final_layernorm"),
        kinds=_jamba_kinds,
        cache=_jamba_cache,
        widest=of_chosen("num_experts_per_tok", "intermediate_size"),
    ),
}


# Families whose layers keep a state of fixed size in turn with windows or full attention: gated recurrences and
# linear attention. Pure.


def _recurrent_gemma(c: Fields, kind: LayerKind) -> Parts:
    """Griffin (De et al., arXiv 2402.19427): gated linear recurrences and local attention in turn."""
    yield from norm("temporal_pre_norm", c.hidden)
    if kind.attention == "sliding_attention":
        yield from within("temporal_block", attention(c, bias=c.flag("attention_bias"), out_bias=True))
    else:
        width, each = _lru(c), _lru(c) // c.heads
        yield from linear("temporal_block.linear_y", width, c.hidden, True)
        yield from linear("temporal_block.linear_x", width, c.hidden, True)
        yield from linear("temporal_block.linear_out", c.hidden, width, True)
        yield from depthwise("temporal_block.conv_1d", width, c.size("conv1d_width"), True)
        yield from other("temporal_block.rg_lru.recurrent_param", width)
        for gate in ("input", "recurrent"):
            yield from other(f"temporal_block.rg_lru.{gate}_gate_weight", c.heads, each, each)
            yield from other(f"temporal_block.rg_lru.{gate}_gate_bias", c.heads, each)
    yield from norm("channel_pre_norm", c.hidden)
    yield from within("mlp_block", gated(c, c.size("intermediate_size") // 2, True))


def _lru(c: Fields) -> int:
    return c.size("lru_width", "hidden_size")


def _recurrent_gemma_kinds(c: Fields) -> list[LayerKind]:
    kinds = [str(kind) for kind in c.list("block_types") or ["recurrent"]]
    return [
        LayerKind("linear_attention" if kinds[n % len(kinds)] == "recurrent" else "sliding_attention")
        for n in range(c.layers)
    ]


def _recurrent_gemma_cache(c: Fields, kind: LayerKind) -> LayerCache:
    if kind.attention == "sliding_attention":
        return plain_cache(c, kind)
    return LayerCache(per_sequence=_lru(c) * (c.size("conv1d_width") - 1), per_sequence_fp32=_lru(c))


def _qwen3_next(c: Fields, kind: LayerKind) -> Parts:
    """Gated DeltaNet (arXiv 2412.06464) and gated attention, mixtures with a shared expert."""
    if kind.attention == "linear_attention":
        keys, values = _delta(c)
        heads = c.size("linear_num_value_heads")
        yield from other("linear_attn.dt_bias", heads)
        yield from other("linear_attn.A_log", heads)
        yield from depthwise("linear_attn.conv1d", 2 * keys + values, c.size("linear_conv_kernel_dim"), False)
        yield from linear("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, c.hidden)
        yield from linear("linear_attn.in_proj_ba", 2 * heads, c.hidden)
        yield from norm("linear_attn.norm", c.size("linear_value_head_dim"))
        yield from linear("linear_attn.out_proj", c.hidden, values)
    else:
        bias, width, keys = c.flag("attention_bias"), c.heads * c.head_dim, c.key_heads * c.head_dim
        yield from linear("self_attn.q_proj", 2 * width, c.hidden, bias)
        yield from linear("self_attn.k_proj", keys, c.hidden, bias)
        yield from linear("self_attn.v_proj", keys, c.hidden, bias)
        yield from linear("self_attn.o_proj", c.hidden, width, bias)
        yield from norm("self_attn.q_norm", c.head_dim)
        yield from norm("self_attn.k_norm", c.head_dim)
    yield from qwen_mixture(c, kind, shared=True)
    yield from norm("input_layernorm", c.hidden)
    yield from norm("post_attention_layernorm", c.hidden)


def _delta(c: Fields) -> tuple[int, int]:
    """Width of all keys, and of all values, of linear attention."""
    return (
        c.size("linear_key_head_dim") * c.size("linear_num_key_heads"),
        c.size("linear_value_head_dim") * c.size("linear_num_value_heads"),
    )


def _qwen3_next_kinds(c: Fields) -> list[LayerKind]:
    return sparse_by_step(c, every(4, "linear_attention", "full_attention_interval")(c))


def _qwen3_next_cache(c: Fields, kind: LayerKind) -> LayerCache:
    if kind.attention != "linear_attention":
        return plain_cache(c, kind)
    keys, values = _delta(c)
    return LayerCache(
        per_sequence=(2 * keys + values) * c.size("linear_conv_kernel_dim"),
        per_sequence_fp32=values * c.size("linear_key_head_dim"),
    )


RECURRENT: Mapping[str, Layout] = {
    "recurrent_gemma": Layout(
        _recurrent_gemma,
        before=tokens,
        after=last_norm("final_norm"),
        kinds=_recurrent_gemma_kinds,
        cache=_recurrent_gemma_cache,
    ),
    "qwen3_next": Layout(
        _qwen3_next,
        kinds=_qwen3_next_kinds,
        cache=_qwen3_next_cache,
        widest=of_chosen("num_experts_per_tok", "moe_intermediate_size", shared="shared_expert_intermediate_size"),
    ),
}
