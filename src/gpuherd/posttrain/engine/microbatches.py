"""How a process's items are cut into micro-batches, and how large those are where memory runs out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

_CALM = 20  # steps without trouble before the first growth


def cuts(items: Sequence[T], pieces: int) -> list[Sequence[T]]:
    """The items in so many pieces whose lengths differ by one at most, in order; those at the end may be empty.

    >>> [list(piece) for piece in cuts("abcde", 3)]
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    base, longer = divmod(len(items), max(1, pieces))
    ends = [0]
    for number in range(pieces):
        ends.append(ends[-1] + base + (number < longer))
    return [items[begin:end] for begin, end in pairwise(ends)]


def pieces_needed(count: int, size: int) -> int:
    """How many micro-batches of at most ``size`` so many items take."""
    return -(-count // size)


@dataclass(frozen=True, slots=True)
class Pass(Generic[T]):
    """One forward and backward pass.

    Attributes:
        items: at least one.
        counts: False where the pass is there for the other processes' sake: its loss is multiplied by 0.
        last: gradients are summed over the processes in it (DDP).
    """

    items: Sequence[T]
    counts: bool
    last: bool


def passes(items: Sequence[T], size: int, most: int, spare: T | None, *, together: bool) -> list[Pass[T]]:
    """The passes of one process in one step.

    Args:
        size: items at once at most.
        most: passes of the process that needs most, if all were to do as many.
        spare: an item for passes that don't count; None in a world of one process.
        together: all processes do equally many passes (FSDP needs it; DDP as long as none changes its size on its own).
            Otherwise each does its own, and one more that doesn't count, in which gradients are summed.
    """
    if spare is None:
        return [Pass(piece, True, False) for piece in cuts(items, pieces_needed(len(items), size))]
    if together:
        real = cuts(items, most)
        return [Pass(piece or [spare], bool(piece), number + 1 == most) for number, piece in enumerate(real)]
    own = [Pass(piece, True, False) for piece in cuts(items, pieces_needed(len(items), size))]
    return [*own, Pass([spare], False, True)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The size of micro-batches where it follows the memory.

    Attributes:
        most: as asked for.
        size: now.
        calm: steps since it last changed.
        patience: so many calm steps before it grows; doubled whenever it had grown too far, so that a size that never
            fits is tried ever more seldom.
        grown: its last change was a growth.
        halvings: how often memory ran out.
    """

    most: int
    size: int
    calm: int = 0
    patience: int = _CALM
    grown: bool = False
    halvings: int = 0

    @classmethod
    def of(cls, most: int) -> MicroBatch:
        """As asked for."""
        return cls(most, most)

    def halved(self, items: int) -> MicroBatch | None:
        """After memory has run out with so many items at once at most; None where one item was too much."""
        tried = min(self.size, items)
        if tried <= 1:
            return None
        patience = 2 * self.patience if self.grown else self.patience
        return replace(self, size=tried // 2, calm=0, patience=patience, grown=False, halvings=self.halvings + 1)

    def after_step(self) -> MicroBatch:
        """After a step that went well: perhaps doubled again."""
        if self.size == self.most:
            return self
        if self.calm + 1 < self.patience:
            return replace(self, calm=self.calm + 1)
        return replace(self, size=min(self.most, 2 * self.size), calm=0, grown=True)
