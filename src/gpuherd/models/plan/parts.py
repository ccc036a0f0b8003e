"""The pieces that layers are made of: each a name, a shape and a role, as functions of a config. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gpuherd.models.plan.architecture import LayerCache, Role, Tensor
from gpuherd.models.plan.fields import Fields

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
