"""Families whose layers keep a state of fixed size in turn with windows or full attention: gated recurrences and linear
attention. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpuherd.models.plan.architecture import LayerCache
from gpuherd.models.plan.families_mamba import depthwise, tokens
from gpuherd.models.plan.families_mixture import of_chosen, qwen_mixture, sparse_by_step
from gpuherd.models.plan.fields import Fields
from gpuherd.models.plan.layout import Layout, every, last_norm
from gpuherd.models.plan.parts import (
    LayerKind,
    Parts,
    attention,
    gated,
    linear,
    norm,
    other,
    plain_cache,
    within,
)


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
