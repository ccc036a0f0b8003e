"""A model, as the user named it, as an architecture: from its weights' headers, its config, or shipped data.

Knows in which order a name is looked up: what is on this machine first, then known names, then the Hugging Face Hub.
Reads headers and configs only.
"""

from __future__ import annotations

from pathlib import Path

from gpuherd.errors import BadModel, MissingModel
from gpuherd.models.names import ModelRef, parse_model, shown
from gpuherd.models.plan import from_config
from gpuherd.models.plan.architecture import Architecture
from gpuherd.models.plan.known import KnownModel, known_model, nearest_names


def read_architecture(text: str) -> Architecture:
    """The architecture of a model.

    Args:
        text: a folder (config.json, with weights or without), a weight file, a known name in any case
            (``llama-3.1-70b``), or a Hugging Face id. What exists on this machine wins over a known name.

    Raises:
        MissingModel: it is not to be had; names of known models that are near are said.
        BadModel: it can't be a model, its architecture is not known, or config and weights disagree.
    """
    known = known_model(text)
    if known is not None and not _exists(text):
        return _of_known(known, text)
    ref = parse_model(text)
    if ref.path is not None:
        return _local(ref.path, text)
    return _from_hub(ref)


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _of_known(known: KnownModel, text: str) -> Architecture:
    from dataclasses import replace

    return replace(from_config.architecture_of(known.config, text), source="known")


def _local(path: Path, text: str) -> Architecture:
    """A folder or file of this machine."""
    from gpuherd.models.checkpoint import read_json

    folder = path if path.is_dir() else path.parent
    config = folder / "config.json"
    if not config.exists():
        raise MissingModel(f"{shown(text)} has no config.json")
    return from_config.architecture_of(read_json(config), text)


def _from_hub(ref: ModelRef) -> Architecture:
    near = nearest_names(ref.text)
    hint = f"; near known names: {', '.join(near)}" if near else ""
    raise BadModel(f"{shown(ref.text)} is no known name and no path{hint}")
