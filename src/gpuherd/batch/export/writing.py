"""Puts exported files into their folder: all of them or none over others, each whole, for their owner alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gpuherd.errors import CannotWrite, UsageError


def write(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Writes the files, and makes ``logs`` beside them. Commands and environments may hold secrets.

    Raises UsageError when one of them is there already, unless ``force``; nothing is written then. CannotWrite.
    """
    there = sorted(name for name in files if (folder / name).exists() or (folder / name).is_symlink())
    if there and not force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UsageError(f"{folder / there[0]}{more} exists; --force replaces it, or choose another --output")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _write(folder / name, text.encode("utf-8", "surrogateescape"))
    except OSError as problem:
        raise CannotWrite(f"can't write in {folder}: {problem.strerror}") from problem


def _write(path: Path, data: bytes) -> None:
    import tempfile

    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:  # mkstemp makes it for its owner alone
            file.write(data)
            if path.suffix == ".sh":
                os.fchmod(file.fileno(), 0o700)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
