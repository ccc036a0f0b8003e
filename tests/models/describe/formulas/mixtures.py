"""Families of decoders like Llama whose feed-forward networks are mixtures of experts, or whose attention keeps latent
vectors. Experts are fused into parameters of three axes, as transformers 5 loads them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

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
    plain,
    within,
)
from tests.models.describe.formulas.llama import whole_norms

from gpuherd.models.describe.description import LayerCache, Tensor


def _norms(c: Fields, bias: bool = False) -> Parts:
    yield from norm("input_layernorm", c.hidden, bias)
    yield from norm("post_attention_layernorm", c.hidden, bias)


def _mixtral(c: Fields, _: LayerKind) -> Parts:
    yield from within("self_attn", attention(c))
    yield from within("mlp", experts(c, c.size("num_local_experts"), c.size("intermediate_size")))
    yield from _norms(c)


def _phimoe(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    yield from within("mlp", experts(c, c.size("num_local_experts"), c.size("intermediate_size"), "router"))
    yield from _norms(c, True)


def _granitemoe(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    mixture = experts(c, c.size("num_local_experts"), c.size("intermediate_size"), "router")
    yield from within("block_sparse_moe", mixture)
    yield from _norms(c)


def _olmoe(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    yield from within("self_attn", whole_norms(c))
    yield from within("mlp", experts(c, c.size("num_experts"), c.size("intermediate_size")))
    yield from _norms(c)


def sparse_by_step(c: Fields, kinds: list[LayerKind]) -> list[LayerKind]:
    """Qwen: every ``decoder_sparse_step``-th layer is a mixture, but not those of ``mlp_only_layers``."""
    dense, step = set(c.numbers("mlp_only_layers") or ()), c.size("decoder_sparse_step")
    number = c.count("num_experts")
    return [
        LayerKind(kind.attention, n not in dense and number > 0 and (n + 1) % step == 0) for n, kind in enumerate(kinds)
    ]


def qwen_mixture(c: Fields, kind: LayerKind, *, shared: bool) -> Parts:
    """The feed-forward part of a Qwen mixture; with ``shared`` an expert that all tokens go through."""
    if not kind.sparse:
        yield from within("mlp", gated(c, c.size("intermediate_size")))
        return
    yield from within("mlp", experts(c, c.size("num_experts"), c.size("moe_intermediate_size")))
    if shared:
        yield from within("mlp.shared_expert", gated(c, c.size("shared_expert_intermediate_size")))
        yield from linear("mlp.shared_expert_gate", 1, c.hidden)


def _qwen2_moe_kinds(c: Fields) -> list[LayerKind]:
    if c.says("layer_types") or not c.flag("use_sliding_window"):
        kinds = all_alike(c) if c.says("layer_types") else [LayerKind()] * c.layers
    else:
        last = c.count("max_window_layers")
        kinds = [
            LayerKind("sliding_attention" if n % 2 == 0 and n < last else "full_attention") for n in range(c.layers)
        ]
    return sparse_by_step(c, kinds)


def _qwen2_moe(c: Fields, kind: LayerKind) -> Parts:
    yield from within("self_attn", attention(c, bias=c.flag("qkv_bias")))
    yield from qwen_mixture(c, kind, shared=True)
    yield from _norms(c)


def _qwen3_moe_kinds(c: Fields) -> list[LayerKind]:
    windowed = c.flag("use_sliding_window") and c.get("sliding_window") is not None
    kind = LayerKind("sliding_attention" if windowed else "full_attention")
    return sparse_by_step(c, all_alike(c) if c.says("layer_types") else [kind] * c.layers)


def _qwen3_moe(c: Fields, kind: LayerKind) -> Parts:
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias, head_norms=True))
    yield from qwen_mixture(c, kind, shared=False)
    yield from _norms(c)


def of_chosen(number: str = "num_experts_per_tok", *widths: str, shared: str | None = None) -> Callable[[Fields], int]:
    """All experts of a token together: how many times how wide, and what all tokens go through besides."""

    def widest(c: Fields) -> int:
        together = c.count(number) * c.size(*widths)
        return max(together + (c.count(shared) if shared else 0), c.count("intermediate_size"))

    return widest


def _deepseek(c: Fields, kind: LayerKind) -> Parts:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), then experts and shared ones beside them."""
    bias, rank = c.flag("attention_bias"), c.size("kv_lora_rank")
    nope, rope, value = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim"), c.size("v_head_dim")
    if c.get("q_lora_rank") is None:
        yield from linear("self_attn.q_proj", c.heads * (nope + rope), c.hidden)
    else:
        query_rank = c.size("q_lora_rank")
        yield from linear("self_attn.q_a_proj", query_rank, c.hidden, bias)
        yield from norm("self_attn.q_a_layernorm", query_rank)
        yield from linear("self_attn.q_b_proj", c.heads * (nope + rope), query_rank)
    yield from linear("self_attn.kv_a_proj_with_mqa", rank + rope, c.hidden, bias)
    yield from norm("self_attn.kv_a_layernorm", rank)
    yield from linear("self_attn.kv_b_proj", c.heads * (nope + value), rank)
    yield from linear("self_attn.o_proj", c.hidden, c.heads * value, bias)
    if kind.sparse:
        width = c.size("moe_intermediate_size")
        yield from within("mlp", experts(c, c.size("n_routed_experts"), width))
        if c.count("n_shared_experts"):
            yield from within("mlp.shared_experts", gated(c, width * c.count("n_shared_experts")))
    else:
        yield from within("mlp", gated(c, c.size("intermediate_size")))
    yield from _norms(c)


def _deepseek_v3(c: Fields, kind: LayerKind) -> Parts:
    yield from _deepseek(c, kind)
    if kind.sparse:
        yield Tensor("mlp.gate.e_score_correction_bias", (c.size("n_routed_experts"),), keeps_fp32=True, buffer=True)


def _after_dense(c: Fields) -> list[LayerKind]:
    dense = c.count("first_k_dense_replace")
    return [LayerKind("full_attention", n >= dense) for n in range(c.layers)]


def _latent(c: Fields, _: LayerKind) -> LayerCache:
    """The latent vector of a token and its one rotary key."""
    return LayerCache(c.size("kv_lora_rank") + c.size("qk_rope_head_dim"))


def _deepseek_widest(c: Fields) -> int:
    chosen = c.count("num_experts_per_tok") + c.count("n_shared_experts")
    return max(c.size("intermediate_size"), chosen * c.size("moe_intermediate_size"))


def _gpt_oss(c: Fields, _: LayerKind) -> Parts:
    bias, number, width = c.flag("attention_bias"), c.size("num_local_experts"), c.size("intermediate_size")
    yield from other("self_attn.sinks", c.heads)
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    yield from plain(linear("mlp.router", number, c.hidden, True))
    yield from other("mlp.experts.gate_up_proj", number, c.hidden, 2 * width)
    yield from other("mlp.experts.gate_up_proj_bias", number, 2 * width)
    yield from other("mlp.experts.down_proj", number, width, c.hidden)
    yield from other("mlp.experts.down_proj_bias", number, c.hidden)
    for part in _norms(c):
        yield replace(part, fp32_in_fp16=True)


def _gpt_oss_norm(c: Fields) -> Modules:
    yield "norm", iter((Tensor(".weight", (c.hidden,), fp32_in_fp16=True),))


def _llama4(c: Fields, kind: LayerKind) -> Parts:
    bias, width = c.flag("attention_bias"), c.size("intermediate_size")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    if kind.sparse:
        number = c.size("num_local_experts")
        yield from other("feed_forward.experts.gate_up_proj", number, c.hidden, 2 * width)
        yield from other("feed_forward.experts.down_proj", number, width, c.hidden)
        yield from plain(linear("feed_forward.router", number, c.hidden))
        yield from within("feed_forward.shared_expert", gated(c, width))
    else:
        yield from within("feed_forward", gated(c, c.size("intermediate_size_mlp")))
    yield from _norms(c)


def _llama4_kinds(c: Fields) -> list[LayerKind]:
    """Chunks where positions are turned, all tokens where they aren't; mixtures every so many layers."""
    interval, step = c.size("no_rope_layer_interval"), c.size("interleave_moe_layer_step")
    turned = c.numbers("no_rope_layers", c.layers) or [int((n + 1) % interval != 0) for n in range(c.layers)]
    given = c.list("moe_layers")
    sparse = range(step - 1, c.layers, step) if given is None else c.numbers("moe_layers") or ()
    if c.says("layer_types"):
        kinds = all_alike(c)
    else:
        kinds = [LayerKind("chunked_attention" if turned[n] else "full_attention") for n in range(c.layers)]
    return [LayerKind(kind.attention, n in sparse) for n, kind in enumerate(kinds)]


MIXTURES: Mapping[str, Layout] = {
    "mixtral": Layout(_mixtral, widest=of_chosen("num_experts_per_tok", "intermediate_size")),
    "phimoe": Layout(
        _phimoe,
        after=last_norm(bias=True),
        head_bias=lambda c: c.flag("lm_head_bias"),
        widest=of_chosen("num_experts_per_tok", "intermediate_size"),
    ),
    "granitemoe": Layout(_granitemoe, widest=of_chosen("num_experts_per_tok", "intermediate_size")),
    "olmoe": Layout(_olmoe, widest=of_chosen("num_experts_per_tok", "intermediate_size")),
    "qwen2_moe": Layout(
        _qwen2_moe,
        kinds=_qwen2_moe_kinds,
        widest=of_chosen("num_experts_per_tok", "moe_intermediate_size", shared="shared_expert_intermediate_size"),
    ),
    "qwen3_moe": Layout(
        _qwen3_moe, kinds=_qwen3_moe_kinds, widest=of_chosen("num_experts_per_tok", "moe_intermediate_size")
    ),
    "deepseek_v2": Layout(_deepseek, kinds=_after_dense, cache=_latent, widest=_deepseek_widest),
    "deepseek_v3": Layout(_deepseek_v3, kinds=_after_dense, cache=_latent, widest=_deepseek_widest),
    "gpt_oss": Layout(
        _gpt_oss, after=_gpt_oss_norm, kinds=every(2), widest=of_chosen("num_experts_per_tok", "intermediate_size")
    ),
    "llama4_text": Layout(_llama4, kinds=_llama4_kinds),
}
