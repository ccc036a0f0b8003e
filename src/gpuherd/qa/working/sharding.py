"""Which job has which items, in which batches. Pure: the same items always give the same shards.

An item is its place in a list of questions, prompts or pairs; what it is, nobody here knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuherd.errors import UsageError

# A job loads a model first: one with fewer items than this is mostly that.
LEAST_ITEMS = 8

Batches = Callable[[Sequence[int]], Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Shard:
    """A job's items, in batches. They are worked on, and written, in this order; a batch is written whole."""

    batches: tuple[tuple[int, ...], ...]

    @property
    def items(self) -> tuple[int, ...]:
        """All of them, in the order in which they are written."""
        return tuple(item for batch in self.batches for item in batch)


def in_batches(items: int, size: int) -> Shard:
    """One job's items in their order, so many in a batch.

    >>> in_batches(5, 2).batches
    ((0, 1), (2, 3), (4,))
    """
    return Shard(tuple(tuple(range(at, min(at + size, items))) for at in range(0, items, size)))


def number_of_shards(items: int, at_once: int, wanted: int | None = None) -> int:
    """How many jobs the items are divided among: as many as can run at once, but none with less than a few items.

    Args:
        at_once: how many jobs can run side by side.
        wanted: so many, where a person has said it; at most one an item.

    >>> [number_of_shards(items, at_once=4) for items in (0, 7, 16, 31, 400)]
    [1, 1, 2, 3, 4]
    >>> number_of_shards(3, at_once=4, wanted=5)
    3
    """
    if items < 0 or at_once < 1 or (wanted is not None and wanted < 1):
        raise UsageError(f"{items} items for {at_once} jobs at once, {wanted} wanted: there must be at least 1 job")
    if wanted is not None:
        return max(1, min(wanted, items))
    return max(1, min(at_once, items // LEAST_ITEMS))


def plan_shards(lengths: Sequence[int], shards: int, batches: Batches) -> tuple[Shard, ...]:
    """Divides items among shards, so that each has as much to do.

    Args:
        lengths: what each item costs, in tokens, say.
        shards: among how many.
        batches: makes batches of the lengths of a shard's items: places among them, each place once.

    Sorted by length, the longest first, the items are dealt to and fro (1 2 3 3 2 1 1 2 ...): shards differ by one
    item at most, and by little in length.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    dealt: list[list[int]] = [[] for _ in range(shards)]
    for place, item in enumerate(order):
        turn, seat = divmod(place, shards)
        dealt[seat if turn % 2 == 0 else shards - 1 - seat].append(item)
    return tuple(_in_batches(sorted(items), lengths, batches) for items in dealt)


def _in_batches(items: Sequence[int], lengths: Sequence[int], batches: Batches) -> Shard:
    found = tuple(tuple(items[place] for place in batch) for batch in batches([lengths[item] for item in items]))
    if sorted(item for batch in found for item in batch) != list(items):
        raise ValueError("batches are to have each item once")
    return Shard(found)
