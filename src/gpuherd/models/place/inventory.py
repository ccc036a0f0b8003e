"""The GPUs that there are, as data for the planner: those of this machine, as they are now or as a job will find them,
and those of a cluster's node.

``gpuherd.gpus`` knows the driver. Only ``gpus_now`` and ``node_gpus`` look at anything, all else is pure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.gpus.choose import links_between
from gpuherd.gpus.idle import IdleRule, check
from gpuherd.gpus.state import Gpu
from gpuherd.gpus.visible import is_named
from gpuherd.models.memory.kv_cache import MIB
from gpuherd.models.place.gpus import GpuSpec, find_kind, nearest_kinds, parse_gpus

if TYPE_CHECKING:
    from gpuherd.engines.options import EngineOptions  # with the options of every engine

# What the driver keeps of a GPU for itself is less than this part of it. Where all GPUs of a size are in use, so that
# it can't be seen, it is taken to be so much.
_DRIVERS_PART = 0.02


@dataclass(frozen=True, slots=True)
class GpusNow:
    """What may be planned with now.

    Attributes:
        gpus: in an order in which neighbours are linked as well as they can be.
        left_out: a sentence for each GPU that is not among them, and why.
        problem: a sentence when this machine has no GPU, or its driver fails; None otherwise.
    """

    gpus: tuple[GpuSpec, ...]
    left_out: tuple[str, ...] = ()
    problem: str | None = None


def gpus_now(*, busy_too: bool = False) -> GpusNow:
    """Looks at the GPUs that this process sees. Memory that others use now is taken off.

    ``busy_too``: also GPUs that are busy by gpuherd's rule or held by a gpuherd, with what is left free on them.
    """
    from gpuherd.gpus.query import machine
    from gpuherd.gpus.visible import variable_of, visible_now

    now = machine(topology=True)
    shown = visible_now(now.gpus)
    problem = now.problem or (None if shown else f"{variable_of(now.maker)} shows no GPU")
    reason = _unavailable_reason()
    gpus, left_out = usable_gpus(shown, IdleRule(), reason, busy_too=busy_too, own_pid=os.getpid())
    return GpusNow(gpus, left_out, problem)


def _unavailable_reason() -> Callable[[Gpu], str | None]:
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

    @cache
    def own_pids() -> frozenset[int] | None:
        """Pids that hold GPUs for us; None where that is true of all: a job is shown its own GPUs only."""
        from gpuherd.engines.process_tree import ATTEMPT_VARIABLE  # not loaded where no GPU is held

        return None if ATTEMPT_VARIABLE in os.environ else _own_pids()

    def reason(gpu: Gpu) -> str | None:
        if is_named(gpu, excluded):
            return "kept from gpuherd by this machine's policy"
        holder = None if leases is None else leases.holder(gpu.uuid)
        if holder is None:
            return None
        ours = own_pids()
        return None if ours is None or holder.pid in ours else holder.sentence()

    return reason


def _own_pids() -> frozenset[int]:
    """This process and those that it comes from: what ``gpuherd run`` took, it took for us."""
    import psutil

    try:
        return frozenset((os.getpid(), *(parent.pid for parent in psutil.Process().parents())))
    except psutil.Error:
        return frozenset((os.getpid(),))


def usable_gpus(
    gpus: Sequence[Gpu],
    rule: IdleRule,
    taken: Callable[[Gpu], str | None],
    *,
    busy_too: bool = False,
    own_pid: int | None = None,
) -> tuple[tuple[GpuSpec, ...], tuple[str, ...]]:
    """Those that can be planned with, ordered by links, and a sentence for each that is left out.

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
    return tuple(spec_of(gpu, gpu.free_mb) for gpu in linked_order(usable)), tuple(left_out)


def idle_gpus(gpus: Sequence[Gpu]) -> tuple[GpuSpec, ...]:
    """These GPUs as a job will find them: with no process on them. GPUs that have a problem or are split are left out.

    What the driver keeps for itself is what the emptiest GPU of the same size has in use, at most 2 %.
    """
    usable = [gpu for gpu in gpus if gpu.problem is None and not gpu.mig_instances and gpu.total_mb > 0]
    drivers: dict[int, int] = {}
    for gpu in usable:
        most = int(_DRIVERS_PART * gpu.total_mb)
        drivers[gpu.total_mb] = min(drivers.get(gpu.total_mb, most), max(0, gpu.total_mb - gpu.free_mb))
    return tuple(spec_of(gpu, gpu.total_mb - drivers[gpu.total_mb]) for gpu in usable)


def spec_of(gpu: Gpu, free_mb: int) -> GpuSpec:
    """A GPU of this machine with so much free memory, as the planner knows it."""
    return GpuSpec(
        label=gpu.label,
        name=gpu.name,
        total=gpu.total_mb * MIB,
        free=free_mb * MIB,
        capability=gpu.compute_capability,
        uuid=gpu.uuid,
        mig=gpu.mig_parent is not None,
    )


def linked_order(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs so that each is well linked to the next: hidden states go from neighbour to neighbour, and a run of
    neighbours is a well linked set.

    From each GPU in turn a chain is grown by the one that is linked best to the chain's end (more NVLinks, then nearer
    on PCIe, then the lower index); the chain of the most links in all is taken, of equal ones that which begins with
    the best links, so that the first GPUs are a well linked set, whatever their number.
    """
    ways = links_between(gpus)

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


# ---- a cluster's node, for which jobs that name a model are planned: as the user says, or as the cluster reports -----
#
# No driver is asked: where a command is typed there need not be a GPU.

FLAG = "--node-gpus"
_HINT = f"say what a node has by {FLAG}, like {FLAG} 4xA100-80GB"


def node_gpus(options: EngineOptions) -> tuple[GpuSpec, ...]:
    """The GPUs of one node of the cluster that these options name, as free as when no process uses them.

    Raises UsageError where neither the user nor the cluster says what they are; EngineMissing, EngineAway.
    """
    return parse_node_gpus(options.node_gpus) if options.node_gpus is not None else _reported_gpus(options)


def parse_node_gpus(words: str) -> tuple[GpuSpec, ...]:
    """The GPUs of a node as ``--node-gpus`` says them. Raises UsageError for words that make no sense."""
    return parse_gpus(words, flag=FLAG)


@cache
def _reported_gpus(options: EngineOptions) -> tuple[GpuSpec, ...]:
    """Asked once: the jobs of a file may name many models."""
    spec = options.spec
    nodes = spec.inventory(options)
    if nodes is None:
        raise UsageError(
            f"--engine {spec.name} doesn't tell what GPUs a node has, and a model is to be planned; {_HINT}"
        )
    return gpus_of_nodes(nodes, spec.title, spec.gpu_type_flag)


def gpus_of_nodes(nodes: Sequence[Mapping[str, int]], title: str, flag: str | None = None) -> tuple[GpuSpec, ...]:
    """The GPUs of the largest node. Pure.

    Args:
        nodes: GPUs of each node, how many of each type; "" where the site names no types.
        title: the engine's.
        flag: chooses a type, where the engine has such a flag.

    Raises UsageError for nodes without GPUs, for several types of which a job could get any, and for a type of which
    it isn't known how much memory it has.

    >>> [gpu.name for gpu in gpus_of_nodes([{"h100": 2}, {}, {"h100": 4}], "SLURM")]
    ['H100', 'H100', 'H100', 'H100']
    """
    types = sorted({name for node in nodes for name in node})
    if not types:
        raise UsageError(f"{title} tells of no GPUs there, and a model is to be planned; {_HINT}")
    if len(types) > 1:
        types_there = ", ".join(name or "without a type" for name in types)
        choose = "" if flag is None else f"choose one by {flag}, or "
        raise UsageError(f"the nodes there have GPUs of several types ({types_there}); {choose}{_HINT}")
    (name,) = types
    if not name:
        raise UsageError(f"{title} does not tell of what type its GPUs are, and a model is to be planned; {_HINT}")
    word = name.replace("_", " ")
    kind = find_kind(word)
    if kind is None:
        near = nearest_kinds(word)
        meant = f" (is it {' or '.join(near)}?)" if near else ""
        raise UsageError(f"{title} calls the GPUs {name!r}: how much memory they have is not known{meant}; {_HINT}")
    return parse_gpus(f"{max(node.get(name, 0) for node in nodes)}x{kind.name}")
