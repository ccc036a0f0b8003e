"""Families with an encoder: encoder-decoder models (T5, BART) and encoders alone (BERT), which keep nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from tests.models.describe.formulas.fields import Fields
from tests.models.describe.formulas.layout import (
    LayerKind,
    Layout,
    Modules,
    Parts,
    last_norm,
    linear,
    norm,
    table,
    within,
)

from gpuherd.models.describe.description import Block, LayerCache, Role, Tensor


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """A family of models whose decoder reads what an encoder made of the prompt.

    Attributes:
        shared: path of the embedding that both have.
        encoder, decoder: the two, each with its root.
        tied: whether the head is that embedding.
        logits_bias: whether there is a buffer that is added to the logits.
    """

    shared: str
    encoder: Layout
    decoder: Layout
    widest: Callable[[Fields], int]
    tied: Callable[[Fields], bool]
    logits_bias: bool = False
    is_encoder_decoder: bool = True

    def text(self, c: Fields) -> Fields:
        """The config of the language model: the whole."""
        return c

    def blocks(self, c: Fields, split: Mapping[str, str]) -> tuple[Block, ...]:
        """All blocks, the encoder's first."""
        return tuple(self._all(c, split))

    def _all(self, c: Fields, split: Mapping[str, str]) -> Iterator[Block]:
        embedding, shape = f"{self.shared}.weight", (c.vocabulary, c.hidden)
        yield Block(self.shared, "embedding", (Tensor(embedding, shape, Role.EMBEDDING),))
        yield from self.encoder.body(c, self.encoder.root, split)
        yield from self.decoder.body(c, self.decoder.root, split)
        head = Tensor("lm_head.weight", shape, Role.HEAD, embedding if self.tied(c) else None)
        yield Block("lm_head", "head", (head,))
        if self.logits_bias:
            bias = Tensor("final_logits_bias", (1, c.vocabulary), buffer=True)
            yield Block("final_logits_bias", "head", (bias,))


def _shared(path: str, always: bool = False) -> Callable[[Fields], Modules]:
    """The shared embedding under its other name; one of its own in a model that ties nothing, unless ``always``."""

    def before(c: Fields) -> Modules:
        tied_to = f"{path}.weight" if always or c.tied else None
        yield "embed_tokens", iter((Tensor(".weight", (c.vocabulary, c.hidden), Role.EMBEDDING, tied_to),))

    return before


def _t5_attention(c: Fields, name: str, positions: bool) -> Parts:
    width = c.heads * c.size("head_dim")
    for part in ("q", "k", "v"):
        yield from linear(f"{name}.{part}", width, c.hidden)
    yield from linear(f"{name}.o", c.hidden, width)
    if positions:
        yield from table(f"{name}.relative_attention_bias", c.size("relative_attention_num_buckets"), c.heads)


def _t5_network(c: Fields) -> Parts:
    gated = str(c.get("feed_forward_proj")).startswith("gated")
    for name in ("wi_0", "wi_1") if gated else ("wi",):
        yield from linear(name, c.size("d_ff"), c.hidden)
    for part in linear("wo", c.hidden, c.size("d_ff")):
        yield replace(part, fp32_in_fp16=True)


def _t5_encoder(c: Fields, kind: LayerKind) -> Parts:
    yield from within("layer.0", _t5_attention(c, "SelfAttention", kind.special))
    yield from norm("layer.0.layer_norm", c.hidden)
    yield from within("layer.1.DenseReluDense", _t5_network(c))
    yield from norm("layer.1.layer_norm", c.hidden)


def _t5_decoder(c: Fields, kind: LayerKind) -> Parts:
    yield from within("layer.0", _t5_attention(c, "SelfAttention", kind.special))
    yield from norm("layer.0.layer_norm", c.hidden)
    yield from within("layer.1", _t5_attention(c, "EncDecAttention", False))
    yield from norm("layer.1.layer_norm", c.hidden)
    yield from within("layer.2.DenseReluDense", _t5_network(c))
    yield from norm("layer.2.layer_norm", c.hidden)


def _kinds(*fields: str, positions_in_all: bool = False) -> Callable[[Fields], list[LayerKind]]:
    """So many layers as the first of the fields says; positions (``special``) in the first, or in all."""

    def kinds(c: Fields) -> list[LayerKind]:
        return [LayerKind(special=positions_in_all or n == 0) for n in range(c.layers_in(*fields))]

    return kinds


def _nothing(_: Fields, __: LayerKind) -> None:
    return None


def _t5_cache(c: Fields, _: LayerKind) -> LayerCache:
    keys_and_values = 2 * c.heads * c.size("head_dim")
    return LayerCache(keys_and_values, per_encoder_token=keys_and_values)


def _t5(positions_in_all: bool = False) -> EncoderDecoder:
    """T5 and its like.

    Its config class says tied always; but where the config says otherwise the checkpoint has a head of its own
    (T5 1.1, Flan), and transformers doesn't tie what differs.
    """
    after = last_norm("final_layer_norm")
    encoder, decoder = ("num_hidden_layers",), ("num_decoder_layers", "num_hidden_layers")
    return EncoderDecoder(
        "shared",
        Layout(_t5_encoder, "encoder", _shared("shared", always=True), after, "block", _kinds(*encoder,
               positions_in_all=positions_in_all), _nothing),
        Layout(_t5_decoder, "decoder", _shared("shared", always=True), after, "block", _kinds(*decoder,
               positions_in_all=positions_in_all), _t5_cache),
        widest=lambda c: c.size("d_ff"),
        tied=lambda c: c.get("tie_word_embeddings") is not False,
    )  # fmt: skip


def _bart_attention(c: Fields, name: str) -> Parts:
    for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
        yield from linear(f"{name}.{part}", c.hidden, c.hidden, True)
    yield from norm(f"{name}_layer_norm", c.hidden, True)


def _bart_network(c: Fields, width: int) -> Parts:
    yield from linear("fc1", width, c.hidden, True)
    yield from linear("fc2", c.hidden, width, True)
    yield from norm("final_layer_norm", c.hidden, True)


def _bart_encoder(c: Fields, _: LayerKind) -> Parts:
    yield from _bart_attention(c, "self_attn")
    yield from _bart_network(c, c.size("encoder_ffn_dim"))


def _bart_decoder(c: Fields, _: LayerKind) -> Parts:
    yield from _bart_attention(c, "self_attn")
    yield from _bart_attention(c, "encoder_attn")
    yield from _bart_network(c, c.size("decoder_ffn_dim"))


def _bart_before(c: Fields) -> Modules:
    yield from _shared("model.shared")(c)
    yield "embed_positions", table("", c.size("max_position_embeddings") + 2, c.hidden)
    yield "layernorm_embedding", norm("", c.hidden, True)


def _no_modules(_: Fields) -> Modules:
    return iter(())


def _bart_cache(c: Fields, _: LayerKind) -> LayerCache:
    return LayerCache(2 * c.hidden, per_encoder_token=2 * c.hidden)


def _bart(after: Callable[[Fields], Modules]) -> EncoderDecoder:
    encoder, decoder = _kinds("encoder_layers"), _kinds("decoder_layers")
    return EncoderDecoder(
        "model.shared",
        Layout(_bart_encoder, "model.encoder", _bart_before, after, kinds=_alike(encoder), cache=_nothing),
        Layout(_bart_decoder, "model.decoder", _bart_before, after, kinds=_alike(decoder), cache=_bart_cache),
        widest=lambda c: max(c.size("encoder_ffn_dim"), c.size("decoder_ffn_dim")),
        tied=lambda c: c.tied,
        logits_bias=True,
    )


def _alike(kinds: Callable[[Fields], list[LayerKind]]) -> Callable[[Fields], list[LayerKind]]:
    """As many layers, none of them special."""
    return lambda c: [LayerKind()] * len(kinds(c))


def _bert(c: Fields, _: LayerKind) -> Parts:
    for name in ("query", "key", "value"):
        yield from linear(f"attention.self.{name}", c.hidden, c.hidden, True)
    yield from linear("attention.output.dense", c.hidden, c.hidden, True)
    yield from norm("attention.output.LayerNorm", c.hidden, True)
    yield from linear("intermediate.dense", c.size("intermediate_size"), c.hidden, True)
    yield from linear("output.dense", c.hidden, c.size("intermediate_size"), True)
    yield from norm("output.LayerNorm", c.hidden, True)


def _bert_before(c: Fields) -> Modules:
    def parts() -> Parts:
        yield from table("word_embeddings", c.vocabulary, c.hidden)
        yield from table("position_embeddings", c.size("max_position_embeddings"), c.hidden)
        yield from table("token_type_embeddings", c.size("type_vocab_size"), c.hidden)
        yield from norm("LayerNorm", c.hidden, True)

    yield "embeddings", parts()


def _pooler(c: Fields) -> Modules:
    yield "pooler", linear("dense", c.hidden, c.hidden, True)


def _full(c: Fields) -> list[LayerKind]:
    return [LayerKind()] * c.layers


def _distilbert(c: Fields, _: LayerKind) -> Parts:
    for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
        yield from linear(f"attention.{name}", c.hidden, c.hidden, True)
    yield from norm("sa_layer_norm", c.hidden, True)
    yield from linear("ffn.lin1", c.size("hidden_dim"), c.hidden, True)
    yield from linear("ffn.lin2", c.hidden, c.size("hidden_dim"), True)
    yield from norm("output_layer_norm", c.hidden, True)


def _distilbert_before(c: Fields) -> Modules:
    def parts() -> Parts:
        yield from table("word_embeddings", c.vocabulary, c.hidden)
        yield from table("position_embeddings", c.size("max_position_embeddings"), c.hidden)
        yield from norm("LayerNorm", c.hidden, True)

    yield "embeddings", parts()


_BERT = Layout(_bert, "", _bert_before, _pooler, "encoder.layer", _full, _nothing, head=None)

ENCODER_DECODERS: Mapping[str, EncoderDecoder] = {
    "t5": _t5(),
    "mt5": _t5(),
    "umt5": _t5(positions_in_all=True),
    "bart": _bart(_no_modules),
    "mbart": _bart(last_norm("layer_norm", True)),
}
ENCODERS: Mapping[str, Layout] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "distilbert": Layout(
        _distilbert, "", _distilbert_before, _no_modules, "transformer.layer", _full, _nothing,
        widest=lambda c: c.size("hidden_dim"), head=None,
    ),
}  # fmt: skip
