"""What a node tells of an attempt: files that are whole or not there, on a file system that several machines see.

An attempt is *claimed* before anything of it runs, by a hard link to a name that can be made only once: also over NFS
one of two wins, whatever the other believes. Whoever follows the attempt can claim it too, and so make sure that it
never begins (``void``). Its end is a second file, renamed into place. Nobody on a node opens the queue.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuherd.jobs.durable import atomic_write

_MOST_BYTES = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Who has an attempt. ``at`` is the node's wall clock.

    Attributes:
        void: nobody runs it: its follower has made sure that it never begins.
        node, handle: where it runs, and the engine's word for it there.
        gpus: what CUDA_VISIBLE_DEVICES holds there, taken apart.
        pid: its leader on the node.
    """

    at: float
    void: bool = False
    node: str = ""
    handle: str | None = None
    gpus: tuple[str, ...] = ()
    pid: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How an attempt has ended on its node. Seconds; MB (2^20 bytes).

    Attributes:
        at, ran_s: the end by the node's wall clock, and how long it ran by its own clock.
        started: whether the command itself ever ran; else ``problem`` says why not.
        code, signal: of its main process, as in ``engines.local.Exit``.
        limit, limit_s, stage: the limit for which the node ended it (words of ``timelimits.LimitKind``).
        interrupted: the engine had asked it to make room or told it that its time is nearly up.
        peak_mb: the most GPU memory that was seen, None where nobody looked.
    """

    at: float
    ran_s: float
    started: bool = True
    problem: str | None = None
    code: int | None = None
    signal: int | None = None
    limit: str | None = None
    limit_s: float | None = None
    stage: str | None = None
    interrupted: bool = False
    peak_mb: int | None = None


def take(path: Path, claim: Claim) -> bool:
    """Claims an attempt; False when somebody has it already. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(asdict(claim)).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        with suppress(FileExistsError):
            path.hardlink_to(temporary)
        # Over NFS the answer to a link may be lost though it was made: the number of names tells.
        return temporary.stat().st_nlink == 2
    finally:
        temporary.unlink(missing_ok=True)


def read_claim(path: Path) -> Claim | None:
    """Who has the attempt, None while nobody has it."""
    values = _read(path)
    return None if values is None else Claim(**{**values, "gpus": tuple(values["gpus"])})


def write_ended(path: Path, ended: Ended) -> None:
    """Tells of an end. Raises OSError, as on a full disk or over a quota."""
    atomic_write(path, json.dumps(asdict(ended)).encode() + b"\n")


def read_ended(path: Path) -> Ended | None:
    """How the attempt has ended, None while it has not."""
    values = _read(path)
    return None if values is None else Ended(**values)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return None
    return values if isinstance(values, dict) else None
