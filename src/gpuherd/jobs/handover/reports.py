"""What a node tells of an attempt: files that are whole or not there, on a file system that several machines see.

An attempt is *claimed* before anything of it runs, by a hard link to a name that can be made only once: also over NFS
one of two wins, whatever the other believes. Whoever follows the attempt can claim it too, and so make sure that it
never begins (``void``). Its end is a second file, renamed into place. Nobody on a node opens the queue.

Who reads may see a file late, and must not take that for an answer: a client of NFS may hold for up to a minute that a
name is not there. ``present`` asks the server, by opening the folder. A name is only ever made once and what it names
never changes, so that what was read once stays true. What must not be late, whether an attempt may still begin, is not
read at all but claimed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from gpuherd.exclusive import NO_LINKS
from gpuherd.jobs.durable import atomic_write

_MOST_BYTES = 65536
# More than any second, number or size that is told.
_MOST = 1e15
_KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, NoneType),
    "int": (int,),
    "int | None": (int, NoneType),
    "float": (int, float),
    "float | None": (int, float, NoneType),
    "tuple[str, ...]": (list,),
}
# What is said of a file that is not there.
NOT_NOW = frozenset({errno.ENOENT, errno.ESTALE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Who has an attempt, or another node's part of one. ``at`` is the node's wall clock.

    Attributes:
        void: nobody runs it: its follower has made sure that it never begins, or its leader has, which was started
            before what the attempt needs had succeeded.
        node, handle: where it runs, and the engine's word for it there.
        gpus: what CUDA_VISIBLE_DEVICES holds there, taken apart.
        others: the names of its further nodes, where they are known.
        pid: its leader on the node.
        why: of a void one, why it was taken back (a name of ``settle.Blameless``); "" where the engine knows.
    """

    at: float
    void: bool = False
    node: str = ""
    handle: str | None = None
    gpus: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    pid: int = 0
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How an attempt has ended on its node. Seconds; MB (2^20 bytes).

    Attributes:
        at, ran_s: the end by the node's wall clock, and how long it ran by its own clock.
        started: whether the command itself ever ran; else ``problem`` says why not.
        code, signal: of its main process, as in ``engines.local.Exit``.
        has_result: whether the job's result was there, as the node saw it, who wrote it (True for a job without one).
        limit, limit_s, stage: the limit for which the node ended it (words of ``timelimits.LimitKind``).
        interrupted: it was ended to make room, because its time is nearly up, or because its leader was lost.
        peak_mb: the most memory that it was seen to use on one GPU, None where nobody looked.
    """

    at: float
    ran_s: float
    started: bool = True
    problem: str | None = None
    code: int | None = None
    signal: int | None = None
    has_result: bool = True
    limit: str | None = None
    limit_s: float | None = None
    stage: str | None = None
    interrupted: bool = False
    peak_mb: int | None = None

    @property
    def well(self) -> bool:
        """Whether the job has succeeded; also when it was told to end and had done its work."""
        return self.started and self.code == 0 and self.has_result


def visible_gpus(variables: Mapping[str, str]) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES holds, taken apart."""
    return tuple(name for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)


def take(path: Path, claim: Claim) -> bool:
    """Claims an attempt; False when somebody has it already. Raises OSError, as on a file system without hard links."""
    return once(path, json.dumps(asdict(claim)).encode())


def once(path: Path, data: bytes) -> bool:
    """Makes a file that is whole from the first moment and can be made only once; False when somebody has made it.

    Raises OSError, as on a file system without hard links.
    """
    # A name that nobody else has, also where two nodes call themselves by one name.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            # Over NFS the answer to the first try may be lost and the client try again: the number of names tells.
            return _names(temporary) == 2
        except OSError as problem:
            # So it may be lost for good, where the file system is mounted soft.
            with suppress(OSError):
                if _names(temporary) == 2:
                    return True
            if problem.errno in NO_LINKS:
                text = f"{problem.strerror} (jobs are claimed by hard links, which its file system must have)"
                raise OSError(problem.errno, text, str(path)) from problem
            raise
    finally:
        with suppress(OSError):
            temporary.unlink()
    return True


def _names(path: Path) -> int:
    """How many names a file has, as the server has it now: a client of NFS asks it when a file is opened, and may
    believe for seconds what it was told before."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_nlink


def present(folder: Path) -> frozenset[str]:
    """The names in a folder of reports, as the server of a network file system has them now. Raises OSError.

    Opening a folder makes a client of NFS ask whether it has changed, and drop what it holds to be not there; asking
    for one file after the other would be answered out of its memory.
    """
    with os.scandir(folder) as entries:
        return frozenset(entry.name for entry in entries)


def read_claim(path: Path) -> Claim | None:
    """Who has the attempt, None while nobody has it. A claim that nobody can read is one all the same."""
    data = _read(path)
    if data is None:
        return None
    values = _known(data, Claim)
    with suppress(TypeError):
        lists = {name: tuple(str(word) for word in values.get(name, ())) for name in ("gpus", "others")}
        return Claim(**{**values, **lists})
    return Claim(at=0.0)


def write_ended(path: Path, ended: Ended) -> None:
    """Tells of an end. Raises OSError, as on a full disk or over a quota."""
    atomic_write(path, json.dumps(asdict(ended)).encode() + b"\n")


def read_ended(path: Path) -> Ended | None:
    """How the attempt has ended, None while it has not, or where the file is none of ours."""
    data = _read(path)
    if data is None:
        return None
    try:
        return Ended(**_known(data, Ended))
    except TypeError:
        return None


def _known(data: bytes, kind: type[Claim | Ended]) -> dict[str, Any]:
    """What a file says, without words of a later version; nothing where it says what can't be, for that is reckoned
    with later, far from here."""
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    types = {each.name: str(each.type) for each in fields(kind)}
    values = {name: value for name, value in told.items() if name in types} if isinstance(told, dict) else {}
    return values if all(_fits(types[name], value) for name, value in values.items()) else {}


def _fits(kind: str, value: object) -> bool:
    if isinstance(value, (int, float)) and not -_MOST < value < _MOST:
        return False
    return isinstance(value, _KINDS[kind])


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError as problem:
        if problem.errno in NOT_NOW:
            return None
        raise
