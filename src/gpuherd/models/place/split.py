"""The contiguous split of a model's blocks over GPUs in a given order that leaves the fullest GPU as empty as can be.

Exact: a cap on fullness is bisected, and for each cap every GPU in turn takes as many blocks as stay below it, which
succeeds if any split does, since a GPU's need never shrinks when it takes one more block. The bounds jump from one
fullness that really occurs to the next, so that the search ends at the optimum itself, not near it. What the cap leaves
open (GPUs that are not the fullest) is then levelled between neighbours.

``best_split`` and ``fits`` know nothing of models or bytes: GPUs have room, and ranges of blocks have a need.
``BlockSizes`` asks them for the blocks of a model on given GPUs. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpuherd.models.describe.description import Architecture
from gpuherd.models.memory.kv_cache import Reserve
from gpuherd.models.memory.usage import Usage
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.result import GpuLoad

# need(gpu, first, after_last): what the blocks first..after_last-1 take on GPU number ``gpu``; at least 0, and never
# less for a range that contains another.
Need = Callable[[int, int, int], int]

# Levelling ends by itself after a few rounds; this only bounds it.
_MOST_ROUNDS = 40
# How far above the lower bound the first cap is tried, as a share of it; and where that bound is 0.
_FIRST_STEP = 0.03
_SMALLEST = 1e-3


@dataclass(frozen=True, slots=True)
class LayerSplit:
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


def best_split(blocks: int, rooms: Sequence[int], need: Need, at_least: float = 0.0) -> LayerSplit:
    """The split that minimises the fullness of the fullest GPU, the rest levelled.

    Args:
        blocks: how many there are, at least 1.
        rooms: of each GPU, in the order of the blocks, above 0 and at least one.
        at_least: a fullness that no split goes below, where the caller knows one: saves time, changes nothing.
    """
    low, high, cuts = at_least, float("inf"), None
    step = _FIRST_STEP
    # The optimum is between the two; ``high`` is always the fullness of ``cuts``.
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


def _levelled(cuts: Sequence[int], rooms: Sequence[int], need: Need) -> LayerSplit:
    """The split after every two neighbours have shared their blocks as evenly as they can, again and again. No GPU
    becomes fuller than the fuller one of such a pair was, so the fullest never gets worse."""
    places = list(cuts)

    def fullness(gpu: int, first: int, after_last: int) -> float:
        return need(gpu, first, after_last) / rooms[gpu] if after_last > first else 0.0

    def pair(gpu: int, begin: int, cut: int, end: int) -> tuple[float, float, int]:
        """The fuller, then the emptier of two neighbours; of cuts that are as good the left one comes first, so that a
        GPU with nothing gets to where it is of use."""
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
    return LayerSplit(tuple(places), fullest)


# ---- where a model may be cut into parts, and in which order its blocks are best laid out ----------------------------
#
# A head that is tied to the embedding needs no memory of its own on the embedding's GPU and a copy on any other.
# Where the head is there, the last GPU sends its hidden states to the first, which are small: a row a sequence.

# A head is among them only where its ties have brought it to the embedding.
_FIRST = frozenset(("embedding", "head"))


def ties_together(architecture: Architecture) -> Architecture | None:
    """The architecture with each block that has nothing but tied tensors right behind the block that has them; None
    where there is no such block, or it is there already.

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
    regard to the device of each.
    """
    kinds = [block.kind for block in architecture.blocks]
    inside = [place for place in range(1, len(kinds)) if _FIRST.issuperset(kinds[place - 1 : place + 1])]
    return tuple(place for place in range(len(kinds) + 1) if place not in inside)


# ---- sizes of runs of blocks, asked for many times: the planner's quick form of a cost table -------------------------

# No GPU keeps so many sequences; where a model keeps nothing of a sequence the search for the largest batch ends here.
MOST_SEQUENCES = 1 << 20


class Costs(Protocol):
    """The bytes that ``blocks[first:after_last]`` take on a GPU; ``batch`` sequences at once, the workload's if
    None. ``usage.CostTable`` is one."""

    def usage(self, first: int, after_last: int, gpu: GpuSpec, /, batch: int | None = None) -> Usage:
        """Bytes on a GPU, by their purpose."""


class BlockSizes:
    """Sizes of runs of blocks, of one architecture, precision and number of tokens; each is computed once.

    A size on a GPU is what the blocks take on any GPU, and what is reserved for the GPU's memory.

    Args:
        cuts: numbers of the blocks before which a part may begin, 0 and the number of blocks with them.
        batch: sequences at once where no other number is given.
    """

    def __init__(self, costs: Costs, cuts: Sequence[int], batch: int, reserve: Reserve) -> None:
        self.costs = costs
        self.cuts = tuple(cuts)
        self.batch = batch
        self._blocks = self.cuts[-1]
        self._reserve = reserve
        self._ranges: dict[int, dict[int, int]] = {}
        # A GPU of no memory: nothing is reserved for its size, so that what is left is the same on every GPU.
        self._no_gpu = GpuSpec("", "", 0, 0)
        self._fixed = reserve.context + reserve.on(0)

    def available(self, gpu: GpuSpec) -> int:
        """Bytes that blocks may take on this GPU."""
        return gpu.available(self._reserve)

    def of_blocks(self, first: int, after_last: int, batch: int | None = None) -> int:
        """What the blocks take on any GPU, nothing reserved."""
        many = self.batch if batch is None else batch
        known = self._ranges.setdefault(many, {})
        key = first * (self._blocks + 1) + after_last
        found = known.get(key)
        if found is None:
            found = self.costs.usage(first, after_last, self._no_gpu, many).total - self._fixed
            known[key] = found
        return found

    def on_one_gpu(self) -> int:
        """What the whole model takes on one GPU, nothing reserved."""
        return self.of_blocks(0, self._blocks)

    def need(self, gpus: Sequence[GpuSpec], batch: int | None = None) -> Need:
        """What the pieces between cuts need on each of these GPUs, with the reserve of those that have any."""
        reserved, cuts = [gpu.free - self.available(gpu) for gpu in gpus], self.cuts

        def need(gpu: int, first: int, after_last: int) -> int:
            if first == after_last:
                return 0
            return self.of_blocks(cuts[first], cuts[after_last], batch) + reserved[gpu]

        return need

    def fits(self, gpus: Sequence[GpuSpec], batch: int | None = None) -> bool:
        """Whether the blocks fit on these GPUs in this order."""
        return fits(len(self.cuts) - 1, [gpu.free for gpu in gpus], self.need(gpus, batch))

    def best(self, gpus: Sequence[GpuSpec]) -> LayerSplit:
        """The best split of the pieces between cuts over these GPUs in this order."""
        rooms = [gpu.free for gpu in gpus]
        # Parts of a model never take less together than the whole.
        return best_split(len(self.cuts) - 1, rooms, self.need(gpus), at_least=self.on_one_gpu() / sum(rooms))

    def load(self, gpu: GpuSpec, first: int, after_last: int) -> GpuLoad[Usage]:
        """What these blocks take on this GPU."""
        return GpuLoad(gpu, self.costs.usage(first, after_last, gpu, batch=self.batch), first, after_last)

    def loads(self, gpus: Sequence[GpuSpec], split: LayerSplit) -> tuple[GpuLoad[Usage], ...]:
        """The blocks on each GPU of the split; GPUs that get nothing are left out."""
        runs = [(self.cuts[first], self.cuts[after_last]) for first, after_last in split.ranges]
        return tuple(self.load(gpu, *run) for gpu, run in zip(gpus, runs, strict=True) if run[1] > run[0])

    def fit_batch_size(self, loads: Sequence[GpuLoad[Usage]]) -> int:
        """The most sequences at once with the blocks where they are; 0 where not even one fits."""

        def fits_there(batch: int) -> bool:
            return all(self.of_blocks(load.first, load.after_last, batch) <= self.available(load.gpu) for load in loads)

        return fit_batch_size(fits_there, self.batch)

    def fit_batch_size_over(self, gpus: Sequence[GpuSpec], at_least: int) -> int:
        """The most sequences at once with the best split for them over these GPUs, if more than ``at_least``; that
        number otherwise."""
        if at_least >= MOST_SEQUENCES or not self.fits(gpus, at_least + 1):
            return at_least
        return fit_batch_size(lambda batch: self.fits(gpus, batch), at_least + 1, step=1)


def fit_batch_size(possible: Callable[[int], bool], near: int = 1, step: int | None = None) -> int:
    """The largest number of sequences for which it is possible, 0 for none and ``MOST_SEQUENCES`` for any; what is
    possible for a number is possible for all below. ``near``: where the search begins; its first step is ``step``."""
    if not possible(near):
        return largest(possible, 0, near - 1)
    low, stride = near, step or near
    while low < MOST_SEQUENCES:
        high = min(MOST_SEQUENCES, low + stride)
        if not possible(high):
            return largest(possible, low, high - 1)
        low, stride = high, stride * 2
    return low


def largest(possible: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from ``low`` to ``high`` for which it is possible, by bisection; ``low`` is not tried."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda number: not possible(number))
