"""Puts exported files into their folder: all of them or none over others, each whole, for their owner alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpuherd.errors import CannotWrite, UsageError
from gpuherd.jobs.durable import replacing


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
            with replacing(folder / name, 0o700 if name.endswith(".sh") else 0o600) as file:
                file.write(text.encode("utf-8", "surrogateescape"))
    except OSError as problem:
        raise CannotWrite(f"can't write in {folder}: {problem.strerror}") from problem
