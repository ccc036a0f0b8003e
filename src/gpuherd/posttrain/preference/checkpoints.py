"""Checkpoints of TRL's trainers, complete or absent.

transformers writes into ``checkpoint-N`` file after file, in its place, and takes the newest folder for the newest
checkpoint: that of a run which was killed meanwhile may be half a one. So a folder counts only when ``whole.json`` lies
in it, which is written last, when all files are on the disk; and it is the first to go when a checkpoint is removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuherd.atomic import atomic_write, sync_folder
from gpuherd.errors import UsageError
from gpuherd.posttrain.engine.checkpoints import differing

logger = logging.getLogger(__name__)

WHOLE = "whole.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def newest(folder: Path, identity: Mapping[str, Any]) -> Path | None:
    """The newest whole checkpoint in a folder; None where there is none.

    Raises UsageError where it is of another training, and says in what they differ.
    """
    for _, path in reversed(_all(folder)):
        said = _read(path / WHOLE)
        if said is None:
            logger.warning("%s is no whole checkpoint (its writer was stopped); it is passed over", path)
            continue
        check_identity(path, said.get("identity"), identity)
        return path
    return None


def check_identity(path: Path, there: Any, identity: Mapping[str, Any]) -> None:
    """Raises UsageError where what lies at ``path`` is of another training than ``identity``."""
    other = there if isinstance(there, Mapping) else {}
    wanted = json.loads(json.dumps(identity))
    for name in differing(wanted, other):
        raise UsageError(
            f"{path} is of another training: its {name} is {_short(other.get(name))}, and here it is "
            f"{_short(wanted.get(name))}; choose another folder, or remove that one"
        )


def finish(checkpoint: Path, identity: Mapping[str, Any]) -> None:
    """Makes a checkpoint that is written out a whole one, once all of it is on the disk. Raises OSError."""
    sync_tree(checkpoint)
    atomic_write(checkpoint / WHOLE, json.dumps({"identity": identity}).encode() + b"\n")
    sync_folder(checkpoint.parent)


def rotate(folder: Path, keep: int) -> None:
    """Removes all but the newest ``keep`` whole checkpoints, and those that are not whole. Raises OSError."""
    whole = [path for _, path in _all(folder) if (path / WHOLE).exists()]
    for _, path in _all(folder):
        if path not in whole[-keep:]:
            (path / WHOLE).unlink(missing_ok=True)
            sync_folder(path)
            shutil.rmtree(path)


def sync_tree(folder: Path) -> None:
    """Waits until all files of a folder are on the disk. Raises OSError."""
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(parent) / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


def _all(folder: Path) -> list[tuple[int, Path]]:
    """All folders of checkpoints with their steps, the oldest first."""
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(name[1]), path) for name, path in named if name is not None)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:79] + "…"
