"""What runs of blocks need on cards of several sizes, asked many times: the planner's quick form of a cost table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gpuherd.models.plan.card import Card
from gpuherd.models.plan.result import GpuLoad, Usage
from gpuherd.models.plan.split import Need, Split, best_split, fits
from gpuherd.models.plan.workload import Reserve

# No GPU keeps so many sequences; where a model keeps nothing of a sequence the search for the largest batch ends here.
MOST_SEQUENCES = 1 << 20


class Costs(Protocol):
    """The bytes that ``blocks[first:after_last]`` take on a card; ``batch`` sequences at once, the workload's if
    None. ``usage.CostTable`` is one."""

    def usage(self, first: int, after_last: int, card: Card, batch: int | None = None) -> Usage:
        """What lies there, by what it is for."""


class Sizing:
    """Needs of one architecture, precision and number of tokens, each run of blocks asked for once.

    A need on a card is what the blocks take on any card, and what is reserved for the card's size.

    Args:
        cuts: numbers of the blocks before which a part may begin, 0 and the number of blocks with them.
        batch: sequences at once where no other number is asked for.
    """

    def __init__(self, costs: Costs, cuts: Sequence[int], batch: int, reserve: Reserve) -> None:
        self.costs = costs
        self.cuts = tuple(cuts)
        self.batch = batch
        self._blocks = self.cuts[-1]
        self._reserve = reserve
        self._ranges: dict[int, dict[int, int]] = {}
        # A card of no size: nothing is reserved for its size, so that what is left is the same on every card.
        self._no_card = Card("", "", 0, 0)
        self._fixed = reserve.context + reserve.on(0)

    def room(self, card: Card) -> int:
        """Bytes that blocks may take on this card; below 1 where nothing may."""
        return card.free - self._reserve.context - self._reserve.on(card.total)

    def blocks_bytes(self, first: int, after_last: int, batch: int | None = None) -> int:
        """What the blocks take on any card, nothing reserved."""
        many = self.batch if batch is None else batch
        known = self._ranges.setdefault(many, {})
        key = first * (self._blocks + 1) + after_last
        found = known.get(key)
        if found is None:
            found = self.costs.usage(first, after_last, self._no_card, many).total - self._fixed
            known[key] = found
        return found

    def whole(self, batch: int | None = None) -> int:
        """What the whole model takes on one card, nothing reserved."""
        return self.blocks_bytes(0, self._blocks, batch)

    def need(self, cards: Sequence[Card], batch: int | None = None) -> Need:
        """What the pieces between cuts need on each of these cards, with the reserve of those that have any."""
        reserved, cuts = [card.free - self.room(card) for card in cards], self.cuts

        def need(gpu: int, first: int, after_last: int) -> int:
            if first == after_last:
                return 0
            return self.blocks_bytes(cuts[first], cuts[after_last], batch) + reserved[gpu]

        return need

    def fits(self, cards: Sequence[Card], batch: int | None = None) -> bool:
        """Whether the blocks fit on these cards in this order."""
        return fits(len(self.cuts) - 1, [card.free for card in cards], self.need(cards, batch))

    def best(self, cards: Sequence[Card]) -> Split:
        """The best split of the pieces between cuts over these cards in this order."""
        rooms = [card.free for card in cards]
        # Parts of a model never take less together than the whole.
        return best_split(len(self.cuts) - 1, rooms, self.need(cards), at_least=self.whole() / sum(rooms))

    def loads(self, cards: Sequence[Card], split: Split) -> tuple[GpuLoad, ...]:
        """What lies on each card of the split; cards that get nothing are left out."""
        runs = [(self.cuts[first], self.cuts[after_last]) for first, after_last in split.ranges]
        return tuple(
            GpuLoad(card, *run, self.costs.usage(*run, card, self.batch))
            for card, run in zip(cards, runs, strict=True)
            if run[1] > run[0]
        )

    def largest_as_it_lies(self, loads: Sequence[GpuLoad]) -> int:
        """The most sequences at once with the blocks where they are; 0 where not even one fits."""

        def fits_there(batch: int) -> bool:
            return all(self.blocks_bytes(load.first, load.after_last, batch) <= self.room(load.card) for load in loads)

        return _largest(fits_there, self.batch)

    def largest_over(self, cards: Sequence[Card], at_least: int) -> int:
        """The most sequences at once with the best split for them over these cards, if more than ``at_least``; that
        number otherwise."""
        if at_least >= MOST_SEQUENCES or not self.fits(cards, at_least + 1):
            return at_least
        return _largest(lambda batch: self.fits(cards, batch), at_least + 1, step=1)


def _largest(possible: Callable[[int], bool], near: int, step: int | None = None) -> int:
    """The largest number for which it is possible, 0 for none; what is possible for a number is so for all below."""
    if possible(near):
        low, stride = near, step or near
        while low < MOST_SEQUENCES and possible(high := min(MOST_SEQUENCES, low + stride)):
            low, stride = high, stride * 2
        if low >= MOST_SEQUENCES:
            return low
    else:
        low, high = 0, near
    while high - low > 1:
        middle = (low + high) // 2
        if possible(middle):
            low = middle
        else:
            high = middle
    return low
