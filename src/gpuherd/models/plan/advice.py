"""What would fit when something doesn't: smaller answers, another way to lay it out, other weights, other GPUs. Pure.

Nothing is suggested that was not planned and found to fit. The smallest change comes first: what leaves the answers as
they are (their number at once, the layout), then their length, then the weights' precision, then more or other GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from gpuherd.models.plan.capability import UNPACKED
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.cards import words_for
from gpuherd.models.plan.kinds import kind_named
from gpuherd.models.plan.placing import Task, Wish, place
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import Alternative, MemoryPlan
from gpuherd.models.plan.workload import Workload

# What to try in place of each, the smallest change first: fp16 takes what bf16 takes, but more GPUs can compute in it.
_QUANTISED = (Precision.INT8, Precision.NF4, Precision.NF4_DQ)
_IN_PLACE_OF: dict[Precision, tuple[Precision, ...]] = {
    Precision.FP32: (Precision.BF16, Precision.FP16, *_QUANTISED),
    Precision.BF16: (Precision.FP16, *_QUANTISED),
    Precision.FP16: _QUANTISED,
    Precision.INT8: _QUANTISED[1:],
    Precision.NF4: _QUANTISED[2:],
}
_MOST_PRECISIONS = 2
# Kinds that clusters and clouds have, by memory.
_USUAL = ("T4", "RTX4090", "A100-40", "L40S", "A100-80", "H200", "B200")
_MOST_GPUS = 16
_IN_A_MACHINE = 8
_SHORTEST_PROMPT = 16


def alternatives(what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None) -> tuple[Alternative, ...]:
    """What would fit in place of this, the smallest change first; () where nothing was found."""
    one_by_one = tuple(
        each
        for found in (_layout, _fewer_answers, _shorter_prompts, _precisions, _more_gpus, _larger_gpus)
        for each in found(what, cards, wish, gpus)
    )
    return one_by_one or tuple(_together(what, wish, gpus))


def _fits(what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None) -> MemoryPlan | None:
    told = place(what, cards, wish, gpus)
    return told if isinstance(told, MemoryPlan) else None


def _with(what: Task, precision: Precision | None = None, workload: Workload | None = None) -> Task:
    return Task(what.architecture, precision or what.precision, workload or what.workload, what.reserve)


def _layout(what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None) -> Iterator[Alternative]:
    """Another number of GPUs, or one after the other in place of what was wished."""
    if wish == "auto" and gpus is None:
        return
    plan = _fits(what, cards, "auto", None)
    if plan is None:
        return
    if plan.gpus == 1:
        yield Alternative(("--parallel", "auto"), "it fits on one GPU")
    else:
        yield Alternative(("--parallel", "auto"), f"layer after layer over {plan.gpus} GPUs it fits")


def _fewer_answers(what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None) -> Iterator[Alternative]:
    """The largest batch that fits."""
    asked = what.workload.batch
    if asked == 1:
        return
    low, high = 0, asked
    while high - low > 1:
        middle = (low + high) // 2
        fits = _fits(_with(what, workload=replace(what.workload, batch=middle)), cards, wish, gpus)
        low, high = (middle, high) if fits else (low, middle)
    if low:
        yield Alternative(("--batch", str(low)), f"{low} sequences at once in place of {asked} fit")


def _shorter_prompts(what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None) -> Iterator[Alternative]:
    """The longest prompt that fits with one sequence at a time, where not even one of the length asked for does."""

    def fits(tokens: int) -> bool:
        workload = replace(what.workload, batch=1, prompt_tokens=tokens)
        return _fits(_with(what, workload=workload), cards, wish, gpus) is not None

    low, high = _SHORTEST_PROMPT, what.workload.prompt_tokens
    if high <= low or fits(high) or not fits(low):
        return
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    words = ("--batch", "1", "--prompt-tokens", str(low))
    yield Alternative(words, f"one sequence at a time fits, with prompts of at most {low} tokens")


def _precisions(what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None) -> Iterator[Alternative]:
    """The next precisions in which it fits, two at most."""
    others = _IN_PLACE_OF.get(what.precision, ())
    if what.precision is Precision.AS_STORED and what.architecture.stored_method in UNPACKED:
        others = (Precision.BF16,)
    plans = ((each, _fits(_with(what, each), cards, wish, gpus)) for each in others)
    fitting = ((precision, plan) for precision, plan in plans if plan is not None)
    for precision, plan in islice(fitting, _MOST_PRECISIONS):
        sentence = f"in {precision} it fits on {_of(plan.gpus)}, with at most {plan.largest_batch} sequences at once"
        yield Alternative(("--dtype", str(precision)), sentence)


def _more_gpus(what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None) -> Iterator[Alternative]:
    """The fewest GPUs of this kind that hold it: more of the roomiest, beside those that there are."""
    if wish == "replica" or gpus is not None:
        return
    largest = max(cards, key=lambda card: card.total)
    # Others use a part of it now: one more of its kind would be free.
    another = replace(largest, free=largest.total, uuid=None)
    for count in range(len(cards) + 1, _MOST_GPUS + 1):
        more = (*cards, *[replace(another, label=str(place)) for place in range(len(cards), count)])
        plan = _fits(what, more, wish, None)
        if plan is not None:
            yield Alternative(("--gpus", words_for(more)), f"{_of(count)} of this kind can hold it")
            return


def _larger_gpus(what: Task, cards: Sequence[Card], wish: Wish, gpus: int | None) -> Iterator[Alternative]:
    """The smallest usual kind of which no more than there are now hold it, and the fewest of those."""
    largest = max(card.total for card in cards)
    for name in _USUAL:
        kind = kind_named(name)
        if kind is None or kind.memory <= largest:
            continue
        many = [Card(str(place), kind.name, kind.memory, kind.memory, kind.capability) for place in range(len(cards))]
        plan = _fits(what, many, wish, gpus)
        if plan is not None:
            enough = many[: plan.gpus]
            yield Alternative(("--gpus", words_for(enough)), f"{_of(plan.gpus)} of kind {name} can hold it")
            return


def _together(what: Task, wish: Wish, gpus: int | None) -> Iterator[Alternative]:
    """Several changes at once, where none alone is enough: one sequence at a time, on usual GPUs, as few as a machine
    has if possible, in this precision or else in the next."""
    alone = replace(what.workload, batch=1)
    for precision in (what.precision, *_IN_PLACE_OF.get(what.precision, ())):
        task = _with(what, precision, alone)
        plans: list[tuple[str, MemoryPlan, Sequence[Card]]] = []
        for name in _USUAL:
            kind = kind_named(name)
            if kind is None:
                continue
            many = [Card(str(at), kind.name, kind.memory, kind.memory, kind.capability) for at in range(_MOST_GPUS)]
            plan = _fits(task, many, "auto", None)
            if plan is not None:
                plans.append((name, plan, many[: plan.gpus]))
        if not plans:
            continue
        name, plan, cards = next((each for each in plans if each[1].gpus <= _IN_A_MACHINE), plans[0])
        changed = precision is not what.precision
        words = ["--batch", "1", *(["--dtype", str(precision)] if changed else []), "--gpus", words_for(cards)]
        words += ["--parallel", "auto"] if wish != "auto" or gpus is not None else []
        how = f"one sequence at a time{f' in {precision}' if changed else ''}"
        yield Alternative(tuple(words), f"{how} fits on {_of(plan.gpus)} of kind {name}")
        return


def _of(count: int) -> str:
    return "one GPU" if count == 1 else f"{count} GPUs"
