"""Which Ray cluster is meant, what its nodes can grant in Ray's terms, and the doctor's checks of it. Imports no Ray:
only the process next to it does (``driver``).
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpuherd.checks import CheckResult, Status, ask, version_of
from gpuherd.engines.base import Placement
from gpuherd.errors import GpuherdError, UsageError

# --- the address: a cluster that we join, one behind its job server, or one of our own --------------------------------

_FORMS = "HOST:PORT (a cluster that this machine belongs to) or http://HOST:8265 (its job server, from anywhere)"
_PROBE_S = 5.0
_LONGEST_NOTE = 1000


class ClusterKind(Enum):
    """How the cluster is reached."""

    OWN = "own"
    JOINED = "joined"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Address:
    """``text`` is HOST:PORT or an URL; "" for a cluster of our own, which is started and shut down by us."""

    kind: ClusterKind
    text: str = ""


def resolve(word: str | None, environment: Mapping[str, str]) -> Address:
    """The cluster of ``--ray-address``, or without it of RAY_ADDRESS; ``local`` is one of our own. Where neither is
    given (or is ``auto``): one that runs on this machine, found as Ray itself would, else one of our own. Raises
    UsageError."""
    where = "--ray-address"
    if word is None:
        word, where = environment.get("RAY_ADDRESS") or "auto", "RAY_ADDRESS"
    if word == "local":
        return Address(ClusterKind.OWN)
    if word != "auto":
        return _parsed(word, where)
    running = _running_here(environment)
    return Address(ClusterKind.OWN) if running is None else Address(ClusterKind.JOINED, running)


def answers(address: str, within_s: float = _PROBE_S) -> bool:
    """Whether something accepts a connection at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), within_s):
        return True
    return False


def _parsed(word: str, where: str) -> Address:
    if word.startswith(("http://", "https://")):
        if not _names_a_host(word):
            raise UsageError(f"{where} {word!r} is no address of a job server; give {_FORMS}")
        return Address(ClusterKind.SERVER, word.rstrip("/"))
    if "://" in word:
        scheme = word.partition("://")[0]
        raise UsageError(f"{where} {word!r}: {scheme}:// is not taken; give {_FORMS}")
    host, sign, port = word.rpartition(":")
    if not sign or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{where} {word!r} is no address of a Ray cluster; give {_FORMS}")
    return Address(ClusterKind.JOINED, word)


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # not a port, half an IPv6 address
        return False


def _running_here(environment: Mapping[str, str]) -> str | None:
    """The cluster that ``ray start`` has noted on this machine, if it still answers. Raises UsageError where the note
    is another user's: the owner of a cluster can run anything in our name there, and may have all GPUs.
    """
    folder = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"  # noqa: S108 - Ray's own place
    try:
        with (Path(folder) / "ray" / "ray_current_cluster").open(encoding="utf-8") as note:
            text, owner = note.read(_LONGEST_NOTE).strip(), os.fstat(note.fileno()).st_uid
    except (OSError, ValueError):
        return None
    try:
        joined = _parsed(text, "ray_current_cluster").kind is ClusterKind.JOINED and answers(text, 2.0)
    except UsageError:
        return None
    if joined and owner not in (0, os.geteuid()):
        raise UsageError(
            f"a Ray cluster of another user (uid {owner}) runs on this machine; --ray-address {text} means that one, "
            "--ray-address local one of our own"
        )
    return text if joined else None


# --- a parcel's resources in Ray's terms: whether any node can ever grant them, and why it waits ----------------------

GPU, CPU, MEMORY = "GPU", "CPU", "memory"
# Ray's own names, each with the flag that requests it.
_FLAGS = {
    GPU: "--gpus-per-job",
    CPU: "--cpus-per-job",
    MEMORY: "--host-mem",
    "object_store_memory": "nothing here",
}
_MB = 2**20


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A node that is alive: its total and free resources by Ray's names; memory in bytes."""

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
        if name in _FLAGS:
            raise UsageError(f"--ray-resources {word!r}: {name} is asked for by {_FLAGS[name]}")
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


def resources_per_node(placement: Placement, extra: Mapping[str, float], *, cpus: float) -> dict[str, float]:
    """The resources that it takes on each of its nodes. ``cpus``: Ray's default."""
    asked = {
        GPU: float(placement.gpus),
        CPU: float(cpus if placement.cpus is None else placement.cpus),
        MEMORY: float((placement.memory_mb or 0) * _MB),
        **extra,
    }
    return {name: amount for name, amount in asked.items() if amount > 0}


def turn_of(placement: Placement, notice_s: float) -> float | None:
    """Seconds after which a parcel is asked to make room; Ray itself has no time limit."""
    if placement.time_s is None:
        return None
    return placement.time_s - notice_s if placement.time_s > notice_s else placement.time_s


def never(placement: Placement, asked: Mapping[str, float], nodes: Collection[NodeCapacity]) -> str | None:
    """Why these nodes can never grant it; None where they can once it is free."""
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
    lacking = _short(asked, [node.total for node in nodes])
    names = list(lacking or asked)
    flags = " and ".join(_FLAGS.get(name, f"--ray-resources {name}=…") for name in names)
    if lacking:
        had = f"the most that any of the Ray cluster's {_count(len(nodes))} has is {_words(lacking)}"
    else:
        had = f"no single one of the Ray cluster's {_count(len(nodes))} has all of that"
    return (
        f"it asks for {_words({name: asked[name] for name in names})} on one node, and {had}; ask for less by {flags}"
    )


def _short(asked: Mapping[str, float], rooms: Collection[Mapping[str, float]]) -> dict[str, float]:
    """The resources of which no room has enough, and the most that any has."""
    most = {name: max(room.get(name, 0.0) for room in rooms) for name in asked}
    return {name: amount for name, amount in most.items() if amount < asked[name]}


def refused(
    placements: Iterable[Placement], asked: Callable[[Placement], Mapping[str, float]], nodes: Collection[NodeCapacity]
) -> dict[Placement, str]:
    """Those placements that these nodes can never grant, and why. ``asked``: a placement's resources in Ray's terms."""
    reasons = ((each, never(each, asked(each), nodes)) for each in placements)
    return {each: reason for each, reason in reasons if reason is not None}


def waits_for(count: int, asked: Mapping[str, float], nodes: Collection[NodeCapacity]) -> str:
    """Why a parcel that Ray has not placed waits."""
    if sum(_fits(asked, node.total) for node in nodes) < count:
        return f"Ray has no node with {_words(asked)} now; it starts when one joins"
    able = sum(_fits(asked, node.free) for node in nodes)
    if able >= count:
        return "Ray is about to start it"
    if count > 1:
        return f"waits for {count} nodes with {_words(asked)} free on each; {able} of {len(nodes)} have that"
    short = _short(asked, [node.free for node in nodes])
    if not short:
        return f"waits for {_words(asked)} on one node: they are free, but on different ones"
    return f"waits for {_words({name: asked[name] for name in short})}; at most {_words(short)} free on one node"


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


# --- the doctor's checks ----------------------------------------------------------------------------------------------

_GET_RAY = "pip install 'gpuherd[ray]'"
_RAY_WITHIN_S = 60.0
_DRIVER = "gpuherd.engines.ray.driver"
# With this word the driver prints the totals of a cluster as JSON.
LOOK = "look"


def find_ray(word: str | None) -> list[CheckResult]:
    """Ray, and the cluster of this --ray-address."""
    version = version_of("ray")
    if version is None:
        return [CheckResult("Ray", Status.FAIL, "not installed", _GET_RAY)]
    here = CheckResult("Ray", Status.OK, f"Ray {version}")
    try:
        address = resolve(word, os.environ)
    except GpuherdError as problem:
        return [here, CheckResult("Ray cluster", Status.FAIL, str(problem), "give --ray-address as it says")]
    if address.kind is ClusterKind.OWN:
        detail = "none runs here; gpuherd starts one on this machine for as long as it works"
        return [here, CheckResult("Ray cluster", Status.SKIP, detail, "ray start --head, or --ray-address of another")]
    place = address.text.partition("://")[2].partition("/")[0] if address.kind is ClusterKind.SERVER else address.text
    if address.kind is ClusterKind.SERVER and ":" not in place:
        place += ":443" if address.text.startswith("https") else ":80"
    if not answers(place):
        remedy = "ray start --head starts one; a remote one is reached by its job server, http://HOST:8265"
        return [here, CheckResult("Ray cluster", Status.FAIL, f"nothing answers at {address.text}", remedy)]
    if address.kind is ClusterKind.SERVER:
        return [here, CheckResult("Ray cluster", Status.OK, f"a job server answers at {address.text}")]
    answer = ask(_DRIVER, [LOOK, address.text], environment={}, timeout_s=_RAY_WITHIN_S)
    return [here, ray_cluster(address.text, answer.values, answer.error)]


def ray_cluster(address: str, info: Mapping[str, Any], error: str | None) -> CheckResult:
    """Judges the totals of a cluster that a process has joined (``look``)."""
    problem = error or info.get("error")
    if problem is not None:
        remedy = "both need the same versions of Ray and Python; see ray status on the cluster"
        return CheckResult("Ray cluster", Status.FAIL, f"{address}: {problem}", remedy)
    nodes = f"{info['nodes']} node{'s' if info['nodes'] != 1 else ''}"
    detail = f"{address}: {nodes}, {info['gpus']:g} GPUs, {info['cpus']:g} cores"
    if not info["gpus"]:
        remedy = "ray start --num-gpus N on the nodes that have some, if jobs want GPUs"
        return CheckResult("Ray cluster", Status.WARN, detail, remedy)
    return CheckResult("Ray cluster", Status.OK, detail)
