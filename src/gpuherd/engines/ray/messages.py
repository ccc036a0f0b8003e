"""Messages between the dispatcher and its process next to Ray, and which Ray cluster is meant."""

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

from gpuherd.engines.base import Batch, EngineAway, EngineMissing, Placement, Refused, Sighting
from gpuherd.engines.world import Join, Lead
from gpuherd.errors import GpuherdError, UsageError

# Which Ray cluster is meant: one that is joined, one behind its job server, or one of our own.

_FORMS = "HOST:PORT (a cluster that this machine belongs to) or http://HOST:8265 (its job server, from anywhere)"
_PROBE_S = 5.0
_LONGEST_NOTE = 1000


class Kind(Enum):
    """How the cluster is spoken to."""

    OWN = "own"
    JOINED = "joined"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Address:
    """``text`` is HOST:PORT or an URL; "" for a cluster of our own, which is started and shut down by us."""

    kind: Kind
    text: str = ""


def resolve(word: str | None, environment: Mapping[str, str]) -> Address:
    """The cluster that is meant by ``--ray-address``, and without it by RAY_ADDRESS; ``local`` is one of our own. Where
    neither says any (or ``auto``): one that runs on this machine, as Ray itself would look for it, else one of our own.
    Raises UsageError."""
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
    """Whether anybody takes a connection at HOST:PORT."""
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
    except ValueError:  # a port that is none, half an IPv6 address
        return False


def _running_here(environment: Mapping[str, str]) -> str | None:
    """The cluster that ``ray start`` has left a note of on this machine, if somebody answers there still. Raises
    UsageError where the note is another user's: who is joined can have anything run by us, and may have all GPUs.
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


# What the follower and its process beside Ray say to each other. Both are ours and of one version: pickled.


@dataclass(frozen=True, slots=True)
class Setup:
    """What the process begins with.

    Attributes:
        lead: leads an attempt in a worker of Ray: ``lead(manifest, index, stop, handle=…, others=…)``; a
            function that its module has by name.
        join: runs another node's part of an attempt over several: ``join(manifest, index, world, stop)``; None where
            there is none.
        resources: custom resources of each parcel.
        notice_s: so long before the time of a parcel is up it is asked to make room.
        folder: for the files of a cluster of our own; None for a cluster that is there.
    """

    address: Address
    lead: Lead
    join: Join | None
    resources: Mapping[str, float]
    notice_s: float
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Check:
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    batch: Batch


@dataclass(frozen=True, slots=True)
class Look:
    handles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    handles: tuple[str, ...]


Question = Setup | Check | Submit | Look | Cancel


@dataclass(frozen=True, slots=True)
class Answer:
    value: Any


@dataclass(frozen=True, slots=True)
class Problem:
    """An error that was raised on purpose, or ``kind`` "bug" with a traceback."""

    kind: str
    text: str
    may_pass: bool = False


_KINDS: dict[str, type[GpuherdError]] = {
    "missing": EngineMissing,
    "away": EngineAway,
    "usage": UsageError,
}


def problem_of(error: GpuherdError) -> Problem:
    """An error to be told."""
    if isinstance(error, Refused):
        return Problem("refused", str(error), error.may_pass)
    kind = next((name for name, type_ in _KINDS.items() if isinstance(error, type_)), "away")
    return Problem(kind, str(error))


def error_of(problem: Problem) -> Exception:
    """The error that was told."""
    if problem.kind == "refused":
        return Refused(problem.text, may_pass=problem.may_pass)
    if problem.kind in _KINDS:
        return _KINDS[problem.kind](problem.text)
    error = RuntimeError(f"the process beside Ray has failed: {problem.text.strip().splitlines()[-1]}")
    error.add_note(problem.text)
    return error


class Office(Protocol):
    """Who does the work beside Ray: with tasks, or by the job server. Parcels are called by their handles."""

    def check(self, placements: tuple[Placement, ...]) -> dict[Placement, str]: ...

    def submit(self, batch: Batch) -> list[str]: ...

    def look(self, handles: tuple[str, ...]) -> dict[str, Sighting]: ...

    def cancel(self, handles: tuple[str, ...]) -> None: ...

    def close(self) -> None: ...


def handle_of(batch: str, index: int) -> str:
    """A parcel's handle: known before Ray has heard of it, so that a lost answer loses nothing."""
    return f"{batch}-{index}"
