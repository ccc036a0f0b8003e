"""Blocks that share a storage, brought side by side. Pure.

A head that is tied to the embedding needs no memory of its own on the embedding's GPU and a copy on any other. The
last GPU then sends its hidden states to the first, which are small: a row a sequence.
"""

from __future__ import annotations

from dataclasses import replace

from gpuherd.models.plan.architecture import Architecture


def ties_together(architecture: Architecture) -> Architecture | None:
    """The architecture with each block that has nothing but tied tensors right behind the block that has them; None
    where there is no such block, or it lies there already.

    Blocks are no longer in the order of computation: only for laying them out.
    """
    blocks = architecture.blocks
    home = {tensor.name: number for number, block in enumerate(blocks) for tensor in block.tensors}
    order: list[tuple[int, int]] = []
    for number, block in enumerate(blocks):
        homes = {home.get(tensor.tied_to or "", number) for tensor in block.tensors}
        moves = len(homes) == 1 and min(homes) < number
        order.append((homes.pop(), number) if moves else (number, number))
    numbers = [number for _, number in sorted(order)]
    if numbers == list(range(len(blocks))):
        return None
    return replace(architecture, blocks=tuple(blocks[number] for number in numbers))
