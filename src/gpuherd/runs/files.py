"""Files of a run: written whole or not at all, written once where the first one stays, by one writer at a time.

What ``atomic`` does, with errors that say what happened to which file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpuherd.atomic import atomic_write, put_first, remove_strays, replacing, sync_folder
from gpuherd.errors import CannotWrite
from gpuherd.jobs import clock


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is there as a whole: its digest, and how many lines it has."""

    sha256: str
    lines: int


@contextmanager
def writing_once(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes ``path`` when the block ends, unless ``path`` is there by then: the first one stays.

    Of two programs that begin the same work at one moment, both go on with what the first has written. Raises
    CannotWrite.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Named like what ``atomic`` leaves behind, so that it is tidied away with that.
        temporary = path.parent / f".{path.name[:100]}.{secrets.token_hex(6)}.tmp"
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            put_first(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as problem:
        raise CannotWrite(f"can't write {path}: {problem.strerror}") from None


def write_once(path: Path, data: bytes) -> bytes:
    """Writes ``data`` where there is nothing yet. Returns what is there then. Raises CannotWrite."""
    with writing_once(path) as file:
        file.write(data)
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CannotWrite(f"can't read {path}, which was just written: {problem.strerror}") from None


def write_lines(target: Path, lines: Iterable[bytes]) -> Written:
    """Writes lines, whole or not at all. Raises CannotWrite."""
    digest, count = hashlib.sha256(), 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            for line in lines:
                whole = line + b"\n"
                digest.update(whole)
                file.write(whole)
                count += 1
    except OSError as problem:
        raise CannotWrite(f"can't write {target}: {problem.strerror}") from None
    return Written(digest.hexdigest(), count)


def write_values(target: Path, values: Mapping[str, Any]) -> None:
    """Writes JSON for people and programs, whole or not at all. Raises CannotWrite."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, json.dumps(values, indent=2, allow_nan=False, default=str).encode() + b"\n")
    except OSError as problem:
        raise CannotWrite(f"can't write {target}: {problem.strerror}") from None


def sha256_of(path: Path) -> str:
    """A file's digest in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Until the block ends nobody else who asks for it writes into the folder, which is made where it isn't there.

    What writers left behind that were killed is removed. Raises CannotWrite, for what goes wrong in the block too.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_strays(folder, clock.wall())
            yield
    except OSError as problem:
        raise CannotWrite(f"can't write into {folder}: {problem.strerror}") from None
