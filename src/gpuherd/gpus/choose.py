"""Chooses GPUs for a job among those that are free. Pure; knows nothing of jobs, leases or time.

Criteria, the most important first: GPUs that the user prefers; for several GPUs, how well they are linked; how little
they are used; the lower index. A set of GPUs works in step, so its slowest link counts first:

1. the fewest direct links (NVLink, XGMI) between any two of the set (more is better), then their sum;
2. the greatest PCIe distance between any two (less is better), then their sum;
3. the number of NUMA nodes that the set spreads over (fewer is better).

With ``keep_together`` sets that are as good as each other in this, and about as little used, are distinguished by what
they leave behind: the one goes whose GPUs are linked least to the other candidates, so that a job on one GPU doesn't
split a pair that a job on two could use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import comb

from gpuherd.gpus.state import Gpu, Proximity

# Up to this many sets all are compared, which takes well under a second; 16 GPUs never have more. Above, the set is
# grown from each GPU in turn, always by the GPU that keeps it best, and the best of those sets is taken.
MOST_SETS = 12_870

# Fewest NVLinks and their sum (negative: less is better), greatest distance and their sum, NUMA nodes.
Links = tuple[int, int, int, int, int]
_ALONE: Links = (0, 0, 0, 0, 1)
# By the UUIDs of two GPUs, either way round: NVLinks, and PCIe distance.
LinkMap = Mapping[tuple[str, str], tuple[int, int]]
Rank = tuple[Links, int, int, tuple[tuple[int, int], ...]]

# GPUs whose use differs by less are used about as little: an idle driver's few MB are no reason to split a pair.
_ABOUT_MB = 512
_ABOUT_PERCENT = 10


def choose(
    candidates: Sequence[Gpu],
    count: int,
    *,
    preference: Sequence[str] = (),
    memory_mb: int | None = None,
    total_mb: int | None = None,
    keep_together: bool = False,
    links: LinkMap | None = None,
) -> tuple[Gpu, ...] | None:
    """The best ``count`` of the candidates by the order above, or None when there are too few that fit.

    Args:
        candidates: GPUs that may be taken now.
        count: how many are needed; 0 gives ().
        preference: UUIDs, the most wanted first. GPUs that are not listed come after all that are.
        memory_mb: MB that must be free on each GPU.
        total_mb: MB that must be free on all the chosen together.
        keep_together: of sets that are as good, the one that splits up the fewest linked GPUs.
        links: ``links_between`` these GPUs (and others), from a caller that keeps it: links don't change.

    Returns:
        Preferred GPUs in the order of preference, then the others by index. MIG instances are given out one at a time
        only, since no process can use two of them.
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
    rest = _best_rest(wanted, others, count - len(wanted), needed_mb, keep_together, links)
    return None if rest is None else (*wanted, *sorted(rest, key=_position))


def _best_rest(
    wanted: Sequence[Gpu],
    others: Sequence[Gpu],
    count: int,
    needed_mb: int | None,
    keep_together: bool,
    links: LinkMap | None,
) -> tuple[Gpu, ...] | None:
    """The ``count`` of ``others`` that go best with ``wanted`` and have ``needed_mb`` free together."""
    by_load = sorted(others, key=_load)
    single = len(wanted) + count < 2 and not keep_together
    if needed_mb is None and (single or count in (0, len(others))):
        return tuple(by_load[:count])
    map_of_links = links_between([*wanted, *others]) if links is None else links
    if needed_mb is None and _all_alike([*wanted, *others], map_of_links):
        return tuple(by_load[:count])
    fitting = (
        group
        for group in _groups(wanted, by_load, count, map_of_links)
        if needed_mb is None or sum(gpu.free_mb for gpu in group) >= needed_mb
    )
    if not keep_together:
        return min(fitting, key=lambda group: _rank([*wanted, *group], map_of_links), default=None)
    return _least_missed(wanted, others, list(fitting), map_of_links)


def _least_missed(
    wanted: Sequence[Gpu],
    others: Sequence[Gpu],
    groups: Sequence[tuple[Gpu, ...]],
    map_of_links: LinkMap,
) -> tuple[Gpu, ...] | None:
    """Of the groups that are best linked and about as little used, the one linked least to what it leaves behind."""

    def about(group: Sequence[Gpu]) -> tuple[Links, int, int]:
        links, used_mb, percent, _ = _rank([*wanted, *group], map_of_links)
        return (links, used_mb // _ABOUT_MB, percent // _ABOUT_PERCENT)

    ranked = [(about(group), group) for group in groups]
    best = min((rank for rank, _ in ranked), default=None)
    equal = [group for rank, group in ranked if rank == best]
    if len(equal) < 2:
        return equal[0] if equal else None

    def missed(group: tuple[Gpu, ...]) -> tuple[tuple[int, int, int, int], Rank]:
        taken = {gpu.uuid for gpu in group}
        # Never empty: with nothing left behind there is but one group.
        ways = [map_of_links[uuid, left.uuid] for uuid in taken for left in others if left.uuid not in taken]
        nvlinks, nearness = [way[0] for way in ways], [-way[1] for way in ways]
        cut = (max(nvlinks), sum(nvlinks), max(nearness), sum(nearness))
        return cut, _rank([*wanted, *group], map_of_links)

    return min(equal, key=missed)


def links_between(gpus: Sequence[Gpu]) -> LinkMap:
    """Direct links and PCIe distance of every two GPUs; the greatest distance where nothing is known."""
    known = {(gpu.uuid, peer.uuid): (peer.nvlinks, int(peer.proximity)) for gpu in gpus for peer in gpu.peers}
    unknown = (0, int(Proximity.SYSTEM))
    return {
        (one.uuid, two.uuid): known.get((one.uuid, two.uuid), known.get((two.uuid, one.uuid), unknown))
        for one in gpus
        for two in gpus
        if one.uuid != two.uuid
    }


def _all_alike(gpus: Sequence[Gpu], map_of_links: LinkMap) -> bool:
    """Whether every two are linked alike, as behind an NVSwitch: then only the load matters."""
    if not any(gpu.peers for gpu in gpus):
        return len({gpu.numa_node for gpu in gpus}) < 2
    ways = {map_of_links[one.uuid, two.uuid] for one, two in combinations(gpus, 2)}
    return len(ways) < 2 and len({gpu.numa_node for gpu in gpus}) < 2


def _links(gpus: Sequence[Gpu], map_of_links: LinkMap) -> Links:
    if len(gpus) == 1:
        return _ALONE
    pairs = [map_of_links[one.uuid, two.uuid] for one, two in combinations(gpus, 2)]
    nvlinks, distances = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    numa_nodes = {gpu.numa_node for gpu in gpus}
    return (-min(nvlinks, default=0), -sum(nvlinks), max(distances, default=0), sum(distances), len(numa_nodes))


def _rank(gpus: Sequence[Gpu], map_of_links: LinkMap) -> Rank:
    used_mb = sum(gpu.used_mb for gpu in gpus)
    utilisation = sum(gpu.utilisation_percent or 0 for gpu in gpus)
    return (_links(gpus, map_of_links), used_mb, utilisation, tuple(sorted(map(_position, gpus))))


def _load(gpu: Gpu) -> tuple[int, int, tuple[int, int]]:
    return (gpu.used_mb, gpu.utilisation_percent or 0, _position(gpu))


def _position(gpu: Gpu) -> tuple[int, int]:
    return (gpu.index, gpu.mig_position or 0)


def _groups(
    wanted: Sequence[Gpu], others: Sequence[Gpu], count: int, map_of_links: LinkMap
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
