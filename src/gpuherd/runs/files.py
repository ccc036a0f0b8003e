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
class WrittenLines:
    """A file that is there as a whole: its digest, and how many lines it has."""

    sha256: str
    lines: int


@contextmanager
def raising_cannot_write(place: Path | str) -> Iterator[None]:
    """Raises CannotWrite, with the name of the place, for an OSError in the block."""
    try:
        yield
    except OSError as problem:
        raise CannotWrite(f"can't write {place}: {problem.strerror or problem}") from None


@contextmanager
def creating_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes ``path`` when the block ends, unless ``path`` is there by then: the first one stays.

    Of two programs that begin the same work at one moment, both continue with what the first has written. Raises
    CannotWrite.
    """
    with raising_cannot_write(path):
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


def create_file(path: Path, data: bytes) -> bytes:
    """Writes ``data`` where there is nothing yet. Returns what is there then. Raises CannotWrite."""
    with creating_file(path) as file:
        file.write(data)
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CannotWrite(f"can't read {path}, which was just written: {problem.strerror}") from None


def write_file(target: Path, data: bytes) -> None:
    """Writes a file, and its folder if need be, whole or not at all. Raises CannotWrite."""
    with raising_cannot_write(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, data)


def write_values(target: Path, values: Mapping[str, Any]) -> None:
    """The same with JSON for people and programs."""
    write_file(target, json.dumps(values, indent=2, allow_nan=False, default=str).encode() + b"\n")


def write_lines(target: Path, lines: Iterable[bytes]) -> WrittenLines:
    """Writes lines, given without line breaks, whole or not at all. Raises CannotWrite."""
    digest, count = hashlib.sha256(), 0
    with raising_cannot_write(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            for line in lines:
                whole = line + b"\n"
                digest.update(whole)
                file.write(whole)
                count += 1
    return WrittenLines(digest.hexdigest(), count)


def sha256_of(path: Path) -> str:
    """A file's digest in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is made if it is not there; waits for another process that holds it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def single_writer(folder: Path) -> Iterator[None]:
    """Until the block ends no other process that asks for it writes into the folder, which is made if need be.

    Removes what killed writers left behind. Raises CannotWrite, for an OSError in the block too.
    """
    with raising_cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            remove_strays(folder, clock.wall())
            yield
