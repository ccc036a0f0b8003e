"""How many GPUs a job asks its queue for, and how much memory on each: by the plan of the model that it loads. Pure.

A queue gives a job GPUs that nobody uses, any of those that have what it asks for. So the plan is made for GPUs as they
are when they are idle, once for each size that this machine has, and the least of what would do is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpuherd.errors import JobCannotFit, UsageError
from gpuherd.gpus.state import Gpu
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.card import Card
from gpuherd.models.plan.placing import Wish
from gpuherd.models.plan.planner import make_plan
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.result import MemoryPlan, Refusal
from gpuherd.models.plan.wording import cards_in_words, gib
from gpuherd.models.plan.workload import MIB, Reserve, Workload

# What the driver keeps of a GPU for itself is less than this part of it. Where all GPUs of a size are in use, so that
# it can't be seen, it is taken to be so much.
_DRIVERS_PART = 0.02
# More bytes than any GPU has.
_BOUNDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job asks for.

    Attributes:
        gpus, memory_mb: so many GPUs with so many MB (2^20 bytes) free on each, context and reserve included.
        plan: on GPUs that just have as much; None on a machine without GPUs, where the job runs on the CPU.
        sentence: what was asked for and what for, for people.
    """

    gpus: int
    memory_mb: int
    plan: MemoryPlan | None
    sentence: str


def idle_cards(gpus: Sequence[Gpu]) -> tuple[Card, ...]:
    """These GPUs as a job will find them: with nobody on them. GPUs that have a problem or are split are left out.

    What the driver keeps for itself is what the emptiest GPU of the same size has in use, at most 2 %.
    """
    usable = [gpu for gpu in gpus if gpu.problem is None and not gpu.mig_instances and gpu.total_mb > 0]
    drivers: dict[int, int] = {}
    for gpu in usable:
        most = int(_DRIVERS_PART * gpu.total_mb)
        drivers[gpu.total_mb] = min(drivers.get(gpu.total_mb, most), max(0, gpu.total_mb - gpu.free_mb))
    return tuple(
        Card(
            label=gpu.label,
            name=gpu.name,
            total=gpu.total_mb * MIB,
            free=(gpu.total_mb - drivers[gpu.total_mb]) * MIB,
            capability=gpu.compute_capability,
            uuid=gpu.uuid,
            alone=gpu.mig_parent is not None,
        )
        for gpu in usable
    )


def demand_of(
    architecture: Architecture,
    precision: Precision,
    workload: Workload,
    cards: Sequence[Card],
    reserve: Reserve = Reserve(),  # noqa: B008 - frozen
    *,
    parallel: Wish = "auto",
    gpus: tuple[int, int] | None = None,
    most: int | None = None,
    spelling: Mapping[str, str | None] = MappingProxyType({}),
) -> Demand:
    """What a job that loads this model should ask for on a machine with these GPUs.

    The fewest GPUs that hold it; of as few the smallest memory, so that the most GPUs will do.

    Args:
        cards: all GPUs that the job may get, as free as they are when nobody uses them (``idle_cards``); () on a
            machine without GPUs.
        parallel: as in ``make_plan``.
        gpus: at least and at most so many.
        most: a run never has more at once.
        spelling: how a command spells the flags of ``gpuherd plan`` that remedies name, with ``{}`` for the value; None
            for one that it does not have.

    Raises:
        JobCannotFit: it fits nowhere here; the message has the figures and what would fit.
        UsageError: ``gpus`` that make no sense.
    """
    if gpus is not None and not 1 <= gpus[0] <= gpus[1]:
        raise UsageError(f"{architecture.model}: a model is planned on 1 GPU or more, not on {gpus[0]}")
    if not cards:
        return _on_the_cpu(architecture, precision, workload, reserve, parallel, gpus)
    best: MemoryPlan | None = None
    refused: tuple[float, list[Card]] | None = None
    for some in _of_each_size(cards, most):
        found = _plan(architecture, precision, workload, reserve, some, parallel, gpus, advise=False)
        if isinstance(found, MemoryPlan):
            if best is None or (found.gpus, found.memory_mb) < (best.gpus, best.memory_mb):
                best = found
        elif refused is None or _lacks(found) < refused[0]:
            refused = _lacks(found), some
    if best is not None:
        return Demand(best.gpus, best.memory_mb, best, _sentence(best, best.memory_mb))
    assert refused is not None  # noqa: S101 - there are cards, so one of both was told
    told = _plan(architecture, precision, workload, reserve, refused[1], parallel, gpus, advise=True)
    assert isinstance(told, Refusal)  # noqa: S101 - as before, now with advice
    if gpus is None and (most is None or most >= len(cards)):
        unequal = _on_unequal(architecture, precision, workload, cards, reserve, parallel, spelling)
        told = replace(told, reason=told.reason + unequal)
    raise JobCannotFit(_refused(told, spelling))


def _lacks(refusal: Refusal) -> float:
    """By how much it fails: one that isn't about memory fails wholly."""
    return refusal.missing if refusal.loads else float("inf")


def _of_each_size(cards: Sequence[Card], most: int | None) -> list[list[Card]]:
    """For each size all cards that have as much, as if they had no more: the queue may give any of them.

    At most ``most`` of them, whole GPUs before MIG instances, since only those work together.
    """
    found = []
    for size in sorted({card.free for card in cards}, reverse=True):
        enough = sorted((card for card in cards if card.free >= size), key=lambda card: card.alone)
        smallest = min(card.total for card in enough)
        found.append([replace(card, free=size, total=max(size, smallest)) for card in enough[:most]])
    return found


def _plan(
    architecture: Architecture,
    precision: Precision,
    workload: Workload,
    reserve: Reserve,
    cards: Sequence[Card],
    parallel: Wish,
    gpus: tuple[int, int] | None,
    *,
    advise: bool,
) -> MemoryPlan | Refusal:
    """A plan on the fewest of these cards that are allowed."""
    if gpus is None:
        return make_plan(architecture, cards, precision, workload, reserve, parallel=parallel, advise=advise)
    told: MemoryPlan | Refusal | None = None
    for count in range(gpus[0], min(gpus[1], len(cards)) + 1):
        told = make_plan(architecture, cards, precision, workload, reserve, parallel=parallel, gpus=count, advise=False)
        if isinstance(told, MemoryPlan):
            return told
    if told is None:
        reason = f"{gpus[0]} GPUs are asked for, and there are {len(cards)}"
        return Refusal(architecture, precision, workload, reserve, reason, 0, 0)
    if not advise:
        return told
    # The advice of the largest number: with fewer GPUs it fits less.
    count = min(gpus[1], len(cards))
    return make_plan(architecture, cards, precision, workload, reserve, parallel=parallel, gpus=count)


def _on_the_cpu(
    architecture: Architecture,
    precision: Precision,
    workload: Workload,
    reserve: Reserve,
    parallel: Wish,
    gpus: tuple[int, int] | None,
) -> Demand:
    """On a machine without GPUs a job that asks for some runs on the CPU. It asks for the fewest that would hold it."""
    count = 1 if gpus is None else gpus[0]
    boundless = [Card(str(place), "", total=0, free=_BOUNDLESS) for place in range(count)]
    plan = make_plan(architecture, boundless, precision, workload, reserve, parallel=parallel, gpus=count, advise=False)
    if isinstance(plan, Refusal):
        raise JobCannotFit(plan.reason)
    # Nothing is reserved yet for the size of a GPU.
    memory_mb = math.ceil(plan.memory_mb / (1 - reserve.share))
    said = _sentence(plan, memory_mb)
    return Demand(count, memory_mb, None, f"{said}; no GPU is known here, and without GPUs jobs run on the CPU")


def _on_unequal(
    architecture: Architecture,
    precision: Precision,
    workload: Workload,
    cards: Sequence[Card],
    reserve: Reserve,
    parallel: Wish,
    spelling: Mapping[str, str | None],
) -> str:
    """Said of a model that fits on these GPUs for that reason alone that some have more than others."""
    if len({card.free for card in cards}) < 2:
        return ""
    plan = make_plan(architecture, cards, precision, workload, reserve, parallel=parallel, advise=False)
    if isinstance(plan, Refusal):
        return ""
    sizes = cards_in_words([load.card for load in plan.loads])
    said = f"; it fits on {sizes}, but a job asks for as much on each of its GPUs"
    smallest = min(load.card.free for load in plan.loads)
    if sum(card.free >= smallest for card in cards) > plan.gpus:
        return said
    by_number = spelled(("--num-gpus", str(plan.gpus)), spelling)
    return said if by_number is None else f"{said}: {by_number} without naming the model is given these"


def _sentence(plan: MemoryPlan, memory_mb: int) -> str:
    workload, gpus = plan.workload, plan.gpus
    many = "1 sequence" if workload.batch == 1 else f"{workload.batch} sequences"
    free = gib(memory_mb * MIB)
    where = f"1 GPU with {free} free" if gpus == 1 else f"{gpus} GPUs with {free} free on each"
    return f"{plan.architecture.model} in {plan.precision}, {many} of {workload.tokens} tokens: asks for {where}"


def spelled(words: Sequence[str], spelling: Mapping[str, str | None]) -> str | None:
    """Flags and their values in the caller's spelling; None where the caller lacks one of them.

    >>> spelled(("--batch", "4"), {"--batch": "--batch-size {}"}), spelled(("--batch", "4"), {})
    ('--batch-size 4', '--batch 4')
    """
    forms = [spelling.get(flag, f"{flag} {{}}") for flag in words[::2]]
    known = [form for form in forms if form is not None]
    if len(known) < len(forms):
        return None
    return " ".join(form.format(value) for form, value in zip(known, words[1::2], strict=True))


def _refused(refusal: Refusal, spelling: Mapping[str, str | None]) -> str:
    """The reason, and what would fit as words of the command line."""
    options = [
        (spelled(each.words, spelling), each.sentence) for each in refusal.alternatives if each.words[0] != "--gpus"
    ]
    told = [f"{words} ({sentence})" for words, sentence in options if words is not None]
    machines = [each.sentence for each in refusal.alternatives if each.words[0] == "--gpus"]
    said = "; ".join([*told, *machines])
    return f"{refusal.reason}" + (f". What would fit: {said}" if said else "")
