"""Files that are written once: whole or not at all, and never over one that is there already."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gpuherd.atomic import put_first, sync_folder
from gpuherd.errors import CannotWrite


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
