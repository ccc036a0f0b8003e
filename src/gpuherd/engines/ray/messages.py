"""Messages between the dispatcher and its process next to Ray, and the address of the Ray cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from gpuherd.engines.base import Batch, Placement, Sighting
from gpuherd.engines.world import Join, Lead
from gpuherd.errors import UsageError

# The Ray cluster: one that we join, one behind its job server, or one of our own.

_FORMS = "HOST:PORT (a cluster that this machine belongs to) or http://HOST:8265 (its job server, from anywhere)"
_PROBE_S = 5.0
_LONGEST_NOTE = 1000


class Kind(Enum):
    """How the cluster is reached."""

    OWN = "own"
    JOINED = "joined"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Address:
    """``text`` is HOST:PORT or an URL; "" for a cluster of our own, which is started and shut down by us."""

    kind: Kind
    text: str = ""


def resolve(word: str | None, environment: Mapping[str, str]) -> Address:
    """The cluster of ``--ray-address``, or without it of RAY_ADDRESS; ``local`` is one of our own. Where neither is
    given (or is ``auto``): one that runs on this machine, found as Ray itself would, else one of our own. Raises
    UsageError."""
    where = "--ray-address"
    if word is None:
        word, where = environment.get("RAY_ADDRESS") or "auto", "RAY_ADDRESS"
    if word == "local":
        return Address(Kind.OWN)
    if word != "auto":
        return _parsed(word, where)
    running = _running_here(environment)
    return Address(Kind.OWN) if running is None else Address(Kind.JOINED, running)


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
        return Address(Kind.SERVER, word.rstrip("/"))
    if "://" in word:
        scheme = word.partition("://")[0]
        raise UsageError(f"{where} {word!r}: {scheme}:// is not taken; give {_FORMS}")
    host, sign, port = word.rpartition(":")
    if not sign or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{where} {word!r} is no address of a Ray cluster; give {_FORMS}")
    return Address(Kind.JOINED, word)


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
        joined = _parsed(text, "ray_current_cluster").kind is Kind.JOINED and answers(text, 2.0)
    except UsageError:
        return None
    if joined and owner not in (0, os.geteuid()):
        raise UsageError(
            f"a Ray cluster of another user (uid {owner}) runs on this machine; --ray-address {text} means that one, "
            "--ray-address local one of our own"
        )
    return text if joined else None


# What the dispatcher and its process next to Ray exchange: a question is the name of a method of ``RayClient`` and its
# argument (``SETUP``: that makes one), an answer whether that went well, and its result or error. Both processes are
# ours and of one version, so all is pickled.

SETUP = "setup"
Question = tuple[str, Any]
Answer = tuple[bool, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to the process.

    Attributes:
        lead: leads an attempt in a worker of Ray: ``lead(manifest, index, stop, handle=…, others=…)``; a function that
            is importable from its module.
        join: runs another node's part of an attempt over several: ``join(manifest, index, world, stop)``; None
            without one.
        resources: custom resources of each parcel.
        notice_s: seconds before its time is up at which a parcel is asked to make room.
        folder: for the files of a cluster of our own; None for one that runs already.
    """

    address: Address
    lead: Lead
    join: Join | None
    resources: Mapping[str, float]
    notice_s: float
    folder: Path | None = None


class RayClient(Protocol):
    """Does the work next to Ray: with tasks, or by the job server. Parcels are named by their handles."""

    def check(self, placements: tuple[Placement, ...]) -> dict[Placement, str]: ...

    def submit(self, batch: Batch) -> list[str]: ...

    def look(self, handles: tuple[str, ...]) -> dict[str, Sighting]: ...

    def cancel(self, handles: tuple[str, ...]) -> None: ...

    def close(self) -> None: ...


def handle_of(batch: str, index: int) -> str:
    """A parcel's handle: known before Ray has it, so that a lost answer loses nothing."""
    return f"{batch}-{index}"
