"""Bytes and runs of blocks as people read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.workload import GIB


def gib(size: int) -> str:
    """Bytes in GiB with one decimal; in MiB where that would be 0.0.

    >>> gib(141_107_412_992), gib(3 << 20), gib(-(3 << 29))
    ('131.4 GiB', '3 MiB', '-1.5 GiB')
    """
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB // 10 else f"{size / (1 << 20):.0f} MiB"


def blocks_in_words(architecture: Architecture, first: int, after_last: int) -> str:
    """What lies in ``blocks[first:after_last]``: ``embedding, layers 0-18``; ``layers 61-79, norm, head``.

    Layers are numbered from 0 in the order of computation.
    """
    before = sum(block.kind == "layer" for block in architecture.blocks[:first])
    parts: list[str] = []
    for kind, group in groupby(architecture.blocks[first:after_last], key=lambda block: block.kind):
        blocks = list(group)
        if kind != "layer":
            told = kind if kind != "other" else ", ".join(block.name for block in blocks)
            if told not in parts:
                parts.append(told)
            continue
        last = before + len(blocks) - 1
        parts.append(f"layer {before}" if len(blocks) == 1 else f"layers {before}-{last}")
        before = last + 1
    return ", ".join(parts) or "nothing"


def cards_in_words(cards: Sequence[Card]) -> str:
    """How many GPUs of how much memory that may be used: ``4 GPUs of 40.0 GiB``, ``2 GPUs of 22.1 to 40.0 GiB``."""
    least, most = min(card.free for card in cards), max(card.free for card in cards)
    sizes = gib(most) if gib(least) == gib(most) else f"{gib(least).removesuffix(' GiB')} to {gib(most)}"
    return f"{len(cards)} GPU{'' if len(cards) == 1 else 's'} of {sizes}"
