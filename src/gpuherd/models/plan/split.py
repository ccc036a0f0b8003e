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
# How far above the lower bound the first cap is tried, as a share of it; and where that bound is 0.
_FIRST_STEP = 0.03
_SMALLEST = 1e-3


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
        start = _furthest(gpu, start, blocks, room, need, cap, start + -(-blocks // len(rooms)))
        if start == blocks:
            return True
    return False


def best_split(blocks: int, rooms: Sequence[int], need: Need, at_least: float = 0.0) -> Split:
    """The split that minimises the fullness of the fullest GPU, the rest levelled.

    Args:
        blocks: how many there are, at least 1.
        rooms: of each GPU, in the order of the blocks, above 0 and at least one.
        at_least: a fullness that no split goes below, where the caller knows one: saves time, changes nothing.
    """
    low, high, cuts = at_least, float("inf"), None
    step = _FIRST_STEP
    # The optimum lies between the two; ``high`` is always the fullness of ``cuts``.
    while low < high:
        cap = (low + high) / 2 if cuts is not None else low * (1 + step) + step * _SMALLEST
        if not low <= cap < high:  # neighbouring floats
            cap = low
        tried, reached, next_reached = _greedy(blocks, rooms, need, cap, cuts)
        if tried is None:
            low, step = next_reached, 4 * step
        else:
            cuts, high = tried, reached
    assert cuts is not None  # noqa: S101 - at an infinite cap all fits on the first
    return _levelled(cuts, rooms, need)


def _furthest(gpu: int, start: int, blocks: int, room: int, need: Need, cap: float, guess: int) -> int:
    """The largest after-last block for which this GPU, beginning at ``start``, stays within the cap; looked for
    outwards from a guess."""

    def stays(stop: int) -> bool:
        return need(gpu, start, stop) / room <= cap

    low, high = start, blocks + 1  # the last that is known to stay within, the first that is known not to
    step, probe = 1, min(max(guess, start + 1), blocks)
    while low < probe < high:
        if stays(probe):
            low = probe
            probe = low + step if high > blocks else (low + high) // 2
        else:
            high = probe
            probe = high - step if low == start else (low + high) // 2
        step *= 2
        probe = min(max(probe, low + 1), high - 1)
    return low


def _greedy(
    blocks: int, rooms: Sequence[int], need: Need, cap: float, like: Sequence[int] | None = None
) -> tuple[tuple[int, ...] | None, float, float]:
    """The split in which each GPU takes what it can below ``cap``: its cuts (None if blocks are left over), the
    fullness that it really reaches, and the least fullness above the cap at which some GPU would take one more.

    ``like``: cuts that are probably near."""
    cuts, reached, next_reached = [0], 0.0, float("inf")
    for gpu, room in enumerate(rooms):
        start = cuts[-1]
        guess = start + -(-blocks // len(rooms)) if like is None else start + like[gpu + 1] - like[gpu]
        stop = _furthest(gpu, start, blocks, room, need, cap, guess)
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

    def pair(gpu: int, begin: int, cut: int, end: int) -> tuple[float, float, int]:
        """The fuller, then the emptier of two neighbours; of cuts that are as good the left one comes first, so that a
        GPU with nothing comes to lie where it is of use."""
        two = fullness(gpu, begin, cut), fullness(gpu + 1, cut, end)
        return max(two), min(two), cut

    for _ in range(_MOST_ROUNDS):
        changed = False
        for gpu in range(len(rooms) - 1):
            begin, cut, end = places[gpu : gpu + 3]
            now = pair(gpu, begin, cut, end)
            near = [place for place in (cut - 1, cut + 1) if begin <= place <= end]
            if all(now < pair(gpu, begin, place, end) for place in near):
                continue
            # The left one gets fuller and the right one emptier with every block: they cross once.
            low, high = begin, end
            while low < high:
                middle = (low + high) // 2
                if fullness(gpu, begin, middle) >= fullness(gpu + 1, middle, end):
                    high = middle
                else:
                    low = middle + 1
            better = min(pair(gpu, begin, place, end) for place in (low - 1, low) if begin <= place <= end)
            if better < now:
                places[gpu + 1], changed = better[2], True
        if not changed:
            break
    fullest = max(fullness(gpu, places[gpu], places[gpu + 1]) for gpu in range(len(rooms)))
    return Split(tuple(places), fullest)
