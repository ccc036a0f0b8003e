"""Which of the free GPUs a job gets. Pure; knows nothing of jobs, leases or time.

The order of what counts: GPUs that the user prefers; for several GPUs, how well they are linked; how little they are
used; the lower index. A set of GPUs works in step, so its slowest link counts first:

1. the fewest NVLinks between any two of the set (more is better), then their sum;
2. the greatest PCIe distance between any two (less is better), then their sum;
3. the number of NUMA nodes that the set spreads over (fewer is better).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb

from gpuherd.gpus.state import Gpu, Proximity

# Up to this many sets all are compared, which takes well under a second; 16 GPUs never have more. Above, the set is
# grown from each GPU in turn, always by the GPU that keeps it best, and the best of those sets is taken.
MOST_SETS = 12_870

# Fewest NVLinks and their sum (negative: less is better), greatest distance and their sum, NUMA nodes.
Links = tuple[int, int, int, int, int]
Rank = tuple[Links, int, int, tuple[tuple[int, int], ...]]


def choose(
    candidates: Sequence[Gpu],
    count: int,
    *,
    preference: Sequence[str] = (),
    memory_mb: int | None = None,
    total_mb: int | None = None,
) -> tuple[Gpu, ...] | None:
    """The best ``count`` of the candidates by the order above, or None when there are too few that fit.

    Args:
        candidates: GPUs that may be taken now.
        count: how many are needed; 0 gives ().
        preference: UUIDs, the most wanted first. GPUs that are not listed come after all that are.
        memory_mb: MB that must be free on each GPU.
        total_mb: MB that must be free on all the chosen together.

    Returns:
        Preferred GPUs in the order of preference, then the others by index. MIG instances are given out one at a time
        only, since CUDA never uses two of them in one process.
    """
    usable = [gpu for gpu in candidates if memory_mb is None or gpu.free_mb >= memory_mb]
    if count > 1:
        usable = [gpu for gpu in usable if gpu.mig_parent is None]
    if count > len(usable):
        return None
    place = {uuid: position for position, uuid in reversed(list(enumerate(preference)))}
    wanted = sorted((gpu for gpu in usable if gpu.uuid in place), key=lambda gpu: place[gpu.uuid])[:count]
    others = [gpu for gpu in usable if gpu.uuid not in place]
    needed_mb = None if total_mb is None else total_mb - sum(gpu.free_mb for gpu in wanted)
    rest = _best_rest(wanted, others, count - len(wanted), needed_mb)
    return None if rest is None else (*wanted, *sorted(rest, key=_position))


def _best_rest(
    wanted: Sequence[Gpu], others: Sequence[Gpu], count: int, needed_mb: int | None
) -> tuple[Gpu, ...] | None:
    """The ``count`` of ``others`` that go best with ``wanted`` and have ``needed_mb`` free together."""
    by_load = sorted(others, key=_load)
    if needed_mb is None and (len(wanted) + count < 2 or _all_alike([*wanted, *others])):
        return tuple(by_load[:count])
    map_of_links = _pairs([*wanted, *others])
    fitting = (
        group
        for group in _groups(wanted, by_load, count, map_of_links)
        if needed_mb is None or sum(gpu.free_mb for gpu in group) >= needed_mb
    )
    return min(fitting, key=lambda group: _rank([*wanted, *group], map_of_links), default=None)


Pair = tuple[int, int]


def _pairs(gpus: Sequence[Gpu]) -> dict[tuple[str, str], Pair]:
    """NVLinks and PCIe distance of every two GPUs; two that say nothing of each other are as far apart as can be."""
    known = {(gpu.uuid, peer.uuid): (peer.nvlinks, int(peer.proximity)) for gpu in gpus for peer in gpu.peers}
    unknown = (0, int(Proximity.SYSTEM))
    return {
        (one.uuid, two.uuid): known.get((one.uuid, two.uuid), known.get((two.uuid, one.uuid), unknown))
        for one in gpus
        for two in gpus
        if one.uuid != two.uuid
    }


def _all_alike(gpus: Sequence[Gpu]) -> bool:
    """Whether every two are linked alike, as behind an NVSwitch: then only the load matters."""
    return len(set(_pairs(gpus).values())) < 2 and len({gpu.numa_node for gpu in gpus}) < 2


def _links(gpus: Sequence[Gpu], map_of_links: dict[tuple[str, str], Pair]) -> Links:
    pairs = [map_of_links[one.uuid, two.uuid] for one, two in combinations(gpus, 2)]
    nvlinks, distances = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    numa_nodes = {gpu.numa_node for gpu in gpus}
    return (-min(nvlinks, default=0), -sum(nvlinks), max(distances, default=0), sum(distances), len(numa_nodes))


def _rank(gpus: Sequence[Gpu], map_of_links: dict[tuple[str, str], Pair]) -> Rank:
    used_mb = sum(gpu.used_mb for gpu in gpus)
    utilisation = sum(gpu.utilisation_percent or 0 for gpu in gpus)
    return (_links(gpus, map_of_links), used_mb, utilisation, tuple(sorted(map(_position, gpus))))


def _load(gpu: Gpu) -> tuple[int, int, tuple[int, int]]:
    return (gpu.used_mb, gpu.utilisation_percent or 0, _position(gpu))


def _position(gpu: Gpu) -> tuple[int, int]:
    return (gpu.index, gpu.mig_position or 0)


def _groups(
    wanted: Sequence[Gpu], others: Sequence[Gpu], count: int, map_of_links: dict[tuple[str, str], Pair]
) -> Iterator[tuple[Gpu, ...]]:
    if comb(len(others), count) <= MOST_SETS:
        yield from combinations(others, count)
        return
    # Memory alone, for the case that no well linked set has enough of it.
    yield tuple(sorted(others, key=lambda gpu: -gpu.free_mb)[:count])
    for first in others:
        group = [first]
        while len(group) < count:
            left = [gpu for gpu in others if gpu not in group]
            group.append(min(left, key=lambda gpu: _rank([*wanted, *group, gpu], map_of_links)))
        yield tuple(group)
