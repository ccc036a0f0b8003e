"""Which cards a training takes, and the largest batch on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpuherd.models.plan.card import Card
from gpuherd.models.plan.training_job import Strategy
from gpuherd.models.plan.training_result import TrainingLoad
from gpuherd.models.plan.training_task import TrainingTask
from gpuherd.models.plan.training_usage import Step
from gpuherd.models.plan.workload import Reserve

_MOST = 1 << 20  # sequences: nobody asks for more


@dataclass(frozen=True, slots=True)
class Placement:
    """A training on cards, whether it fits there or not."""

    step: Step
    loads: tuple[TrainingLoad, ...]

    @property
    def cards(self) -> tuple[Card, ...]:
        """Those that it uses."""
        return tuple(load.card for load in self.loads)

    @property
    def missing(self) -> int:
        """Bytes that the fullest GPU has too little; 0 or less where it fits."""
        return max(-load.left for load in self.loads)


def place(task: TrainingTask, cards: Sequence[Card], reserve: Reserve, *, gpus: int | None = None) -> Placement:
    """The best placement: one that fits if there is any, else the one that misses least."""
    roomiest = _roomiest(cards, reserve)
    tried: list[Placement] = []
    for alike in [(gpus,)] if gpus is not None else _numbers(task, roomiest, reserve):
        tried.append(_on(task, _first(roomiest, alike[-1]), reserve))
        if tried[-1].missing > 0:
            continue
        low, high, best = alike[0], alike[-1], tried[-1]
        while low < high:  # of cards that are alike more hold less each
            middle = (low + high) // 2
            found = _on(task, _first(roomiest, middle), reserve)
            low, high, best = (low, middle, found) if found.missing <= 0 else (middle + 1, high, best)
        return best
    return min(tried, key=lambda placement: placement.missing)


def fits(task: TrainingTask, cards: Sequence[Card], reserve: Reserve) -> bool:
    """Whether there is a placement that fits."""
    roomiest = _roomiest(cards, reserve)
    return any(
        _on(task, _first(roomiest, alike[-1]), reserve).missing <= 0 for alike in _numbers(task, roomiest, reserve)
    )


def largest_batch(step: Step, cards: Sequence[Card], reserve: Reserve) -> int:
    """The most sequences (pairs of ``dpo``) a GPU takes in one pass on all of these cards; 0 where not one fits."""
    room = min(_room(card, reserve) for card in cards)

    def fitting(batch: int) -> bool:
        return step.most(batch) <= room

    if not fitting(1):
        return 0
    low, beyond = 1, 2
    while beyond <= _MOST and fitting(beyond):
        low, beyond = beyond, 2 * beyond
    while beyond - low > 1:
        middle = (low + beyond) // 2
        low, beyond = (middle, beyond) if fitting(middle) else (low, middle)
    return low


def _roomiest(cards: Sequence[Card], reserve: Reserve) -> list[Card]:
    return sorted(cards, key=lambda card: _room(card, reserve), reverse=True)


def _room(card: Card, reserve: Reserve) -> int:
    return card.free - reserve.context - reserve.on(card.total)


def together(cards: Sequence[Card]) -> list[Card]:
    """Those that can exchange gradients: MIG instances can't, as NCCL doesn't join them."""
    return [card for card in cards if not card.alone]


def _first(roomiest: Sequence[Card], number: int) -> Sequence[Card]:
    """The roomiest that can share a training."""
    return roomiest[:1] if number == 1 else together(roomiest)[:number]


def _numbers(task: TrainingTask, roomiest: Sequence[Card], reserve: Reserve) -> Iterator[tuple[int, ...]]:
    """Numbers of GPUs to try, the best first; together stand those among which one more GPU never needs more room.

    ``fsdp`` takes the fewest: one, which divides nothing, then those that end in cards that are alike. ``ddp`` takes
    all that fit: what it needs is the same on any number but one.
    """
    able = together(roomiest)
    most = len(able)
    if task.job.strategy is Strategy.FSDP:
        yield (1,)
        rooms = groupby(range(2, most + 1), key=lambda number: (able[number - 1].free, able[number - 1].total))
        yield from (tuple(alike) for _, alike in rooms)
    else:
        if task.job.strategy is Strategy.DDP and most > 1:
            held = Step(task, 2).most()
            enough = sum(_room(card, reserve) >= held for card in able)
            yield from [(enough,)] if enough > 1 else []
        yield (1,)


def _on(task: TrainingTask, cards: Sequence[Card], reserve: Reserve) -> Placement:
    step = Step(task, len(cards))
    usages = {total: step.usage(reserve, total) for total in {card.total for card in cards}}
    return Placement(step, tuple(TrainingLoad(card, usages[card.total]) for card in cards))
