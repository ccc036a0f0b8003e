"""Which matrices of a model go to a GPU together, to which GPU, and what that takes: plans from sizes alone.

Pure, and light: the planner of jobs reads it too, so that the memory a job asks for is the memory its lanes take. It
knows nothing of tensors, files or cards. The figures in the tables are what `benchmarks/gpu_esd.py` measures.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

MB = 2**20

# Up to this side a matrix costs the GPU more in launches than the CPU takes for all of it (a values-only solver takes
# about 3 ms for n = 256, a GPU 20 µs for each of n columns), so that it is computed on the CPU.
HOST_SIDE = 256
# How many Gram matrices one call of the solver takes, by their side: up to the side on the left. Small ones leave most
# of a GPU idle and share one launch; from 1024 on several streams keep it busy as well and begin sooner.
BATCHES = ((512, 32), (1023, 8))
# Matrices at work on one GPU at a time, each in its own lane with its own stream: the reduction to tridiagonal form is
# a chain of launches, one or more a column, bound by latency and memory traffic, and several of them overlap.
MOST_LANES = 8
LEAST_LANES = 2
# What the lanes of one GPU take together, where more than LEAST_LANES would take more.
LANES_BYTES = 8 << 30
# In float64 and for a square matrix: the Gram matrix, the solver's copy of it and its workspace.
GRAM_COPIES = 3
# A piece of 32 MB as stored, as much of it as makes a panel of 32 MB in float64, and the libraries' workspace.
LANE_BYTES = 128 * MB
PANEL_BYTES = 32 * MB
PANEL_MIN = 256

# A matrix on a card of 40 Tflop/s and 3 TB/s with 20 µs a column, for shares between GPUs: only ratios count.
_FLOPS, _BYTES_A_SECOND, _LAUNCH_S = 40e12, 3e12, 20e-6


@dataclass(frozen=True, slots=True)
class Size:
    """What a plan has to know of a matrix.

    Attributes:
        index: its number in the model.
        side: the smaller one of rows and columns: the side of its Gram matrix.
        long: the larger one.
        pieces: 1, or the kernel positions of a convolution.
        bundle: matrices of one bundle are read from one tensor one after the other, by one lane; None: by itself.
        on_host: it is computed on the CPU whatever its size.
    """

    index: int
    side: int
    long: int
    pieces: int = 1
    bundle: Hashable = None
    on_host: bool = False

    @property
    def cost(self) -> float:
        """Seconds on a GPU, roughly."""
        gram = 2.0 * self.side**2 * self.long / _FLOPS
        reduction = 8 / 3 * self.side**3 / _BYTES_A_SECOND + self.side * _LAUNCH_S
        return self.pieces * (gram + reduction)


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """Matrices that one lane takes in this order. ``device`` is the number of its GPU, None for the CPU."""

    indices: tuple[int, ...]
    cost: float
    device: int | None


@dataclass(frozen=True, slots=True)
class LanePlan:
    """What each GPU does.

    Attributes:
        lanes: lanes a GPU.
        groups: in the order in which they are read: the costliest first.
    """

    lanes: int
    groups: tuple[MatrixGroup, ...]


def plan_lanes(sizes: Sequence[Size], devices: int, free_bytes: int | None = None) -> LanePlan:
    """Spreads the matrices over the GPUs and gathers small ones of one side to be solved together.

    Args:
        sizes: of the matrices to analyse.
        devices: how many GPUs, 1 or more.
        free_bytes: free memory of the GPU that has least, None where that is not known. It can only lower the number
            of lanes, so that the groups, and with them the figures to the last bit, don't depend on it.
    """
    on_device = [size for size in sizes if not (size.on_host or size.side <= HOST_SIDE)]
    chosen = {size.index for size in on_device}
    rest = _gathered([size for size in sizes if size.index not in chosen], lanes=max(1, len(sizes)))
    host = tuple(MatrixGroup(indices, 0.0, None) for indices in rest)
    if not on_device:
        return LanePlan(1, host)
    largest = max(size.side for size in on_device)
    most = lanes_at(largest)
    lanes = most if free_bytes is None else max(1, min(most, free_bytes // lane_bytes(largest)))
    cost_of = {size.index: size.cost for size in on_device}
    gathered = _gathered(on_device, devices * most)
    costs = [sum(cost_of[index] for index in indices) for indices in gathered]
    where = assign(costs, devices)
    groups = [MatrixGroup(indices, cost, device) for indices, cost, device in zip(gathered, costs, where, strict=True)]
    groups.sort(key=lambda group: (-group.cost, group.indices))
    return LanePlan(lanes, (*groups, *host))


def assign(costs: Sequence[float], devices: int) -> tuple[int, ...]:
    """The device of each piece of work: the largest first, each to the device that has least so far (LPT).

    The last device to end does so within 4/3 - 1/(3 devices) of the least possible time (Graham 1969, theorem 2).
    """
    loads = [(0.0, device) for device in range(devices)]
    result = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        load, device = heapq.heappop(loads)
        result[number] = device
        heapq.heappush(loads, (load + costs[number], device))
    return tuple(result)


def batch_of(side: int) -> int:
    """How many Gram matrices of this side one call of the solver takes: 1 or more."""
    return next((batch for most, batch in BATCHES if side <= most), 1)


def lanes_at(side: int) -> int:
    """Matrices at work at a time on one GPU, where the largest has this side."""
    return max(LEAST_LANES, min(MOST_LANES, LANES_BYTES // lane_bytes(side)))


def lane_bytes(side: int) -> int:
    """GPU memory that a lane takes at most for matrices of up to this side, whole batches of the smaller ones included.

    The compensated form (`device`) takes one and a half Gram matrices and 56 KB a row, which is less.
    """
    numbers = batch_of(side) * side**2
    numbers = max(numbers, *(batch * most**2 for most, batch in BATCHES if most < side), 0)
    return GRAM_COPIES * 8 * numbers + max(LANE_BYTES, 4 * 8 * PANEL_MIN * side)


def peak_bytes(side: int, *, parallel: bool) -> int:
    """GPU memory that the analysis takes on each GPU in addition to what CUDA itself needs; ``side`` is the largest."""
    return lane_bytes(side) * (lanes_at(side) if parallel else 1)


def panel_length(side: int, item: int = 8) -> int:
    """How much of the longer side is taken at a time, at ``item`` bytes a number: 32 MB, or 256 where that is more."""
    return max(PANEL_MIN, PANEL_BYTES // (item * max(side, 1)))


def _gathered(sizes: Iterable[Size], lanes: int) -> list[tuple[int, ...]]:
    """Bundles as they are; of the others those of one side in batches, but no larger than leaves work for each lane."""
    bundles: defaultdict[Hashable, list[int]] = defaultdict(list)
    sides: defaultdict[int, list[int]] = defaultdict(list)
    alone: list[int] = []
    for size in sizes:
        if size.bundle is not None:
            bundles[size.bundle].append(size.index)
        elif size.pieces == 1:
            sides[size.side].append(size.index)
        else:
            alone.append(size.index)
    result = [tuple(indices) for indices in bundles.values()] + [(index,) for index in alone]
    for side, indices in sides.items():
        step = min(batch_of(side), math.ceil(len(indices) / lanes))
        result += [tuple(indices[start : start + step]) for start in range(0, len(indices), step)]
    return sorted(result)
