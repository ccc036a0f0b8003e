"""Families of decoders like Llama: rotary positions, projections apart, gated feed-forward networks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.models.describe.formulas.fields import Fields
from tests.models.describe.formulas.layout import (
    LayerKind,
    LayerParts,
    Layout,
    Modules,
    Parts,
    all_alike,
    attention,
    every,
    gated,
    last_norm,
    linear,
    norm,
    plain_cache,
    two_layers,
    within,
)

from gpuherd.models.describe.description import LayerCache, Role, Tensor

_TWO = ("input_layernorm", "post_attention_layernorm")
_FOUR = (*_TWO, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _standard(
    norms: tuple[str, ...] = _TWO,
    *,
    bias: Callable[[Fields], bool] = lambda c: c.flag("attention_bias"),
    out_bias: Callable[[Fields], bool] | None = None,
    head_norms: bool = False,
    mlp_bias: Callable[[Fields], bool] = lambda _: False,
    norm_bias: bool = False,
    fused_gate: bool = False,
) -> LayerParts:
    """A layer of plain attention and a gated feed-forward network.

    ``bias`` is that of query, key and value; ``out_bias`` that of the output, the same if not given.
    """

    def layer(c: Fields, _: LayerKind) -> Parts:
        of_output = bias(c) if out_bias is None else out_bias(c)
        yield from within("self_attn", attention(c, bias=bias(c), out_bias=of_output, head_norms=head_norms))
        width = c.size("intermediate_size")
        if fused_gate:
            yield from linear("mlp.gate_up_proj", 2 * width, c.hidden)
            yield from linear("mlp.down_proj", c.hidden, width)
        else:
            yield from within("mlp", gated(c, width, mlp_bias(c)))
        for name in norms:
            yield from norm(name, c.hidden, norm_bias)

    return layer


def never(_: Fields) -> bool:
    """No."""
    return False


def always(_: Fields) -> bool:
    """Yes."""
    return True


def windowed_if_asked(c: Fields) -> list[LayerKind]:
    """Qwen: windows only where ``use_sliding_window`` says so, and then from layer ``max_window_layers`` on."""
    if not c.flag("use_sliding_window") or c.get("sliding_window") is None:
        return [LayerKind()] * c.layers
    if c.says("layer_types"):
        return all_alike(c)
    first = c.count("max_window_layers")
    return [LayerKind("sliding_attention" if n >= first else "full_attention") for n in range(c.layers)]


def _windowed_without_positions(c: Fields) -> list[LayerKind]:
    """SmolLM3: windows, where asked for, in the layers that don't turn positions."""
    if c.says("layer_types") or not c.flag("use_sliding_window") or c.get("sliding_window") is None:
        return all_alike(c) if c.says("layer_types") else [LayerKind()] * c.layers
    interval = c.size("no_rope_layer_interval")
    turned = c.numbers("no_rope_layers", c.layers) or [(n + 1) % interval for n in range(c.layers)]
    return [LayerKind("full_attention" if turned[n] else "sliding_attention") for n in range(c.layers)]


def whole_norms(c: Fields) -> Parts:
    """Norms over all queries and all keys at once (OLMo 2)."""
    yield from norm("q_norm", c.heads * c.head_dim)
    yield from norm("k_norm", c.key_heads * c.head_dim)


def _olmo2(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    yield from within("self_attn", whole_norms(c))
    yield from within("mlp", gated(c, c.size("intermediate_size")))
    yield from norm("post_attention_layernorm", c.hidden)
    yield from norm("post_feedforward_layernorm", c.hidden)


def _olmo(c: Fields, kind: LayerKind) -> Parts:
    """Its norms have no parameters."""
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    for part in within("mlp", gated(c, c.size("intermediate_size"))):
        # transformers leaves a model's last parameter unquantised, which is meant for heads.
        last = kind.special and part.name == "mlp.down_proj.weight"
        yield replace(part, role=Role.OTHER) if last else part


def _olmo_kinds(c: Fields) -> list[LayerKind]:
    return [LayerKind(special=c.tied and n == c.layers - 1) for n in range(c.layers)]


def _without_parameters(_: Fields) -> Modules:
    yield "norm", iter(())


def _cohere(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    if c.flag("use_qk_norm"):
        yield Tensor("self_attn.q_norm.weight", (c.heads, c.head_dim))
        yield Tensor("self_attn.k_norm.weight", (c.key_heads, c.head_dim))
    yield from within("mlp", gated(c, c.size("intermediate_size")))
    yield from norm("input_layernorm", c.hidden)


def _starcoder2(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("use_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    yield from within("mlp", two_layers(c, c.size("intermediate_size"), "c_fc", "c_proj", bias))
    for name in _TWO:
        yield from norm(name, c.hidden, True)


def _stablelm(c: Fields, _: LayerKind) -> Parts:
    yield from within("self_attn", attention(c, bias=c.flag("use_qkv_bias")))
    if c.flag("qk_layernorm"):
        for name, field in (("q_layernorm", "num_attention_heads"), ("k_layernorm", "num_key_value_heads")):
            for head in range(c.layers_in(field, "num_attention_heads")):
                yield from norm(f"self_attn.{name}.norms.{head}", c.head_dim)
    yield from within("mlp", gated(c, c.size("intermediate_size")))
    yield from norm("input_layernorm", c.hidden, True)
    if not c.flag("use_parallel_residual"):
        yield from norm("post_attention_layernorm", c.hidden, True)


def _phi(c: Fields, _: LayerKind) -> Parts:
    yield from within("self_attn", attention(c, bias=True, out_bias=True, out="dense"))
    if c.flag("qk_layernorm"):
        yield from norm("self_attn.q_layernorm", c.head_dim, True)
        yield from norm("self_attn.k_layernorm", c.head_dim, True)
    yield from within("mlp", two_layers(c, c.size("intermediate_size"), "fc1", "fc2"))
    yield from norm("input_layernorm", c.hidden, True)


def _phi3(c: Fields, _: LayerKind) -> Parts:
    width, fused = c.heads * c.head_dim, (c.heads + 2 * c.key_heads) * c.head_dim
    yield from linear("self_attn.o_proj", c.hidden, width)
    yield from linear("self_attn.qkv_proj", fused, c.hidden)
    yield from linear("mlp.gate_up_proj", 2 * c.size("intermediate_size"), c.hidden)
    yield from linear("mlp.down_proj", c.hidden, c.size("intermediate_size"))
    for name in _TWO:
        yield from norm(name, c.hidden)


def _nemotron(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("attention_bias")
    yield from within("self_attn", attention(c, bias=bias, out_bias=bias))
    yield from within("mlp", two_layers(c, c.size("intermediate_size"), "up_proj", "down_proj", c.flag("mlp_bias")))
    for name in _TWO:
        yield from norm(name, c.hidden, True)


def _halved_window(c: Fields, kind: LayerKind) -> LayerCache:
    """Gemma 3: a window that looks both ways is half as long, and one more."""
    cache = plain_cache(c, kind)
    if cache.window is None or not c.flag("use_bidirectional_attention"):
        return cache
    return LayerCache(cache.per_token, window=cache.window // 2 + 1)


LLAMA_LIKE: Mapping[str, Layout] = {
    "llama": Layout(_standard(mlp_bias=lambda c: c.flag("mlp_bias"))),
    "mistral": Layout(_standard(bias=never)),
    "ministral3": Layout(_standard(bias=never)),
    "qwen2": Layout(_standard(bias=always, out_bias=never), kinds=windowed_if_asked),
    "qwen3": Layout(_standard(head_norms=True), kinds=windowed_if_asked),
    "smollm3": Layout(_standard(mlp_bias=lambda c: c.flag("mlp_bias")), kinds=_windowed_without_positions),
    "gemma": Layout(_standard()),
    "gemma2": Layout(_standard(_FOUR), kinds=every(2)),
    "gemma3_text": Layout(
        _standard(_FOUR, head_norms=True), kinds=every(6, key="sliding_window_pattern"), cache=_halved_window
    ),
    "olmo": Layout(_olmo, after=_without_parameters, kinds=_olmo_kinds),
    "olmo2": Layout(_olmo2),
    "olmo3": Layout(_olmo2, kinds=every(4)),
    "granite": Layout(_standard(mlp_bias=lambda c: c.flag("mlp_bias"))),
    "cohere": Layout(_cohere),
    "cohere2": Layout(_cohere, kinds=every(4, key="sliding_window_pattern")),
    "starcoder2": Layout(_starcoder2, after=last_norm(bias=True)),
    "stablelm": Layout(_stablelm, after=last_norm(bias=True)),
    "phi": Layout(_phi, after=last_norm("final_layernorm", bias=True), head_bias=always),
    "phi3": Layout(_phi3),
    "glm": Layout(_standard(out_bias=never, fused_gate=True)),
    "glm4": Layout(
        _standard((*_TWO, "post_self_attn_layernorm", "post_mlp_layernorm"), out_bias=never, fused_gate=True)
    ),
    "nemotron": Layout(_nemotron, after=last_norm(bias=True)),
}
