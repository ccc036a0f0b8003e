"""Runs of post-training as a page and as figures for papers.

Here: which output of post-training a folder is. Imports little, since every ``gpuherd report`` reads it.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuherd.posttrain.runs.folder import OutputDirectory, RoundsDirectory, TrainDirectory


class OutputKind(StrEnum):
    """The command that made a folder."""

    ROUNDS = "gpuherd posttrain"
    TRAINING = "gpuherd train"

    def directory(self, folder: Path) -> OutputDirectory:
        """The paths in such a folder."""
        return (RoundsDirectory if self is OutputKind.ROUNDS else TrainDirectory)(folder)


def output_kind(folder: Path) -> OutputKind | None:
    """Which kind of output a folder is; None where it is none of ours."""
    kind = json_object(folder / "run.json").get("kind")
    kinds = {RoundsDirectory.kind: OutputKind.ROUNDS, TrainDirectory.kind: OutputKind.TRAINING}
    return kinds.get(kind) if isinstance(kind, str) else None


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
