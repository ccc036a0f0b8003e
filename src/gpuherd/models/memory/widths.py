"""How wide a block is at each of its steps, read off the shapes of its tensors. Pure.

The names are those that transformers' families use; a block that has none of them gets the widths of its config.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuherd.models.describe.description import Architecture, Block, Role, Tensor

_QUERY = frozenset({"q_proj", "q_b_proj", "wq", "q", "query"})
_FUSED = frozenset({"qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv"})
_GATE = frozenset({"gate_proj", "wi_1", "w3", "v_proj_mlp"})
_INTO = frozenset({"gate_proj", "up_proj", "fc1", "c_fc", "dense_h_to_4h", "fc_in", "wi", "wi_0", "wi_1", "w1", "w3"})


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers for one token at the steps of a layer.

    Attributes:
        query, keys: of queries of all heads, and of keys (as many values) as they are cached.
        latent: of the keys and values that a compressed cache is expanded to (MLA); 0 without.
        inner: of the MLP's middle; 0 where experts are all it has.
        gated, fused: whether the MLP has a gate, and whether gate and middle come out of one matrix.
        expert_inner: of the middle of all experts of a token together; 0 without experts.
        experts, choices: how many experts a token goes to, of how many.
        query_norm: queries and keys are normalised.
        largest: numbers of the largest quantisable matrix.
    """

    query: int
    keys: int
    latent: int
    inner: int
    gated: bool
    fused: bool
    expert_inner: int
    experts: int
    choices: int
    query_norm: bool
    largest: int


def widths_of(block: Block, architecture: Architecture, ways: int = 1) -> Widths:
    """The widths of one layer, on one of ``ways`` GPUs that its divided tensors are divided over.

    A matrix of several parts in one (queries with keys and values, gate with middle) gives all of its outputs on every
    GPU, because transformers gathers them before it takes them apart.
    """
    matrices = {_leaf(tensor): tensor for tensor in block.tensors if len(tensor.shape) == 2}
    leaves = {_leaf(tensor) for tensor in block.tensors}
    hidden = architecture.hidden_size
    # Where nothing is kept (encoders) there are as many keys as queries.
    keys = block.cache.per_token // 2 if block.cache is not None else _query(matrices, hidden, hidden)
    latent = _rows(matrices["kv_b_proj"]) if "kv_b_proj" in matrices else 0
    inner, fused = _inner(matrices)
    choices, of_one = _experts(block.tensors, hidden)
    experts = max(1, round((architecture.intermediate_size - inner) / of_one)) if of_one else 0
    if not inner and not of_one:
        inner = architecture.intermediate_size
    in_heads = ways if divides_heads(block) else 1
    in_middle = ways if not fused and any(each.split for leaf, each in matrices.items() if leaf in _INTO) else 1
    in_experts = ways if any(tensor.split for tensor in block.tensors if len(tensor.shape) == 3) else 1
    return Widths(
        query=-(-_query(matrices, keys, hidden) // in_heads),
        keys=-(-keys // in_heads),
        latent=-(-latent // in_heads),
        inner=-(-inner // in_middle),
        gated=bool(_GATE & leaves) or fused or inner == 0 or not (_INTO & leaves),
        fused=fused,
        expert_inner=-(-experts * of_one // in_experts),
        experts=experts,
        choices=choices,
        query_norm="q_norm" in leaves,
        largest=max((_part(tensor, ways) for tensor in matrices.values() if tensor.role is Role.LINEAR), default=0),
    )


def divides_heads(block: Block) -> bool:
    """Whether each GPU of a tensor-parallel group has a part of the heads, and keeps keys and values of those alone."""
    return any(tensor.split and _leaf(tensor) in _QUERY for tensor in block.tensors)


def _part(tensor: Tensor, ways: int) -> int:
    return -(-tensor.numel // ways) if tensor.split else tensor.numel


def _leaf(tensor: Tensor) -> str:
    """The module's own name: ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    parts = tensor.name.rsplit(".", 2)
    return parts[-2] if len(parts) > 1 else tensor.name


def _rows(tensor: Tensor) -> int:
    return tensor.shape[-1 if tensor.transposed else 0]


def _query(matrices: dict[str, Tensor], keys: int, hidden: int) -> int:
    for leaf, tensor in matrices.items():
        if leaf in _QUERY:
            return _rows(tensor)
    for leaf, tensor in matrices.items():
        if leaf in _FUSED:
            return max(_rows(tensor) - 2 * keys, hidden)
    return hidden


def _inner(matrices: dict[str, Tensor]) -> tuple[int, bool]:
    """The width of the MLP's middle, and whether its gate comes out of the same matrix."""
    if "gate_up_proj" in matrices:
        return _rows(matrices["gate_up_proj"]) // 2, True
    return max((_rows(tensor) for leaf, tensor in matrices.items() if leaf in _INTO), default=0), False


def _experts(tensors: Iterable[Tensor], hidden: int) -> tuple[int, int]:
    """How many experts there are and the width of one's middle; zeros without experts fused into one parameter."""
    for tensor in tensors:
        if len(tensor.shape) == 3 and tensor.name.endswith("gate_up_proj"):
            return tensor.shape[0], tensor.shape[1] * tensor.shape[2] // hidden // 2
    return 0, 0
