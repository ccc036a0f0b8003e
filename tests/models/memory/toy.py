"""Small made-up architectures for tests of the planner, whose bytes are easy to count in the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpuherd.models.describe.description import Architecture, Block, LayerCache, Role, Tensor
from gpuherd.models.memory.kv_cache import MIB, Reserve, Workload
from gpuherd.models.memory.usage import CostTable, Usage
from gpuherd.models.memory.weights import Precision
from gpuherd.models.place.gpus import GpuSpec

# Nothing reserved: a card holds what it has.
NOTHING = Reserve(context=0, fixed=0, share=0.0)


def _weight(name: str, mib: int, role: Role, tied_to: str | None = None, *, split: bool = False) -> Tensor:
    """``mib`` MiB in 16 bits."""
    return Tensor(f"{name}.weight", (mib, MIB // 2), role, tied_to=tied_to, split=split)


def toy(
    layers: Sequence[int] = (10, 10, 10, 10),
    *,
    embedding: int = 4,
    tied: bool = False,
    per_token: int = 0,
    heads: int = 8,
    tensor_parallel: bool = True,
) -> Architecture:
    """Layers of these MiB in 16 bits between an embedding and a head of ``embedding`` MiB; each layer keeps
    ``per_token`` numbers of a token."""

    def block(name: str, kind: Literal["embedding", "layer", "head"], *tensors: Tensor) -> Block:
        return Block(name, kind, tensors, LayerCache(per_token=per_token) if kind == "layer" else None)

    return Architecture(
        model="toy",
        model_type="toy",
        class_name=None,
        blocks=(
            block("embed", "embedding", _weight("embed", embedding, Role.EMBEDDING)),
            *(
                block(f"layers.{place}", "layer", _weight(f"layers.{place}", mib, Role.LINEAR, split=True))
                for place, mib in enumerate(layers)
            ),
            block("head", "head", _weight("head", embedding, Role.HEAD, "embed.weight" if tied else None)),
        ),
        hidden_size=1,
        intermediate_size=1,
        vocab_size=2,
        heads=heads,
        tensor_parallel=tensor_parallel,
        tensor_parallel_limit=heads if tensor_parallel else None,
        max_tokens=2048,
    )


def gpus_of(*mib: int, mig: bool = False) -> tuple[GpuSpec, ...]:
    """Cards of these MiB."""
    return tuple(GpuSpec(str(place), f"{size}MB", size * MIB, size * MIB, mig=mig) for place, size in enumerate(mib))


def usage_of(
    architecture: Architecture,
    first: int,
    after_last: int,
    precision: Precision,
    workload: Workload,
    reserve: Reserve,
    card: GpuSpec,
) -> Usage:
    """What ``blocks[first:after_last]`` take on a card."""
    return CostTable(architecture, precision, workload, reserve).usage(first, after_last, card)
