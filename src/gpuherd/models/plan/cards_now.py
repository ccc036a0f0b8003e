"""The GPUs of this machine as cards: what is free on each now, and in which order a model is best laid over them.

``gpus`` knows the driver; this knows only what it saw. Looking is ``cards_now``, all else is pure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpuherd.engines.process_tree import ATTEMPT_VARIABLE
from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.choose import LinkMap, links_between
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import is_named
from gpuherd.models.plan.card import Card

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CardsNow:
    """What may be planned with now.

    Attributes:
        cards: in an order in which neighbours are linked as well as they can be.
        left_out: a sentence for each GPU that is not among them, and why.
        problem: a sentence when this machine has no GPU, or its driver fails; None otherwise.
    """

    cards: tuple[Card, ...]
    left_out: tuple[str, ...] = ()
    problem: str | None = None


def cards_now(*, busy_too: bool = False, rule: IdleRule | None = None) -> CardsNow:
    """Looks at the GPUs that this process sees. Memory that others use now is taken off.

    Args:
        busy_too: also GPUs that are busy by gpuherd's rule or held by a gpuherd, with what is left free on them.
        rule: when a GPU is busy; that of ``gpuherd gpus`` by default.
    """
    from gpuherd.gpus.query import machine
    from gpuherd.gpus.visible import variable_of, visible_now

    now = machine(topology=True)
    shown = visible_now(now.gpus)
    problem = now.problem or (None if shown else f"{variable_of(now.maker)} shows no GPU")
    cards, left_out = usable_cards(shown, rule or IdleRule(), _held_or_kept(), busy_too=busy_too, own_pid=os.getpid())
    return CardsNow(cards, left_out, problem)


def _held_or_kept() -> Callable[[Gpu], str | None]:
    """Asks of a GPU whether a gpuherd holds it or the machine's policy keeps it: a sentence, else None. What is held
    for this very job is its own: it is shown no other GPUs."""
    from gpuherd.gpus.leases import LeaseFolder
    from gpuherd.jobs.settings import NO_SETTINGS, load

    try:
        leases = LeaseFolder.existing()
    except (CannotWrite, UsageError):
        leases = None
    try:
        excluded = load().policy.exclude_gpus
    except UsageError:
        excluded = NO_SETTINGS.policy.exclude_gpus
    ours = _own_line()

    def reason(gpu: Gpu) -> str | None:
        if is_named(gpu, excluded):
            return "kept from gpuherd by this machine's policy"
        holder = None if leases is None else leases.holder(gpu.uuid)
        if holder is None or ATTEMPT_VARIABLE in os.environ or holder.pid in ours:
            return None
        return holder.sentence()

    return reason


def _own_line() -> set[int]:
    """This process and those that it comes from: what ``gpuherd run`` took, it took for us."""
    import psutil

    try:
        return {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    except psutil.Error:
        return {os.getpid()}


def usable_cards(
    gpus: Sequence[Gpu],
    rule: IdleRule,
    taken: Callable[[Gpu], str | None],
    *,
    busy_too: bool = False,
    own_pid: int | None = None,
) -> tuple[tuple[Card, ...], tuple[str, ...]]:
    """The cards of these GPUs, ordered by links, and a sentence for each that is left out.

    ``taken`` tells why a GPU that computes nothing is not free all the same, None if it is. ``own_pid``: a process that
    keeps no GPU busy; what it holds is not free all the same.
    """
    own = frozenset() if own_pid is None else frozenset((own_pid,))
    left_out: list[str] = []
    usable: list[Gpu] = []
    for gpu in gpus:
        if gpu.problem is not None:
            left_out.append(f"GPU {gpu.label} has a problem: {gpu.problem}")
            continue
        if gpu.mig_instances:
            continue
        why = check(gpu, rule, own_pids=own).reason or taken(gpu)
        if why and not busy_too:
            left_out.append(f"GPU {gpu.label} is left out: {why}")
        elif gpu.free_mb < 1:
            left_out.append(f"GPU {gpu.label} is left out: no memory is free on it")
        else:
            usable.append(gpu)
    return tuple(_card(gpu) for gpu in linked_order(usable)), tuple(left_out)


def _card(gpu: Gpu) -> Card:
    return Card(
        label=gpu.label,
        name=gpu.name,
        total=gpu.total_mb * MIB,
        free=gpu.free_mb * MIB,
        capability=gpu.compute_capability,
        uuid=gpu.uuid,
        alone=gpu.mig_parent is not None,
    )


def linked_order(gpus: Sequence[Gpu], links: LinkMap | None = None) -> tuple[Gpu, ...]:
    """The GPUs so that each is well linked to the next: hidden states go from neighbour to neighbour, and a run of
    neighbours is a well linked set.

    From each GPU in turn a chain is grown by the one that is linked best to the chain's end (more NVLinks, then nearer
    on PCIe, then the lower index); the chain of the most links in all is taken, of equal ones that which begins with
    the best links, so that the first GPUs are a well linked set, whatever their number.
    """
    ways = links_between(gpus) if links is None else links

    def nearness(one: Gpu, other: Gpu) -> tuple[int, int]:
        nvlinks, distance = ways[one.uuid, other.uuid]
        return nvlinks, -distance

    best: tuple[tuple[int, int, list[tuple[int, int]]], list[Gpu]] | None = None
    for first in gpus:
        chain = [first]
        left = [gpu for gpu in gpus if gpu is not first]
        while left:
            last = chain[-1]
            following = max(left, key=lambda gpu: nearness(last, gpu))
            chain.append(following)
            left.remove(following)
        steps = [nearness(one, other) for one, other in pairwise(chain)]
        total = sum(step[0] for step in steps), sum(step[1] for step in steps), steps
        if best is None or total > best[0]:
            best = (total, chain)
    return () if best is None else tuple(best[1])
