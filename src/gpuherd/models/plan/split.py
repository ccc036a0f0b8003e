"""The contiguous split of a model's blocks over GPUs in a given order that leaves the fullest GPU as empty as can be.

Exact: a cap on fullness is bisected, and for each cap every GPU in turn takes as many blocks as stay below it, which
succeeds if any split does, since a GPU's need never shrinks when it takes one more block. The bounds jump from one
fullness that really occurs to the next, so that the search ends at the optimum itself, not near it. What the cap leaves
open (GPUs that are not the fullest) is then levelled between neighbours.

Pure; knows nothing of models or bytes: GPUs have room, and ranges of blocks have a need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# need(gpu, first, after_last): what the blocks first..after_last-1 take on GPU number ``gpu``; at least 0, and never
# less for a range that contains another.
Need = Callable[[int, int, int], int]

# Levelling ends by itself after a few rounds; this only bounds it.
_MOST_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Split:
    """GPU number ``g`` takes the blocks ``cuts[g]`` .. ``cuts[g + 1] - 1``, perhaps none.

    ``fullness``: the part of its room that the fullest GPU uses, above 1 where it doesn't fit.
    """

    cuts: tuple[int, ...]
    fullness: float

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and after-last block of each GPU."""
        return tuple(zip(self.cuts, self.cuts[1:], strict=False))


def fits(blocks: int, rooms: Sequence[int], need: Need, cap: float = 1.0) -> bool:
    """Whether some split fills no GPU above ``cap`` times its room. The quickest question, without the best split."""
    start = 0
    for gpu, room in enumerate(rooms):
        start = _furthest(gpu, start, blocks, room, need, cap)
        if start == blocks:
            return True
    return False


def best_split(blocks: int, rooms: Sequence[int], need: Need) -> Split:
    """The split that minimises the fullness of the fullest GPU, the rest levelled.

    Args:
        blocks: how many there are, at least 1.
        rooms: of each GPU, in the order of the blocks, above 0 and at least one.
    """
    everything_on_one = need(0, 0, blocks) / rooms[0]
    # The optimum lies between the two; ``high`` is always the fullness of ``cuts``.
    low, high, cuts = 0.0, everything_on_one, (0, *[blocks] * len(rooms))
    while low < high:
        cap = (low + high) / 2
        if not low <= cap < high:  # neighbouring floats
            cap = low
        tried, reached, next_reached = _greedy(blocks, rooms, need, cap)
        if tried is None:
            low = next_reached
        else:
            cuts, high = tried, reached
    return _levelled(cuts, rooms, need)


def _furthest(gpu: int, start: int, blocks: int, room: int, need: Need, cap: float) -> int:
    """The largest after-last block for which this GPU, beginning at ``start``, stays within the cap."""
    low, high = start, blocks
    while low < high:
        middle = (low + high + 1) // 2
        if need(gpu, start, middle) / room <= cap:
            low = middle
        else:
            high = middle - 1
    return low


def _greedy(blocks: int, rooms: Sequence[int], need: Need, cap: float) -> tuple[tuple[int, ...] | None, float, float]:
    """The split in which each GPU takes what it can below ``cap``: its cuts (None if blocks are left over), the
    fullness that it really reaches, and the least fullness above the cap at which some GPU would take one more."""
    cuts, reached, next_reached = [0], 0.0, float("inf")
    for gpu, room in enumerate(rooms):
        start = cuts[-1]
        stop = _furthest(gpu, start, blocks, room, need, cap)
        if stop > start:
            reached = max(reached, need(gpu, start, stop) / room)
        if stop < blocks:
            next_reached = min(next_reached, need(gpu, start, stop + 1) / room)
        cuts.append(stop)
    return (tuple(cuts) if cuts[-1] == blocks else None), reached, next_reached


def _levelled(cuts: Sequence[int], rooms: Sequence[int], need: Need) -> Split:
    """The split after every two neighbours have shared their blocks as evenly as they can, again and again. No GPU
    becomes fuller than the fuller one of such a pair was, so the fullest never gets worse."""
    places = list(cuts)

    def fullness(gpu: int, first: int, after_last: int) -> float:
        return need(gpu, first, after_last) / rooms[gpu] if after_last > first else 0.0

    for _ in range(_MOST_ROUNDS):
        changed = False
        for gpu in range(len(rooms) - 1):
            begin, cut, end = places[gpu : gpu + 3]
            if begin == end:
                continue
            # The left one gets fuller and the right one emptier with every block: they cross once.
            low, high = begin, end
            while low < high:
                middle = (low + high) // 2
                if fullness(gpu, begin, middle) >= fullness(gpu + 1, middle, end):
                    high = middle
                else:
                    low = middle + 1

            def pair(place: int, gpu: int = gpu, begin: int = begin, end: int = end) -> tuple[float, float]:
                two = fullness(gpu, begin, place), fullness(gpu + 1, place, end)
                return max(two), min(two)

            # Of two that are as good the left one, so that a GPU with nothing comes to lie where it is of use.
            better = min((pair(place), place) for place in (low - 1, low) if begin <= place <= end)
            if better < (pair(cut), cut):
                places[gpu + 1], changed = better[1], True
        if not changed:
            break
    fullest = max(fullness(gpu, places[gpu], places[gpu + 1]) for gpu in range(len(rooms)))
    return Split(tuple(places), fullest)
