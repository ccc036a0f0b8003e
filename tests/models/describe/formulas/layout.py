"""The pieces that layers are made of: each a name, a shape and a role, as functions of a config. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tests.models.describe.formulas.fields import Fields

from gpuherd.models.describe.description import Block, LayerCache, Role, Tensor

# Tensors whose names are those within a module.
Parts = Iterator[Tensor]


class LayerKind(NamedTuple):
    """What tells a layer from others of the same model: its parts and its cache follow from it and the config.

    Attributes:
        attention: as in ``layer_types`` of the config: ``full_attention``, ``sliding_attention``, ``linear_attention``,
            ...
        sparse: whether it is a mixture of experts, in a family where only some layers are.
        special: whether it differs from the rest in another way, which its family knows.
    """

    attention: str = "full_attention"
    sparse: bool = False
    special: bool = False


# What a layer of some kind is made of.
LayerParts = Callable[[Fields, LayerKind], Parts]


def linear(name: str, rows: int, columns: int, bias: bool = False) -> Parts:
    """A Linear module: its weight is (outputs, inputs)."""
    yield Tensor(f"{name}.weight", (rows, columns), Role.LINEAR)
    if bias:
        yield Tensor(f"{name}.bias", (rows,))


def conv1d(name: str, inputs: int, outputs: int) -> Parts:
    """GPT-2's Conv1D: a Linear module that stores the transpose, always with a bias."""
    yield Tensor(f"{name}.weight", (inputs, outputs), Role.LINEAR, transposed=True)
    yield Tensor(f"{name}.bias", (outputs,))


def plain(parts: Parts) -> Parts:
    """The same, of a module that is no Linear to bitsandbytes: a router, a subclass of Linear."""
    for part in parts:
        yield replace(part, role=Role.OTHER)


def norm(name: str, size: int, bias: bool = False) -> Parts:
    """A normalisation."""
    yield Tensor(f"{name}.weight", (size,))
    if bias:
        yield Tensor(f"{name}.bias", (size,))


def table(name: str, rows: int, width: int) -> Parts:
    """An embedding."""
    yield Tensor(f"{name}.weight", (rows, width), Role.EMBEDDING)


def other(name: str, *shape: int) -> Parts:
    """A parameter of its own."""
    yield Tensor(name, shape)


def within(prefix: str, parts: Parts) -> Parts:
    """The parts of a module inside another."""
    for part in parts:
        yield replace(part, name=f"{prefix}.{part.name}")


def attention(
    c: Fields, *, bias: bool = False, out_bias: bool = False, out: str = "o_proj", head_norms: bool = False
) -> Parts:
    """Query, key, value and output projections; norms over each head's queries and keys if it has them."""
    width, keys = c.heads * c.head_dim, c.key_heads * c.head_dim
    yield from linear("q_proj", width, c.hidden, bias)
    yield from linear("k_proj", keys, c.hidden, bias)
    yield from linear("v_proj", keys, c.hidden, bias)
    yield from linear(out, c.hidden, width, out_bias)
    if head_norms:
        yield from norm("q_norm", c.head_dim)
        yield from norm("k_norm", c.head_dim)


def gated(c: Fields, width: int, bias: bool = False) -> Parts:
    """A gated feed-forward network."""
    yield from linear("gate_proj", width, c.hidden, bias)
    yield from linear("up_proj", width, c.hidden, bias)
    yield from linear("down_proj", c.hidden, width, bias)


def two_layers(c: Fields, width: int, up: str, down: str, bias: bool = True) -> Parts:
    """A feed-forward network of two matrices."""
    yield from linear(up, width, c.hidden, bias)
    yield from linear(down, c.hidden, width, bias)


def experts(c: Fields, number: int, width: int, router: str = "gate") -> Parts:
    """A mixture of gated experts as transformers 5 has them: fused into two parameters, which nothing quantises, and a
    router that is no Linear module."""
    yield from plain(linear(router, number, c.hidden))
    yield from other("experts.gate_up_proj", number, 2 * width, c.hidden)
    yield from other("experts.down_proj", number, c.hidden, width)


def layer_types(c: Fields) -> list[str]:
    """What transformers calls the attention of each layer: of the config, else by ``sliding_window`` and
    ``attention_chunk_size``, which then hold for all layers."""
    given = c.list("layer_types")
    if given is not None:
        if len(given) < c.layers:
            raise c.bad("layer_types", f"{len(given)} entries", f"one for each of the {c.layers} layers")
        return [str(kind) for kind in given[: c.layers]]
    if c.get("sliding_window") is not None:
        return ["sliding_attention"] * c.layers
    return ["chunked_attention" if c.get("attention_chunk_size") is not None else "full_attention"] * c.layers


def plain_cache(c: Fields, kind: LayerKind) -> LayerCache:
    """Keys and values of one layer."""
    per_token = 2 * c.key_heads * c.head_dim
    if kind.attention == "sliding_attention" and c.get("sliding_window") is not None:
        return LayerCache(per_token, window=c.size("sliding_window"))
    if kind.attention == "chunked_attention" and c.get("attention_chunk_size") is not None:
        return LayerCache(per_token, window=c.size("attention_chunk_size"))
    return LayerCache(per_token)


# How a family's modules follow each other, and the blocks that come of it. Pure.
#
# A family is a ``Layout``: plain data, and functions of a config that give the parts of its layers. Which families
# there are is ``families``.

Kind = Literal["embedding", "layer", "norm", "head", "other"]
# A module's path below the family's root, and its parts.
Modules = Iterator[tuple[str, Parts]]


def tokens_and_rotary(c: Fields) -> Modules:
    """An embedding of tokens, and the module that turns positions (it has no parameters, but it lies somewhere)."""
    yield "embed_tokens", table("", c.vocabulary, c.hidden)
    yield "rotary_emb", iter(())


def norm_without_bias(c: Fields) -> Modules:
    """A norm after the last layer."""
    yield "norm", norm("", c.hidden)


def last_norm(name: str = "norm", bias: bool = False) -> Callable[[Fields], Modules]:
    """A norm of another name after the last layer, or with biases."""

    def after(c: Fields) -> Modules:
        yield name, norm("", c.hidden, bias)

    return after


def all_alike(c: Fields) -> list[LayerKind]:
    """Layers that differ in nothing but their attention, as the config says."""
    return [LayerKind(kind) for kind in layer_types(c)]


def every(period: int, other: str = "sliding_attention", key: str | None = None) -> Callable[[Fields], list[LayerKind]]:
    """Full attention in every so many layers, another between, unless the config lists them; ``key`` is the field that
    may name another period."""

    def kinds(c: Fields) -> list[LayerKind]:
        if c.says("layer_types"):
            return all_alike(c)
        apart = c.size(key) if key is not None and c.says(key) else period
        return [LayerKind("full_attention" if (n + 1) % apart == 0 else other) for n in range(c.layers)]

    return kinds


def intermediate(c: Fields) -> int:
    """``intermediate_size``."""
    return c.size("intermediate_size")


@dataclass(frozen=True, slots=True)
class Layout:
    """A family of models.

    Attributes:
        layer: the parts of a layer of some kind.
        root: path of the module that has the layers; empty if that is the model itself.
        before, after: the modules before the first layer and after the last, in the order of computation.
        layers: name of the list of layers.
        kinds: which kind each layer is of.
        cache: what a layer of some kind keeps.
        widest: the widest that a token goes through at once.
        head: path of the output head; None where there is none.
        head_bias: whether the head has a bias.
        head_width: its inputs.
        embedding: which of the tensors the head may be tied to.
    """

    layer: LayerParts
    root: str = "model"
    before: Callable[[Fields], Modules] = tokens_and_rotary
    after: Callable[[Fields], Modules] = norm_without_bias
    layers: str = "layers"
    kinds: Callable[[Fields], list[LayerKind]] = all_alike
    cache: Callable[[Fields, LayerKind], LayerCache | None] = plain_cache
    widest: Callable[[Fields], int] = intermediate
    head: str | None = "lm_head"
    head_bias: Callable[[Fields], bool] = lambda _: False
    head_width: Callable[[Fields], int] = lambda c: c.hidden
    embedding: str = "embed_tokens.weight"
    is_encoder_decoder: bool = False

    def text(self, c: Fields) -> Fields:
        """The config of the language model: the whole."""
        return c

    def blocks(self, c: Fields, split: Mapping[str, str]) -> tuple[Block, ...]:
        """All blocks of the model, in the order of computation.

        Args:
            c: its config.
            split: module within a layer -> how tensor parallelism splits it; ``head`` for the head.
        """
        return (*self.body(c, self.root, split), *self.output(c, self.root, split))

    def body(self, c: Fields, root: str, split: Mapping[str, str]) -> Iterator[Block]:
        """The blocks below the root."""
        prefix = f"{root}." if root else ""
        for name, parts in self.before(c):
            # Where transformers has a plan for the layers it divides the input embedding too, by the vocabulary.
            by_vocabulary = {".weight": "embedding_rowwise"} if split and name == "embed_tokens" else {}
            yield block(f"{prefix}{name}", "embedding", [marked(part, by_vocabulary) for part in parts])
        templates: dict[LayerKind, tuple[list[Tensor], LayerCache | None]] = {}
        for number, kind in enumerate(self.kinds(c)):
            if kind not in templates:
                marked_parts = [marked(part, split) for part in self.layer(c, kind)]
                templates[kind] = (marked_parts, self.cache(c, kind))
            template, cache = templates[kind]
            yield block(f"{prefix}{self.layers}.{number}", "layer", template, cache)
        for name, parts in self.after(c):
            yield block(f"{prefix}{name}", "norm", parts)

    def output(self, c: Fields, root: str, split: Mapping[str, str]) -> Iterator[Block]:
        """The output head."""
        if self.head is None:
            return
        tied = f"{root}.{self.embedding}" if c.tied else None
        shape, is_split = (c.vocabulary, self.head_width(c)), "head" in split
        tensors = [Tensor(f"{self.head}.weight", shape, Role.HEAD, tied, split=is_split)]
        if self.head_bias(c):
            tensors.append(Tensor(f"{self.head}.bias", (c.vocabulary,), split=is_split))
        yield Block(self.head, "head", tuple(tensors))


def block(name: str, kind: Kind, parts: Iterable[Tensor], cache: LayerCache | None = None) -> Block:
    """A block of a module's parts; the name of a part of the module itself begins with its dot."""
    return Block(
        name,
        kind,
        tuple(
            Tensor(
                f"{name}{part.name}" if part.name.startswith(".") else f"{name}.{part.name}",
                part.shape,
                part.role,
                part.tied_to,
                part.keeps_fp32,
                part.fp32_in_fp16,
                part.transposed,
                part.stored_bytes,
                part.split,
                part.buffer,
            )
            for part in parts
        ),
        cache,
    )


def marked(part: Tensor, split: Mapping[str, str]) -> Tensor:
    """The part, marked as split where the tensor-parallel plan has its module (or the parameter itself): weights along
    their rows or columns, biases only with rows."""
    module, _, last = part.name.rpartition(".")
    style = split.get(part.name) or split.get(module)
    if style is None or (last == "bias" and not style.startswith(("colwise", "packed_colwise"))):
        return part
    return Tensor(
        part.name, part.shape, part.role, part.tied_to, part.keeps_fp32, part.fp32_in_fp16, part.transposed,
        part.stored_bytes, True, part.buffer,
    )  # fmt: skip
