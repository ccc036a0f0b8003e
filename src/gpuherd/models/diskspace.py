"""Whether a disk has room for what is to be written, before it is begun. Knows nothing of what that is."""

from __future__ import annotations

import shutil
from pathlib import Path

from gpuherd.errors import CannotWrite

_MB = 1 << 20


def check_space(folder: Path, nbytes: int, what: str, *, remedy: str) -> None:
    """Raises CannotWrite when the disk of ``folder``, which need not exist yet, has no room for so many bytes.

    Args:
        folder: where it will be written.
        nbytes: how much.
        what: whose bytes they are, as the beginning of the sentence.
        remedy: what to do, as the end of the sentence.
    """
    there = folder.absolute()
    while not there.is_dir() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        return  # a disk that can't be asked may have room
    if nbytes > free:
        raise CannotWrite(
            f"{what} takes {_mb(nbytes)} MB on the disk of {folder}, where {free // _MB:,} MB are free; {remedy}"
        )


def _mb(nbytes: int) -> str:
    return f"{-(-nbytes // _MB):,}"
