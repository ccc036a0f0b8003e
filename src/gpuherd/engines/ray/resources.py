"""What a parcel asks of a node in Ray's words, whether any node could ever give it, and what it waits for. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from gpuherd.engines.cluster import Placement
from gpuherd.errors import UsageError

GPU, CPU, MEMORY = "GPU", "CPU", "memory"
# Ray's own names, each with the flag that is meant.
_OWN = {"GPU": "--gpus-per-job", "CPU": "--cpus-per-job", "memory": "--host-mem", "object_store_memory": "nothing here"}
_MB = 2**20
_FLAGS = {GPU: "--gpus-per-job", CPU: "--cpus-per-job", MEMORY: "--host-mem"}


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node that is alive: what it has and what of it is free, by Ray's names; memory in bytes."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def custom(words: Iterable[str]) -> dict[str, float]:
    """Custom resources from words like ``licence=1``. Raises UsageError."""
    found: dict[str, float] = {}
    for word in words:
        name, sign, amount = word.rpartition("=")
        if not sign or not name:
            raise UsageError(f"--ray-resources {word!r}: it is NAME=AMOUNT, like licence=1")
        if name in _OWN:
            raise UsageError(f"--ray-resources {word!r}: {name} is asked for by {_OWN[name]}")
        if name in found:
            raise UsageError(f"--ray-resources names {name!r} twice")
        found[name] = _amount(word, amount)
    return found


def _amount(word: str, amount: str) -> float:
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf or (value > 1 and value != int(value)):
        raise UsageError(f"--ray-resources {word!r}: the amount is a whole number, or a part of 1 like 0.5")
    return value


def wanted(placement: Placement, extra: Mapping[str, float], *, cpus: float) -> dict[str, float]:
    """What it takes of each of its nodes. ``cpus``: what Ray gives where nothing is said."""
    asked = {
        GPU: float(placement.gpus),
        CPU: float(cpus if placement.cpus is None else placement.cpus),
        MEMORY: float((placement.memory_mb or 0) * _MB),
        **extra,
    }
    return {name: amount for name, amount in asked.items() if amount > 0}


def turn_of(placement: Placement, notice_s: float) -> float | None:
    """After how many seconds a parcel is asked to make room; Ray itself knows no time limit."""
    if placement.time_s is None:
        return None
    return placement.time_s - notice_s if placement.time_s > notice_s else placement.time_s


def never(placement: Placement, asked: Mapping[str, float], nodes: Collection[NodeRoom]) -> str | None:
    """Why these nodes can never give it, None where they can (some day, when it is free)."""
    able = sum(_fits(asked, node.total) for node in nodes)
    if able >= placement.nodes:
        return None
    if not nodes:
        return "the Ray cluster has no node that is alive"
    if able:
        return (
            f"it asks for {placement.nodes} nodes with {_words(asked)} each, and {able} of the Ray cluster's "
            f"{len(nodes)} nodes {'has' if able == 1 else 'have'} that; ask for fewer nodes"
        )
    lacking = [name for name in asked if max(node.total.get(name, 0.0) for node in nodes) < asked[name]]
    names = lacking or list(asked)
    most = {name: max(node.total.get(name, 0.0) for node in nodes) for name in names}
    flags = " and ".join(_FLAGS.get(name, f"--ray-resources {name}=…") for name in names)
    if lacking:
        had = f"the most that any of the Ray cluster's {_count(len(nodes))} has is {_words(most)}"
    else:
        had = f"no single one of the Ray cluster's {_count(len(nodes))} has all of that"
    return (
        f"it asks for {_words({name: asked[name] for name in names})} on one node, and {had}; ask for less by {flags}"
    )


def refused(
    placements: Iterable[Placement], asked: Callable[[Placement], Mapping[str, float]], nodes: Collection[NodeRoom]
) -> dict[Placement, str]:
    """Those of the placements that these nodes can never give, and why. ``asked``: one in Ray's words."""
    reasons = ((each, never(each, asked(each), nodes)) for each in placements)
    return {each: reason for each, reason in reasons if reason is not None}


def waits_for(count: int, asked: Mapping[str, float], nodes: Collection[NodeRoom]) -> str:
    """What a parcel that Ray has not placed waits for."""
    if sum(_fits(asked, node.total) for node in nodes) < count:
        return f"Ray has no node with {_words(asked)} now; it starts when one joins"
    able = sum(_fits(asked, node.free) for node in nodes)
    if able >= count:
        return "Ray is about to start it"
    if count > 1:
        return f"waits for {count} nodes with {_words(asked)} free on each; {able} of {len(nodes)} have that"
    short = [name for name in asked if max(node.free.get(name, 0.0) for node in nodes) < asked[name]]
    if not short:
        return f"waits for {_words(asked)} on one node: they are free, but on different ones"
    most = {name: max(node.free.get(name, 0.0) for node in nodes) for name in short}
    return f"waits for {_words({name: asked[name] for name in short})}; at most {_words(most)} free on one node"


def _fits(asked: Mapping[str, float], room: Mapping[str, float]) -> bool:
    return all(room.get(name, 0.0) >= amount for name, amount in asked.items())


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _words(amounts: Mapping[str, float]) -> str:
    """``2 GPUs, 16 CPUs and 30.0 GB of memory``."""
    words = [_amount_words(name, amount) for name, amount in amounts.items()]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _amount_words(name: str, amount: float) -> str:
    if name == MEMORY:
        return f"{amount / 2**30:.1f} GB of memory"
    unit = name if name not in (GPU, CPU) or amount == 1 else f"{name}s"
    return f"{amount:g} {unit}"
