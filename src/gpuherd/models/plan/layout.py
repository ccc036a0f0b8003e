"""How a family's modules follow each other, and the blocks that come of it. Pure.

A family is a ``Layout``: plain data, and functions of a config that give the parts of its layers. Which families there
are is ``families``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpuherd.models.plan.architecture import Block, LayerCache, Role, Tensor
from gpuherd.models.plan.fields import Fields
from gpuherd.models.plan.parts import LayerKind, LayerParts, Parts, layer_types, norm, plain_cache, table

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
