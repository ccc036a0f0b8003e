"""A folder that is there as a whole or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuherd.jobs.durable import sync_folder


def aside(folder: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return folder.with_name(f".{folder.name}.tmp")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder`` to be filled; when the block ends it takes its place, synced. Raises OSError.

    What stood there before is there until then (or, for the moment of the exchange, as ``.<name>.old``). When the block
    raises, it stays. A kill can leave ``.<name>.tmp`` behind, which the next start removes.
    """
    temporary = aside(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    publish(folder)


def publish(folder: Path) -> None:
    """Lets what lies aside take its name, all of it synced before."""
    temporary = aside(folder)
    for path in temporary.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            _sync(path)
    sync_folder(temporary)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def settle(folder: Path) -> None:
    """Ends what a kill has left half done: the old folder gets its name back where the new one did not get it."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for stray in (old, aside(folder)):
        with suppress(FileNotFoundError):
            shutil.rmtree(stray)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
