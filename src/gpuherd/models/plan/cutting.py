"""Where a model may be cut into parts for several GPUs, and in which order its blocks are best laid out. Pure.

A head that is tied to the embedding needs no memory of its own on the embedding's GPU and a copy on any other. Where
the head lies there, the last GPU sends its hidden states to the first, which are small: a row a sequence.
"""

from __future__ import annotations

from dataclasses import replace

from gpuherd.models.plan.architecture import Architecture

# A head is among them only where its ties have brought it to the embedding.
_FIRST = frozenset(("embedding", "head"))


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


def cuts_allowed(architecture: Architecture) -> tuple[int, ...]:
    """Numbers of the blocks before which a part may begin, 0 and the number of blocks with them.

    What makes the first hidden states stays together: some models add embeddings of tokens and of positions without
    a thought of where each lies.
    """
    kinds = [block.kind for block in architecture.blocks]
    inside = [place for place in range(1, len(kinds)) if _FIRST.issuperset(kinds[place - 1 : place + 1])]
    return tuple(place for place in range(len(kinds) + 1) if place not in inside)
