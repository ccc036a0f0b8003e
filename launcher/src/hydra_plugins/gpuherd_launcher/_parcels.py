"""What a sweep and its jobs hand each other: pickles in the sweep's own folder.

A pickle can do anything when it is read. So they are written for their owner alone, and only a file that belongs to
whoever reads it, and that nobody else can write, is read.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from gpuherd.atomic import sync_folder
from gpuherd.errors import GpuherdError


class NotOurs(GpuherdError):
    """A file of the sweep's folder could have been written by somebody else, and is not read."""


def write(path: Path, *things: Any, lasting: bool = False) -> None:
    """Writes the things into a file, whole or not at all; the first can be read before the others.

    Functions and classes of the program itself go by value, those of modules by name. ``lasting``: it survives a power
    cut. Raises what can't be pickled's own error, and OSError.
    """
    _write(path, _pickled(things), lasting)


def write_named(folder: Path, kind: str, *things: Any) -> Path:
    """As ``write``, into a file that is named by what is in it; the path. No other content ever takes its place."""
    pickled = _pickled(things)
    path = folder / f"{kind}-{hashlib.sha256(pickled).hexdigest()[:16]}.pickle"
    _write(path, pickled, lasting=False)
    return path


def _pickled(things: Sequence[Any]) -> bytes:
    # Before any file is begun: what can't be pickled leaves none.
    return b"".join(cloudpickle.dumps(thing) for thing in things)


def _write(path: Path, pickled: bytes, lasting: bool) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # for its owner alone
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pickled)
            file.flush()
            if lasting:
                os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if lasting:
        sync_folder(path.parent)


def open_ours(path: Path) -> BinaryIO:
    """The file, open for reading. Raises NotOurs, and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        file.close()
        raise NotOurs(f"{path} belongs to somebody else, or others can write it; it is not read")
    return file


def read(file: BinaryIO) -> Any:
    """The next thing of a file that ``open_ours`` has opened."""
    return pickle.load(file)  # noqa: S301 - our own file, see above


def read_one(path: Path) -> Any:
    """The only thing of a file. Raises NotOurs, OSError, and what unpickling raises."""
    with open_ours(path) as file:
        return read(file)
