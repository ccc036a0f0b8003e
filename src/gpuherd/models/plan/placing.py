"""Where a model goes on given cards, or that it fits nowhere: the planner's decisions, without advice. Pure.

- ``auto``: the fewest GPUs that hold it, one after the other; the other GPUs take further replicas.
- ``replica``: one GPU each.
- ``layers``: one after the other over all GPUs, or over as many as ``gpus`` says.
- ``tensor``: each layer over all GPUs, or over as many as ``gpus`` says; the number must divide the heads.

Fewest first, because layers that lie on several GPUs are still computed one after the other: more GPUs make nothing
faster, and others may have work for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import permutations
from typing import Literal

from gpuherd.errors import UsageError
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.capability import split_by_capability
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.cutting import cuts_allowed, ties_together
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.remarks import remarks_on, saves_little
from gpuherd.models.plan.replicas import replicas_over
from gpuherd.models.plan.result import GpuLoad, MemoryPlan, Parallel, Refusal
from gpuherd.models.plan.sizing import Sizing
from gpuherd.models.plan.split import Split
from gpuherd.models.plan.usage import CostTable
from gpuherd.models.plan.wording import blocks_in_words, cards_in_words, gib
from gpuherd.models.plan.workload import Reserve, Workload

Wish = Literal["auto", "layers", "tensor", "replica"]
WISHES: tuple[Wish, ...] = ("auto", "layers", "tensor", "replica")

# Cards whose room differs by less are as good as each other: links then count, not a few MB of an idle driver.
_ABOUT = 0.98
# Of so many unequal cards every order is tried, which takes milliseconds; of more only simple ones.
_FEW = 6


class Task:
    """What is to be placed, with tables that are made when first asked for, and once."""

    def __init__(self, architecture: Architecture, precision: Precision, workload: Workload, reserve: Reserve) -> None:
        self.architecture = architecture
        self.precision = precision
        self.workload = workload
        self.reserve = reserve
        self._sizings: dict[int, Sizing] = {}

    def sizing(self, ways: int = 1) -> Sizing:
        """The needs of its blocks, each split over so many GPUs."""
        if ways not in self._sizings:
            table = CostTable(self.architecture, self.precision, self.workload, self.reserve, ways=ways)
            self._sizings[ways] = Sizing(table, cuts_allowed(self.architecture), self.workload.batch, self.reserve)
        return self._sizings[ways]

    @cached_property
    def layouts(self) -> tuple[Task, ...]:
        """This, and the same with tied blocks side by side where they aren't: the ways to cut it into runs."""
        together = ties_together(self.architecture)
        if together is None:
            return (self,)
        other = Task(together, self.precision, self.workload, self.reserve)
        other.layouts = (other, self)
        return other.layouts


def place(what: Task, cards: Sequence[Card], wish: Wish = "auto", gpus: int | None = None) -> MemoryPlan | Refusal:
    """The plan, or a refusal without alternatives.

    Raises UsageError: no cards, a number of GPUs below 1 or above that of the cards, an unknown wish.
    """
    if not cards:
        raise UsageError("there is no GPU to plan for; name some, such as --gpus 4x40GB")
    if wish not in WISHES:
        raise UsageError(f"parallel={wish!r}: it is one of {', '.join(WISHES)}")
    if gpus is not None and not 1 <= gpus <= len(cards):
        raise UsageError(f"{gpus} GPUs a replica: there are {len(cards)} to plan with, and the least is 1")
    if wish == "replica" and gpus not in (None, 1):
        raise UsageError(f"{gpus} GPUs a replica, and parallel=replica means one GPU each; ask for layers or tensor")
    able, remarks = split_by_capability(what.precision, cards, what.architecture.stored_method)
    if not able:
        sizing = what.sizing()
        return _refusal(what, f"no GPU can compute in {what.precision}: {remarks[0]}", sizing.whole(), 0, ())
    if gpus is not None and gpus > len(able):
        reason = f"{gpus} GPUs are asked for, and only {len(able)} can compute in {what.precision}: {remarks[0]}"
        return _refusal(what, reason, what.sizing().whole(), 0, ())
    if wish == "tensor":
        return _tensor(what, able, gpus, remarks)
    return _whole_layers(what, able, wish, gpus, remarks)


# ---- whole layers: one GPU, or one after the other -------------------------------------------------------------------


def _whole_layers(
    what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None, remarks: tuple[str, ...]
) -> MemoryPlan | Refusal:
    sizing = what.sizing()
    together = sum(not card.alone for card in cards)
    if wish == "replica":
        counts = range(1, 2)
    elif wish == "layers" or gpus is not None:
        counts = range(gpus or max(1, together), (gpus or max(1, together)) + 1)
    else:
        counts = range(1, max(1, together) + 1)
    for count in counts:
        choices = [
            (each, found, each.sizing().best(found))
            for each in (what.layouts if count > 1 else (what,))
            if (found := _fitting(cards, count, each.sizing())) is not None
        ]
        if choices:
            return _plan(*min(choices, key=_fullness), cards, remarks)
    largest = _roomiest(cards, counts[-1], sizing)
    if not largest:
        reason = f"{counts[-1]} GPUs are asked for: MIG instances can't work together, and only {together} are none"
        return _refusal(what, reason, sizing.whole(), 0, ())
    return _too_little(
        *min(
            (
                (each, order, each.sizing().best(order))
                for each in (what.layouts if len(largest) > 1 else (what,))
                for order in _simple_orders(largest, sizing)
            ),
            key=_fullness,
        )
    )


def _fullness(choice: tuple[Task, tuple[Card, ...], Split]) -> float:
    return choice[2].fullness


def _fitting(cards: Sequence[Card], count: int, sizing: Sizing) -> tuple[Card, ...] | None:
    """So many cards, in an order in which the blocks fit; None if they don't.

    The roomiest are the measure: what doesn't fit there fits nowhere. Neighbours are taken in their place where they
    have about as much room.
    """
    roomiest = _roomiest(cards, count, sizing)
    if not roomiest or sum(max(0, sizing.room(card)) for card in roomiest) < sizing.whole():
        return None
    enough = _ABOUT * min(sizing.room(card) for card in roomiest)
    seen: set[tuple[int, ...]] = set()
    for window in _windows(cards, count) if count > 1 and enough > 0 else ():
        rooms = tuple(sizing.room(card) for card in window)
        if rooms not in seen and min(rooms) >= enough and sizing.fits(window):
            return window
        seen.add(rooms)
    return _order_that_fits(roomiest, sizing)


def _windows(cards: Sequence[Card], count: int) -> Iterator[tuple[Card, ...]]:
    """Neighbours: first those that begin at a multiple of ``count``, so that replicas fit side by side."""
    usable = [card for card in cards if not card.alone]
    starts = sorted(range(len(usable) - count + 1), key=lambda start: (start % count != 0, start))
    for start in starts:
        yield tuple(usable[start : start + count])


def _roomiest(cards: Sequence[Card], count: int, sizing: Sizing) -> tuple[Card, ...]:
    """The cards with the most room, in the order given; () where there are too few that work together."""
    usable = cards if count == 1 else [card for card in cards if not card.alone]
    if len(usable) < count:
        return ()
    taken = sorted(range(len(usable)), key=lambda place: (-sizing.room(usable[place]), place))[:count]
    return tuple(usable[place] for place in sorted(taken))


def _simple_orders(cards: tuple[Card, ...], sizing: Sizing) -> list[tuple[Card, ...]]:
    """As given, roomiest first, roomiest last; one where all are alike."""
    if len({(card.free, card.total) for card in cards}) < 2:
        return [cards]
    ascending = tuple(sorted(cards, key=sizing.room))
    descending = tuple(sorted(cards, key=sizing.room, reverse=True))
    return list(dict.fromkeys((cards, descending, ascending)))


def _order_that_fits(cards: tuple[Card, ...], sizing: Sizing) -> tuple[Card, ...] | None:
    """The order of these cards with the emptiest fullest card among the simple orders, if it fits in one of those; of a
    few cards else the first that fits among all orders that differ."""
    simple = [order for order in _simple_orders(cards, sizing) if sizing.fits(order)]
    if simple:
        return simple[0] if len(simple) == 1 else min(simple, key=lambda order: sizing.best(order).fullness)
    if len(cards) > _FEW or len({(card.free, card.total) for card in cards}) < 2:
        return None
    orders = {tuple((card.free, card.total) for card in order): order for order in permutations(cards)}
    return next((order for order in orders.values() if sizing.fits(order)), None)


# ---- tensor parallel: each layer over all ----------------------------------------------------------------------------


def _tensor(what: Task, cards: Sequence[Card], gpus: int | None, remarks: tuple[str, ...]) -> MemoryPlan | Refusal:
    ways, reason = _ways(what, sum(not card.alone for card in cards), gpus)
    if reason is not None:
        return _refusal(what, reason, what.sizing().whole(), 0, ())
    sizing = what.sizing(ways)
    usable = cards if ways == 1 else [card for card in cards if not card.alone]

    def loads(some: Sequence[Card]) -> tuple[GpuLoad, ...]:
        whole = (0, len(what.architecture.blocks))
        return tuple(GpuLoad(card, *whole, sizing.costs.usage(*whole, card)) for card in some)

    roomy = (window for window in _windows(usable, ways) if all(sizing.room(card) >= sizing.whole() for card in window))
    chosen = next(roomy, None) or _roomiest(usable, ways, sizing)
    if any(sizing.room(card) < sizing.whole() for card in chosen):
        return _too_full(what, loads(chosen))
    groups = replicas_over(usable, chosen, [sizing.whole()] * ways, sizing)
    smallest = min(groups[0], key=sizing.room)
    return MemoryPlan(
        architecture=what.architecture,
        precision=what.precision,
        workload=what.workload,
        reserve=what.reserve,
        parallel="tensor" if ways > 1 else "one",
        loads=loads(groups[0]),
        replicas=len(groups),
        replica_cards=tuple(groups),
        largest_batch=sizing.largest_as_it_lies(loads([smallest])),
        warnings=(*remarks, *remarks_on(what.architecture, what.precision, what.workload)),
    )


def _ways(what: Task, together: int, gpus: int | None) -> tuple[int, str | None]:
    """Over how many GPUs each layer goes, and why it can't, if so. ``together``: GPUs that can work together."""
    architecture, limit = what.architecture, what.architecture.tensor_parallel_limit or 1
    ways = gpus or max(number for number in range(1, max(1, together) + 1) if limit % number == 0)
    if not architecture.tensor_parallel:
        return ways, f"transformers can't split the layers of {architecture.model_type} over GPUs"
    if limit % ways:
        return ways, f"{ways} GPUs don't divide the heads of {architecture.model}; {_numbers(limit)} do"
    if ways > max(1, together):
        return ways, f"{ways} GPUs are asked for: MIG instances can't work together, and only {together} are none"
    if ways > 1 and what.precision.is_quantised:
        return ways, f"bitsandbytes' {what.precision} can't be split by transformers' tensor parallelism"
    return ways, None


def _numbers(limit: int) -> str:
    """The numbers above 1 that divide it, as words: ``2, 4 and 8``."""
    numbers = [str(number) for number in range(2, limit + 1) if limit % number == 0]
    return " and ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers) or "none"


# ---- what is told ----------------------------------------------------------------------------------------------------


def _plan(
    what: Task, chosen: tuple[Card, ...], split: Split, cards: Sequence[Card], remarks: tuple[str, ...]
) -> MemoryPlan:
    sizing = what.sizing()
    first = sizing.loads(chosen, split)
    needs = [sizing.blocks_bytes(load.first, load.after_last) for load in first]
    usable = cards if len(first) == 1 else [card for card in cards if not card.alone]
    groups = replicas_over(usable, [load.card for load in first], needs, sizing)
    if groups[0] != tuple(load.card for load in first):
        ranges = tuple((load.first, load.after_last) for load in first)
        first = tuple(
            GpuLoad(card, *run, sizing.costs.usage(*run, card)) for card, run in zip(groups[0], ranges, strict=True)
        )
    here = sizing.largest_as_it_lies(first)
    over = groups[0]
    elsewhere = here if len(over) == 1 else max(each.sizing().largest_over(over, here) for each in what.layouts)
    parallel: Parallel = "one" if len(first) == 1 else "layers"
    warnings = [*remarks, *remarks_on(what.architecture, what.precision, what.workload)]
    if here < elsewhere:
        warnings.append(
            f"with this device map at most {here} sequences at once; a plan for --batch {elsewhere} splits otherwise"
        )
    return MemoryPlan(
        architecture=what.architecture,
        precision=what.precision,
        workload=what.workload,
        reserve=what.reserve,
        parallel=parallel,
        loads=first,
        replicas=len(groups),
        replica_cards=tuple(groups),
        largest_batch=elsewhere,
        warnings=tuple(warnings),
    )


def _too_little(what: Task, cards: tuple[Card, ...], split: Split) -> Refusal:
    """A refusal with the figures of the best split."""
    return _too_full(what, what.sizing().loads(cards, split))


def _too_full(what: Task, loads: tuple[GpuLoad, ...]) -> Refusal:
    """A refusal with the figures of the best placement."""
    architecture = what.architecture
    needed = sum(load.usage.total for load in loads)
    worst = max(loads, key=lambda load: load.fullness)
    missing = -worst.left
    where = f"GPU {worst.card.label}"
    if len(loads) > 1 and worst.after_last - worst.first < len(architecture.blocks):
        where += f" ({blocks_in_words(architecture, worst.first, worst.after_last)})"
    fullest = "it" if len(loads) == 1 else f"the fullest, {where},"
    on = cards_in_words([load.card for load in loads])
    reason = f"{architecture.model} in {what.precision} needs {gib(needed)} on {on}: {fullest} lacks {gib(missing)}"
    if little := saves_little(architecture, what.precision):
        reason += f" ({little})"
    return _refusal(what, reason, needed, missing, loads)


def _refusal(what: Task, reason: str, needed: int, missing: int, loads: tuple[GpuLoad, ...]) -> Refusal:
    return Refusal(what.architecture, what.precision, what.workload, what.reserve, reason, needed, missing, loads)
