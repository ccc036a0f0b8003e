"""How a family's modules follow each other, and the blocks that come of it. Pure.

A family is a ``Layout``: plain data, and functions of a config that give the parts of its layers. Which families there
are is ``families``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from gpuherd.models.plan.architecture import Block, LayerCache, Role, Tensor
from gpuherd.models.plan.fields import Fields
from gpuherd.models.plan.parts import LayerParts, Part, Parts, layer_types, norm, plain_cache, table

Kind = Literal["embedding", "layer", "norm", "head", "other"]
# A module's path below the family's root, and its parts.
Module = tuple[str, Parts]


def one_table(c: Fields) -> Iterator[Module]:
    """An embedding of tokens, and the module that turns positions."""
    yield "embed_tokens", table("", c.vocabulary, c.hidden)
    yield "rotary_emb", iter(())


def final_norm(c: Fields) -> Iterator[Module]:
    """A norm without biases."""
    yield "norm", norm("", c.hidden)


def by_layer_types(c: Fields) -> list[LayerCache | None]:
    """Keys and values of each layer, as ``layer_types`` says."""
    return [plain_cache(c, kind) for kind in layer_types(c)]


def widest_gated(c: Fields) -> int:
    """``intermediate_size``."""
    return c.size("intermediate_size")


@dataclass(frozen=True, slots=True)
class Layout:
    """A family of decoders.

    Attributes:
        layer: the parts of one layer.
        root: path of the module that has the layers.
        before, after: the modules before the first layer and after the last, in the order of computation.
        layers: name of the list of layers.
        caches: what each layer keeps.
        widest: the widest that a token goes through at once.
        head: path of the output head; None where the family has none.
        head_bias: whether the head has a bias.
        embedding: which of the tensors the head is tied to.
        fp16_keeps: last parts of module names that transformers leaves in float32 when it loads in float16.
        keeps_fp32: the same, whatever the precision.
    """

    layer: LayerParts
    root: str = "model"
    before: Callable[[Fields], Iterator[Module]] = one_table
    after: Callable[[Fields], Iterator[Module]] = final_norm
    layers: str = "layers"
    caches: Callable[[Fields], list[LayerCache | None]] = by_layer_types
    widest: Callable[[Fields], int] = widest_gated
    head: str | None = "lm_head"
    head_bias: Callable[[Fields], bool] = lambda _: False
    embedding: str = "embed_tokens.weight"

    def blocks(self, c: Fields) -> tuple[Block, ...]:
        """All blocks of the model, in the order of computation."""
        return (*self.body(c), *self.output(c))

    def body(self, c: Fields) -> Iterator[Block]:
        """The blocks below the root."""
        for name, parts in self.before(c):
            yield block(f"{self.root}.{name}", "embedding", parts)
        for number, cache in zip(range(c.layers), self.caches(c), strict=True):
            yield block(f"{self.root}.{self.layers}.{number}", "layer", self.layer(c, number), cache)
        for name, parts in self.after(c):
            yield block(f"{self.root}.{name}", "norm", parts)

    def output(self, c: Fields) -> Iterator[Block]:
        """The output head."""
        if self.head is None:
            return
        tied = f"{self.root}.{self.embedding}" if c.tied else None
        tensors = [Tensor(f"{self.head}.weight", (c.vocabulary, self.head_width(c)), Role.HEAD, tied)]
        if self.head_bias(c):
            tensors.append(Tensor(f"{self.head}.bias", (c.vocabulary,)))
        yield Block(self.head, "head", tuple(tensors))

    def head_width(self, c: Fields) -> int:
        """Inputs of the head."""
        return c.hidden


def block(name: str, kind: Kind, parts: Iterable[Part], cache: LayerCache | None = None) -> Block:
    """A block of a module's parts; a part's name may be empty up to its dot (a module that is the block itself)."""
    return Block(name, kind, tuple(Tensor(f"{name}{_joined(part)}", shape, role) for part, shape, role in parts), cache)


def _joined(part: str) -> str:
    return part if part.startswith(".") else f".{part}"
