"""Which blocks leave the GPUs when a model doesn't fit there and somebody allowed that. Pure.

accelerate computes an offloaded block on the first GPU: its weights come there for the moment, and what it keeps of
each sequence stays there. So the first GPU must have room for the largest of them and for all that they keep.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuherd.models.load.options import Offload
from gpuherd.models.load.placed import Device
from gpuherd.models.place.gpus import GpuSpec
from gpuherd.models.place.split import cuts_allowed, ties_together
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.precision import Precision
from gpuherd.models.plan.usage import CostTable
from gpuherd.models.plan.workload import Reserve, Workload


def offloaded(
    architecture: Architecture,
    cards: Sequence[GpuSpec],
    precision: Precision,
    workload: Workload,
    reserve: Reserve,
    where: Offload,
) -> tuple[Architecture, tuple[Device, ...]] | None:
    """As many leading blocks as can be on the cards, one card after the other, the others at ``where``.

    Returns the architecture, its tied blocks side by side, and the device of each block, cards by their number; None
    where the cards have no room even so.
    """
    architecture = ties_together(architecture) or architecture
    table = CostTable(architecture, precision, workload, reserve)
    count = len(architecture.blocks)
    cuts = cuts_allowed(architecture)
    for kept in reversed(cuts[1:-1]):
        taken = max(sum(table.weights(block, block + 1)) for block in range(kept, count))
        aside = taken + table.cache(kept, count).largest
        needed = max(table.workspace(kept, count))
        devices = _filled(table, cards, [cut for cut in cuts if cut <= kept], aside, needed)
        if devices is not None:
            return architecture, (*devices, *([where] * (count - kept)))
    return None


def _filled(
    table: CostTable, cards: Sequence[GpuSpec], cuts: Sequence[int], aside: int, workspace: int
) -> tuple[Device, ...] | None:
    """The card of each block before the last cut; the first card keeps ``aside`` free, and that much workspace."""
    devices: list[Device] = []
    for number, card in enumerate(cards):
        first = after = len(devices)
        for cut in (cut for cut in cuts if cut > first):
            usage = table.usage(first, cut, card)
            beside = max(0, workspace - usage.workspace) + aside if number == 0 else 0
            if usage.total + beside > card.free:
                break
            after = cut
        devices += [number] * (after - first)
        if number == 0 and not devices:
            return None
    return tuple(devices) if len(devices) == cuts[-1] else None
