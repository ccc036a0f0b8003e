"""Families of decoders from before Llama: fused projections, LayerNorm with biases, learned positions. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tests.models.describe.formulas.fields import Fields
from tests.models.describe.formulas.layout import (
    LayerKind,
    Layout,
    Modules,
    Parts,
    conv1d,
    last_norm,
    linear,
    norm,
    plain,
    table,
    two_layers,
    within,
)
from tests.models.describe.formulas.llama import always

from gpuherd.models.describe.description import LayerCache


def _inner(c: Fields) -> int:
    """``n_inner``, four times the width where it isn't said."""
    return c.size("n_inner") if c.says("n_inner") else 4 * c.hidden


def _full(c: Fields) -> list[LayerKind]:
    return [LayerKind()] * c.layers


def _tokens_and_positions(c: Fields) -> Modules:
    yield "wte", table("", c.vocabulary, c.hidden)
    yield "wpe", table("", c.size("max_position_embeddings"), c.hidden)


def _tokens(c: Fields) -> Modules:
    yield "wte", table("", c.vocabulary, c.hidden)


def _two_norms(c: Fields) -> Parts:
    yield from norm("ln_1", c.hidden, True)
    yield from norm("ln_2", c.hidden, True)


def _gpt2(c: Fields, _: LayerKind) -> Parts:
    yield from conv1d("attn.c_attn", c.hidden, 3 * c.hidden)
    yield from conv1d("attn.c_proj", c.hidden, c.hidden)
    yield from conv1d("mlp.c_fc", c.hidden, _inner(c))
    yield from conv1d("mlp.c_proj", _inner(c), c.hidden)
    if c.flag("add_cross_attention"):
        yield from conv1d("crossattention.c_attn", c.hidden, 2 * c.hidden)
        yield from conv1d("crossattention.q_attn", c.hidden, c.hidden)
        yield from conv1d("crossattention.c_proj", c.hidden, c.hidden)
        yield from norm("ln_cross_attn", c.hidden, True)
    yield from _two_norms(c)


def _gpt_bigcode(c: Fields, _: LayerKind) -> Parts:
    keys = c.hidden // c.heads if c.flag("multi_query") else c.hidden
    yield from linear("attn.c_attn", c.hidden + 2 * keys, c.hidden, True)
    yield from linear("attn.c_proj", c.hidden, c.hidden, True)
    yield from within("mlp", two_layers(c, _inner(c), "c_fc", "c_proj"))
    yield from _two_norms(c)


def _bigcode_cache(c: Fields, _: LayerKind) -> LayerCache:
    return LayerCache(2 * (c.hidden // c.heads if c.flag("multi_query") else c.hidden))


def _gpt_neo(c: Fields, _: LayerKind) -> Parts:
    for name in ("k_proj", "v_proj", "q_proj"):
        yield from linear(f"attn.attention.{name}", c.hidden, c.hidden)
    yield from linear("attn.attention.out_proj", c.hidden, c.hidden, True)
    width = c.size("intermediate_size") if c.says("intermediate_size") else 4 * c.hidden
    yield from within("mlp", two_layers(c, width, "c_fc", "c_proj"))
    yield from _two_norms(c)


def _gptj(c: Fields, _: LayerKind) -> Parts:
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        yield from linear(f"attn.{name}", c.hidden, c.hidden)
    yield from within("mlp", two_layers(c, _inner(c), "fc_in", "fc_out"))
    yield from norm("ln_1", c.hidden, True)


def _codegen(c: Fields, _: LayerKind) -> Parts:
    yield from linear("attn.qkv_proj", 3 * c.hidden, c.hidden)
    yield from linear("attn.out_proj", c.hidden, c.hidden)
    yield from within("mlp", two_layers(c, _inner(c), "fc_in", "fc_out"))
    yield from norm("ln_1", c.hidden, True)


def _gpt_neox(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("attention_bias")
    yield from linear("attention.query_key_value", 3 * c.hidden, c.hidden, bias)
    yield from linear("attention.dense", c.hidden, c.hidden, bias)
    yield from within("mlp", two_layers(c, c.size("intermediate_size"), "dense_h_to_4h", "dense_4h_to_h"))
    yield from norm("input_layernorm", c.hidden, True)
    yield from norm("post_attention_layernorm", c.hidden, True)


def _neox_tokens(c: Fields) -> Modules:
    yield "embed_in", table("", c.vocabulary, c.hidden)
    yield "rotary_emb", iter(())


def _bloom(c: Fields, _: LayerKind) -> Parts:
    yield from linear("self_attention.query_key_value", 3 * c.hidden, c.hidden, True)
    yield from linear("self_attention.dense", c.hidden, c.hidden, True)
    yield from within("mlp", two_layers(c, 4 * c.hidden, "dense_h_to_4h", "dense_4h_to_h"))
    yield from norm("input_layernorm", c.hidden, True)
    yield from norm("post_attention_layernorm", c.hidden, True)


def _bloom_tokens(c: Fields) -> Modules:
    yield "word_embeddings", table("", c.vocabulary, c.hidden)
    yield "word_embeddings_layernorm", norm("", c.hidden, True)


def _falcon_keys(c: Fields) -> int:
    """Key heads of the fused projection."""
    if c.flag("new_decoder_architecture"):
        return c.size("num_kv_heads", "num_attention_heads")
    return 1 if c.flag("multi_query") else c.heads


def _falcon(c: Fields, _: LayerKind) -> Parts:
    """Its linear layers are a class of their own, which bitsandbytes' integration in transformers 5 leaves alone."""
    bias, width = c.flag("bias"), c.hidden // c.heads
    inner = c.size("ffn_hidden_size") if c.says("ffn_hidden_size") else 4 * c.hidden
    fused = (c.heads + 2 * _falcon_keys(c)) * width
    yield from plain(linear("self_attention.query_key_value", fused, c.hidden, bias))
    yield from plain(linear("self_attention.dense", c.hidden, c.hidden, bias))
    yield from plain(within("mlp", two_layers(c, inner, "dense_h_to_4h", "dense_4h_to_h", bias)))
    norms = c.get("num_ln_in_parallel_attn")
    if norms is None and c.flag("new_decoder_architecture"):
        norms = 2
    names: tuple[str, ...]
    if not c.flag("parallel_attn"):
        names = ("post_attention_layernorm", "input_layernorm")
    else:
        names = ("ln_attn", "ln_mlp") if norms == 2 else ("input_layernorm",)
    for name in names:
        yield from norm(name, c.hidden, True)


def _falcon_cache(c: Fields, _: LayerKind) -> LayerCache:
    """With the new architecture keys are repeated for all query heads before they are kept."""
    heads = c.heads if c.flag("new_decoder_architecture") else _falcon_keys(c)
    return LayerCache(2 * heads * (c.hidden // c.heads))


def _falcon_tokens(c: Fields) -> Modules:
    yield "word_embeddings", table("", c.vocabulary, c.hidden)
    yield "rotary_emb", iter(())


def _opt(c: Fields, _: LayerKind) -> Parts:
    bias = c.flag("enable_bias")
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        yield from linear(f"self_attn.{name}", c.hidden, c.hidden, bias)
    if c.flag("layer_norm_elementwise_affine"):
        yield from norm("self_attn_layer_norm", c.hidden, True)
        yield from norm("final_layer_norm", c.hidden, True)
    yield from two_layers(c, c.size("ffn_dim"), "fc1", "fc2", bias)


def _opt_width(c: Fields) -> int:
    return c.size("word_embed_proj_dim", "hidden_size")


def _opt_before(c: Fields) -> Modules:
    yield "embed_tokens", table("", c.vocabulary, _opt_width(c))
    yield "embed_positions", table("", c.size("max_position_embeddings") + 2, c.hidden)
    if _opt_width(c) != c.hidden:
        yield "project_in", linear("", c.hidden, _opt_width(c))


def _opt_after(c: Fields) -> Modules:
    if c.flag("do_layer_norm_before") and not c.flag("_remove_final_layer_norm"):
        affine = c.flag("layer_norm_elementwise_affine")
        yield "final_layer_norm", norm("", c.hidden, True) if affine else iter(())
    if _opt_width(c) != c.hidden:
        yield "project_out", linear("", _opt_width(c), c.hidden)


def _mpt(c: Fields, _: LayerKind) -> Parts:
    yield from norm("norm_1", c.hidden)
    yield from linear("attn.Wqkv", 3 * c.hidden, c.hidden)
    yield from linear("attn.out_proj", c.hidden, c.hidden)
    yield from norm("norm_2", c.hidden)
    yield from linear("ffn.up_proj", 4 * c.hidden, c.hidden)
    yield from linear("ffn.down_proj", c.hidden, 4 * c.hidden)


GPT_LIKE: Mapping[str, Layout] = {
    "gpt2": Layout(_gpt2, "transformer", _tokens_and_positions, last_norm("ln_f", True), "h", _full, widest=_inner,
                   embedding="wte.weight"),
    "gpt_bigcode": Layout(_gpt_bigcode, "transformer", _tokens_and_positions, last_norm("ln_f", True), "h", _full,
                          _bigcode_cache, _inner, embedding="wte.weight"),
    "gpt_neo": Layout(_gpt_neo, "transformer", _tokens_and_positions, last_norm("ln_f", True), "h", _full,
                      widest=lambda c: c.size("intermediate_size") if c.says("intermediate_size") else 4 * c.hidden,
                      embedding="wte.weight"),
    "gptj": Layout(_gptj, "transformer", _tokens, last_norm("ln_f", True), "h", _full, widest=_inner, head_bias=always,
                   embedding="wte.weight"),
    "codegen": Layout(_codegen, "transformer", _tokens, last_norm("ln_f", True), "h", _full, widest=_inner,
                      head_bias=always, embedding="wte.weight"),
    "gpt_neox": Layout(_gpt_neox, "gpt_neox", _neox_tokens, last_norm("final_layer_norm", True), kinds=_full,
                       embedding="embed_in.weight"),
    "bloom": Layout(_bloom, "transformer", _bloom_tokens, last_norm("ln_f", True), "h", _full,
                    widest=lambda c: 4 * c.hidden, embedding="word_embeddings.weight"),
    "falcon": Layout(_falcon, "transformer", _falcon_tokens, last_norm("ln_f", True), "h", _full, _falcon_cache,
                     lambda c: c.size("ffn_hidden_size") if c.says("ffn_hidden_size") else 4 * c.hidden,
                     embedding="word_embeddings.weight"),
    "opt": Layout(_opt, "model.decoder", _opt_before, _opt_after, kinds=_full, widest=lambda c: c.size("ffn_dim"),
                  head_width=_opt_width),
    "mpt": Layout(_mpt, "transformer", _tokens, last_norm("norm_f"), "blocks", _full, widest=lambda c: 4 * c.hidden,
                  embedding="wte.weight"),
}  # fmt: skip
