"""A model as training plans count it: equal blocks once, with how often they occur, so that a plan of 126 layers takes
as long as one of two. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpuherd.models.plan.architecture import Architecture, Block, Tensor


@dataclass(frozen=True, slots=True)
class TrainingModel:
    """An architecture, and its distinct blocks in their order, each with the number of blocks like it."""

    architecture: Architecture
    blocks: tuple[tuple[Block, int], ...]

    def tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Tensors that have a storage of their own (tied ones once), each with the number of tensors like it."""
        for block, times in self.blocks:
            for tensor in block.tensors:
                if tensor.tied_to is None:
                    yield tensor, times

    def layers(self) -> list[tuple[Block, int]]:
        """Those blocks that are layers."""
        return [(block, times) for block, times in self.blocks if block.kind == "layer"]

    def around(self) -> list[Block]:
        """Those that are not."""
        return [block for block, times in self.blocks if block.kind != "layer" for _ in range(times)]

    def first_layer(self) -> Block:
        """The first layer; of a model without layers its first block."""
        return next((block for block, _ in self.layers()), self.blocks[0][0])

    def with_tensors(self, more: Callable[[Block], tuple[Tensor, ...]]) -> TrainingModel:
        """The same with further tensors in each block."""
        blocks = tuple(
            (Block(block.name, block.kind, (*block.tensors, *more(block)), block.cache), times)
            for block, times in self.blocks
        )
        return TrainingModel(self.architecture, blocks)


def training_model(architecture: Architecture) -> TrainingModel:
    """The model of an architecture. Blocks are equal if their tensors are, by name within the block, and their cache.

    >>> from gpuherd.models.plan.architecture import Role
    >>> layers = [Block(f"h.{n}", "layer", (Tensor(f"h.{n}.w", (4, 4), Role.LINEAR),)) for n in range(3)]
    >>> model = training_model(Architecture("m", "t", None, tuple(layers), 4, 4, 9, 1))
    >>> [(block.name, times) for block, times in model.blocks]
    [('h.0', 3)]
    """
    found: dict[object, tuple[Block, int]] = {}
    for number, block in enumerate(architecture.blocks):
        key: object = number
        if block.kind == "layer" and all(tensor.tied_to is None for tensor in block.tensors):
            skip = len(block.name)
            inside = tuple(
                (
                    tensor.name[skip:],
                    tensor.shape,
                    tensor.role,
                    tensor.keeps_fp32,
                    tensor.fp32_in_fp16,
                    tensor.transposed,
                )
                for tensor in block.tensors
            )
            key = (inside, block.cache, tuple(tensor.stored_bytes for tensor in block.tensors))
        first, times = found.get(key, (block, 0))
        found[key] = (first, times + 1)
    return TrainingModel(architecture, tuple(found.values()))
