"""Writing a file so that it is there as a whole or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def atomic_write(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data``: temporary file beside it, sync, rename, sync of the folder. Raises OSError.

    A reader sees the old content or the new, never a part. A kill can leave a ``.<name>.*.tmp`` behind, nothing else.
    """
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """The same for what is written piece by piece: a binary file that takes the place of ``path`` when the block ends.

    When the block raises, the old content stays and the temporary file is removed. Raises OSError.

    Args:
        mode: who may do what with it; None for what the user's umask lets others do with a new file.
    """
    # Not by tempfile: a leader on a node begins once for each attempt, and that is slow to import.
    temporary = path.with_name(f".{path.name[:100]}.{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # whatever the umask
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def private_write(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data`` as ``atomic_write`` does, for its owner alone. Raises OSError."""
    with replacing(path, 0o600) as file:
        file.write(data)


def remove_strays(folder: Path, before: float) -> None:
    """Removes what ``atomic_write`` left in ``folder`` when it was killed, if last written before this wall-clock time.

    The caller knows that nobody who began before then still writes here.
    """
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):
            if path.is_file() and path.stat().st_mtime < before:
                path.unlink()


def append_line(path: Path, line: str) -> None:
    """Adds one line to a log of records, in one write, so that two writers' lines don't mix. Raises OSError."""
    data = (line.replace("\n", " ") + "\n").encode("utf-8", "backslashreplace")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in a folder survive a power cut. A file system that can't is left alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
